"""Any file of requests as one stream: what is in it is seen from its first record.

picbench's own forms are here, those of others in `logs.py`. Where requests mark no chunks, these
are found (`found_chunks.py`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np

from picbench.errors import ConfigError, DataError
from picbench.workloads.traffic.file import FORMAT, read_requests
from picbench.workloads.traffic.found_chunks import find_chunks
from picbench.workloads.traffic.lines import json_objects, numbered_lines, refusing
from picbench.workloads.traffic.logs import READERS, Reader
from picbench.workloads.traffic.ragpulse import LENGTHS, TRACE, ragpulse_requests
from picbench.workloads.traffic.trace import (
    INVENTED,
    ContentTable,
    Encode,
    PromptLine,
    Trace,
    TracedRequest,
    TraceSegment,
)

#: Lines that are looked at to tell whether a trace has texts, token ids or chunks.
_LOOKED_AT = 100

#: Tokens that a reply has where a trace does not say it.
_OUTPUT = 16

_LINES_HINT = (
    'a line is {"arrival": 0.5, "output": 80, "parts": [{"text": "..."}, {"chunk": "a", "tokens": '
    "300}]}; see docs/traffic.md"
)


def read_trace_file(
    path: Path, encode: Callable[[], Encode], told: Callable[[Iterator[Any]], Iterator[Any]] = iter
) -> Trace:
    """Open a file of requests, or a folder of sessions or of RAGPulse's files.

    `encode` loads a tokenizer, and is called only for texts. `told` says how many requests of a log
    were read, all of which are before the first is given. Raises ConfigError for a file that is
    missing or has no requests.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files or any((path / name).exists() for name in (TRACE, *LENGTHS)):
            return Trace("RAGPulse", False, ragpulse_requests(path))
    elif not path.exists():
        raise ConfigError(f"{path}: no such file", hint=_LINES_HINT)
    opened = [_reader_of(file) for file in files]
    reader = next((found for found, _ in opened if found), None)
    if reader is None:
        return _own(files[0], opened[0][1], encode)
    exact = reader.sees == "contents"
    table = ContentTable(exact=exact, load=encode, keeps=exact)
    found = chain.from_iterable(each.read(lines) for each, lines in opened if each)
    requests = _traced(found, table, ordered=not exact)
    if exact:
        requests = _in_order(told(requests), table)
    kinds = ", ".join(dict.fromkeys(each.name for each, _ in opened if each))
    return Trace(kinds, exact, requests, reader.sees, reader.note)


def _reader_of(path: Path) -> tuple[Reader | None, Iterator[tuple[str, str]]]:
    """What reads a file, None for picbench's own forms, and its lines."""
    first = next(numbered_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: no requests", hint=_LINES_HINT)
    record = {}
    if first[1].lstrip()[:1] in ("{", "["):
        with suppress(DataError, StopIteration):  # Whoever reads it says what is wrong.
            record = next(json_objects(numbered_lines(path)))[1]
    fits = (each for each in READERS if each.fits(record, first[1]))
    return next(fits, None), numbered_lines(path)


def _own(path: Path, lines: Iterator[tuple[str, str]], encode: Callable[[], Encode]) -> Trace:
    """A request file of `picbench traffic`, or lines of `PromptLine`."""
    first = list(islice(lines, _LOOKED_AT))
    if f'"{FORMAT}"' in first[0][1]:
        return Trace("picbench traffic", True, _drawn_requests(path))
    exact = any(_has_tokens(line) for _, line in first)
    found = exact and not any('"chunk"' in line for _, line in first)
    table = ContentTable(exact=exact, load=encode, keeps=found)
    requests = _traced(_prompt_lines(chain(first, lines)), table, ordered=True)
    return Trace("JSON Lines", exact, _with_chunks(requests, table) if found else requests)


def _prompt_lines(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, PromptLine]]:
    for source, line in lines:
        with refusing(source, _LINES_HINT):
            found = PromptLine.model_validate_json(line.rstrip())
        yield source, found


def _traced(
    lines: Iterator[tuple[str, PromptLine]], table: ContentTable, *, ordered: bool
) -> Iterator[TracedRequest]:
    """The requests of lines, which must be `ordered` or not.

    Raises DataError with file, line and field.
    """
    clock: float | None = None
    for source, found in lines:
        with refusing(source, _LINES_HINT):
            early = found.arrival is not None and clock is not None and found.arrival < clock
            if early and ordered:
                raise ValueError(f"field 'arrival': {found.arrival} is earlier than {clock} before")
            segments = table.of_prompt(found.parts)
            reply = table.of_content(found.reply, "reply") if found.reply else None
            output = _output_of(found, reply)
        clock = found.arrival if found.arrival is not None else clock
        if not segments:
            raise DataError(f"{source}: field 'parts': no tokens", hint=_LINES_HINT)
        yield TracedRequest(segments, output, found.arrival, reply, source)


def _in_order(requests: Iterator[TracedRequest], table: ContentTable) -> Iterator[TracedRequest]:
    """The requests of a log by their times, which count where all have one."""
    every = list(requests)
    if all(request.arrival is not None for request in every):
        every.sort(key=lambda request: request.arrival or 0)
    else:
        every = [replace(request, arrival=None) for request in every]
    yield from _with_chunks(every, table)


def _with_chunks(given: Iterable[TracedRequest], table: ContentTable) -> Iterator[TracedRequest]:
    """The requests, with chunks found in those that mark none.

    Messages that a prompt has in common with the beginning of an earlier one are searched once.
    """
    requests = list(given)
    plain = [not any(segment.chunk for segment in request.segments) for request in requests]
    followers: dict[tuple[int, int | None], int] = {}
    owners, rests, after, common = [0], [], [], []
    for number, request in enumerate(requests):
        node, shared, tokens = 0, 0, 0
        for segment in request.segments if plain[number] else ():
            if (node, segment.content) not in followers:
                break
            node, shared = followers[node, segment.content], shared + 1
            tokens += segment.length
        common.append((owners[node], tokens))
        after.append(node)
        rest = request.segments[shared:] if plain[number] else ()
        for segment in rest:
            followers[node, segment.content] = node = len(owners)
            owners.append(number)
        rests.append(_joined(rest))
    found = find_chunks(rests, after)
    del rests
    for number, request in enumerate(requests):
        owner, tokens = common[number]
        if not plain[number]:
            yield request
            continue
        kept = [span for span in found[owner] if span[1] <= tokens] if tokens else []
        found[number] = kept + [(tokens + a, tokens + b) for a, b in found[number]]
        yield replace(request, segments=_cut(request.segments, found[number], table))


def _joined(segments: Sequence[TraceSegment]) -> "np.ndarray[Any, Any]":
    """Token ids of four bytes; invented ones are larger than vocabularies."""
    ids = np.frombuffer(b"".join(s.tokens or b"" for s in segments), np.int64)
    return np.where(ids < INVENTED, ids, ids % (1 << 30) + (1 << 30)).astype(np.int32)


def _cut(
    segments: tuple[TraceSegment, ...], spans: Sequence[tuple[int, int]], table: ContentTable
) -> tuple[TraceSegment, ...]:
    """Segments cut so that each span is one, a chunk."""
    ends = list(accumulate(segment.length for segment in segments))
    places = [end for end in ends if not any(a < end < b for a, b in spans)]
    cuts = sorted({0, *places, *chain.from_iterable(spans)})
    if len(cuts) == len(segments) + 1 and not spans:
        return segments
    data = b"".join(segment.tokens or b"" for segment in segments)
    starts, chunks, made, at = [0, *ends], {a for a, _ in spans}, [], 0
    for begin, end in pairwise(cuts):
        while ends[at] <= begin:
            at += 1
        whole = (begin, end) == (starts[at], ends[at]) and begin not in chunks
        made.append(
            segments[at]
            if whole
            else table.of_bytes(
                data[begin * 8 : end * 8], chunk=begin in chunks, role=segments[at].role
            )
        )
    return tuple(made)


def _has_tokens(line: str) -> bool:
    try:
        parts = json.loads(line).get("parts")
    except (ValueError, RecursionError, AttributeError):
        return False
    return isinstance(parts, list) and any(
        isinstance(part, dict) and ("text" in part or isinstance(part.get("tokens"), list))
        for part in parts
    )


def _drawn_requests(path: Path) -> Iterator[TracedRequest]:
    """The requests of a file of `picbench traffic`, as a run serves them."""
    table, found = ContentTable(exact=True), read_requests(path).stream
    for sample, arrival in zip(found.samples, found.arrivals or repeat(None), strict=False):
        segments = []
        for segment in sample.segments:
            made = table.of_tokens(segment.tokens, chunk=segment.kind == "chunk")
            given = segment.before
            before = table.of_tokens(given.tokens, chunk=False) if given else None
            segments.append(made._replace(before=before))
        yield TracedRequest(tuple(segments), sample.max_tokens, arrival, None, sample.source)


def _output_of(line: PromptLine, reply: TraceSegment | None) -> int:
    """Generated tokens: a reply says its own length. Raises ValueError for another `output`."""
    if reply is None:
        return line.output or _OUTPUT
    if not reply.length:
        raise ValueError("field 'reply': no tokens")
    if line.output not in (None, reply.length):
        raise ValueError(f"field 'output': {line.output}, but 'reply' has {reply.length} tokens")
    return reply.length
