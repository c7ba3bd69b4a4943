"""Request files of `picbench traffic` as traces: their token ids are known."""

from collections.abc import Iterator
from pathlib import Path

from picbench.errors import DataError
from picbench.profile.traces.content_table import ContentTable
from picbench.profile.traces.traced_request import TracedRequest, TraceSegment


def file_requests(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TracedRequest]:
    """The requests of a file, after its first line. Raises DataError with file and line."""
    from picbench.workloads.sources.row_schema import first_problem
    from picbench.workloads.traffic.file_schema import (
        ChunkSchema,
        HeaderSchema,
        LineSchema,
        UseSchema,
    )

    table = ContentTable(exact=True)
    chunks: dict[str, TraceSegment] = {}
    for place, (number, line) in enumerate(lines):
        source = f"{path}:{number}"
        try:
            if not place:
                HeaderSchema.model_validate_json(line)
                continue
            found = LineSchema.validate_json(line)
        except ValueError as error:
            raise DataError(f"{source}: {first_problem(error)}", hint=_HINT) from error
        if isinstance(found, ChunkSchema):
            chunks[found.chunk] = table.of_tokens(found.tokens, chunk=True)
            continue
        segments = []
        for content in found.parts:
            if not isinstance(content, UseSchema):
                segments.append(table.of_tokens(content.tokens, chunk=False))
            elif content.chunk in chunks:
                segments.append(chunks[content.chunk])
            else:
                raise DataError(
                    f"{source}: field 'parts': no chunk is called {content.chunk!r} so far",
                    hint=_HINT,
                )
        yield TracedRequest(tuple(segments), found.max_tokens, found.arrival, None, source)


_HINT = "picbench traffic makes such files"
