"""RAGPulse's traces of real RAG requests, as traffic: arrivals, passages, sessions, lengths.

RAGPulse (arXiv 2511.12979, github.com/flashserve/RAGPulse) publishes which passages each request of
a university's question service had, when it came and in which session, but no text: every part of a
prompt is an id with a length in tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from picbench.errors import ConfigError, DataError
from picbench.workloads.traffic.lines import json_objects, numbered_lines, refusing
from picbench.workloads.traffic.trace import ContentTable, TracedRequest

if TYPE_CHECKING:
    from picbench.workloads.traffic.file_schema import TraceLine

_HINT = "see RAGPulse's README"

#: The trace, one request a line, and the lengths of its parts.
TRACE = "0_trace.jsonl"
LENGTHS = (
    "1_sys_prompt.jsonl",
    "2_passages.jsonl",
    "3_history.jsonl",
    "4_user_input.jsonl",
    "5_web_search.jsonl",
)

#: What was retrieved: each such part is a chunk, all others are text.
RETRIEVED = ("passages_ids", "web_search")


def ragpulse_requests(folder: Path) -> Iterator[TracedRequest]:
    """The requests in order of arrival, in seconds from the first.

    Raises ConfigError for a missing file, DataError with file and line.
    """
    for name in (TRACE, *LENGTHS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"`trace` {folder}: no {name} in it",
                hint="the folder data of RAGPulse's repository",
            )
    lengths, table = read_lengths(folder), ContentTable(exact=False)
    lines = sorted(read_lines(folder / TRACE), key=lambda line: line[1].timestamp)
    for source, line in lines:
        segments = []
        for kind, named in line.hash_ids.items():
            for number in named:
                if number not in lengths:
                    raise DataError(
                        f"{source}: field 'hash_ids': part {number} has no length",
                        hint=f"in {', '.join(LENGTHS)}",
                    )
                made = table.of_length(lengths[number], chunk=kind in RETRIEVED)
                segments.append(table.name("part", str(number), made)._replace(chunk=made.chunk))
        arrival = line.timestamp - lines[0][1].timestamp
        about = line.output_length, arrival, None, source, line.session_id
        yield TracedRequest(tuple(segments), *about)


def read_lengths(folder: Path) -> dict[int, int]:
    """Tokens of each part by its id; ids are of one numbering in all files.

    Raises DataError with file and line for a malformed line.
    """
    from picbench.workloads.traffic.file_schema import TracePart

    found: dict[int, int] = {}
    for name in LENGTHS:
        for source, record in json_objects(numbered_lines(folder / name), _HINT):
            with refusing(source, _HINT):
                part = TracePart.model_validate(record)
            found[part.id] = part.token_length
    return found


def read_lines(path: Path) -> Iterator[tuple[str, "TraceLine"]]:
    """The requests of a trace, each with its place.

    Raises DataError with file and line for a malformed line.
    """
    from picbench.workloads.traffic.file_schema import TraceLine

    for source, record in json_objects(numbered_lines(path), _HINT):
        with refusing(source, _HINT):
            line = TraceLine.model_validate(record)
        yield source, line
