"""RAGPulse's trace: which passages real requests had, and when; no texts."""

from collections.abc import Iterator
from pathlib import Path

from picbench.errors import ConfigError, DataError
from picbench.profile.traces.content_table import ContentTable
from picbench.profile.traces.traced_request import TracedRequest
from picbench.workloads.traffic.ragpulse import LENGTHS, RETRIEVED, TRACE, read_lengths, read_lines


def ragpulse_requests(folder: Path) -> Iterator[TracedRequest]:
    """The requests in order of arrival, in seconds from the first.

    Raises ConfigError where a file is missing, DataError with file and line.
    """
    for name in (TRACE, *LENGTHS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder}: no {name} in it", hint="the folder data of RAGPulse's repository"
            )
    lengths, table = read_lengths(folder), ContentTable(exact=False)
    lines = sorted(read_lines(folder / TRACE), key=lambda line: line.content.timestamp)
    for line in lines:
        segments = []
        for kind, named in line.content.hash_ids.items():
            for number in named:
                if number not in lengths:
                    raise DataError(
                        f"{line.source}: field 'hash_ids': part {number} has no length",
                        hint=f"in {', '.join(LENGTHS)}",
                    )
                made = table.of_length(lengths[number], chunk=kind in RETRIEVED)
                segments.append(table.name("part", str(number), made)._replace(chunk=made.chunk))
        yield TracedRequest(
            tuple(segments),
            line.content.output_length,
            line.content.timestamp - lines[0].content.timestamp,
            None,
            line.source,
        )
