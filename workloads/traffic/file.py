"""Request files: traffic that can be replayed, as JSON lines.

The first line is a `Header`. Each other line is a chunk or a request:

    {"chunk": "c0", "text": "...", "tokens": [5, 6], "preload": false}
    {"chunk": "c1", "text": "...", "tokens": [7], "before": {"text": "...", "tokens": [5, 6]}}
    {"request": "r0", "user": 0, "arrival": 0.25, "max_tokens": 80, "answers": ["..."],
     "parts": [{"text": "...", "tokens": [1, 2]}, {"chunk": "c0"}, {"text": "...", "tokens": [3]}]}

A chunk precedes the first request that contains it. `before` is what precedes it in its
document, whether or not a request has that, too. `arrival` is in seconds from the start, null
in a closed loop. `preload` marks chunks that are in the cache before the first request. Runs send
the token ids; the text is for readers, and to check that a model's tokenizer makes the same ids.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, DataError
from picbench.files import write_whole
from picbench.workloads.prompts.tokens import Encoder, Tokenizer
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.draw import Stream

FORMAT, VERSION = "picbench-requests", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a request file.

    `synthetic` is whether the rows were generated. `settings` are the parameters of the draw, for
    readers. `sha256` covers all other lines; None in a file that was written by hand.
    """

    dataset: str
    synthetic: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """The content of a request file; `fingerprint` is the SHA-256 of all lines but the first."""

    header: Header
    stream: Stream
    fingerprint: str


def write_requests(path: Path, header: Header, stream: Stream) -> str:
    """Write a request file, whole or not at all; returns its fingerprint.

    Raises ConfigError where it cannot be written.
    """
    body = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(stream)).encode()
    fingerprint = hashlib.sha256(body).hexdigest()
    head = {"format": FORMAT, "version": VERSION} | asdict(header) | {"sha256": fingerprint}
    try:
        write_whole(path, json.dumps(head, ensure_ascii=False).encode() + b"\n" + body)
    except OSError as error:
        raise ConfigError(
            f"`output` {path}: cannot be written: {error.strerror}", hint="name another file"
        ) from error
    return fingerprint


def read_requests(path: Path) -> Requests:
    """Read a request file.

    Raises ConfigError for a file of another format or version, or one that was edited, DataError
    with file and line for a malformed line.
    """
    try:
        first, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise ConfigError(
            f"`requests` {path}: {error.strerror}", hint="picbench traffic makes such files"
        ) from error
    header = _read_header(first, path)
    fingerprint = hashlib.sha256(body).hexdigest()
    if header.sha256 not in (None, fingerprint):
        raise ConfigError(
            f"`requests` {path}: was changed after it was written",
            hint='make it again, or set "sha256" to null in its first line',
        )
    return Requests(header, _Reader(path, header.dataset).read(body), fingerprint)


def _lines(stream: Stream) -> Iterator[dict[str, Any]]:
    names: dict[SampleSegment, str] = {}
    preload = set(stream.preload)

    def named(segments: Iterable[SampleSegment]) -> Iterator[dict[str, Any]]:
        for segment in segments:
            if segment.kind == "chunk" and segment not in names:
                names[segment] = f"c{len(names)}"
                document = {"before": _content(segment.before)} if segment.before else {}
                yield {
                    "chunk": names[segment],
                    **_content(segment),
                    "preload": segment in preload,
                    **document,
                }

    yield from named(stream.preload)
    for number, sample in enumerate(stream.samples):
        yield from named(sample.segments)
        yield {
            "request": sample.id,
            "user": stream.users[number],
            "arrival": stream.arrivals[number] if stream.arrivals else None,
            "max_tokens": sample.max_tokens,
            "answers": list(sample.answers),
            "parts": [
                {"chunk": names[p]} if p.kind == "chunk" else _content(p) for p in sample.parts
            ],
        }


def _content(segment: SampleSegment) -> dict[str, Any]:
    return {"text": segment.text, "tokens": list(segment.tokens)}


def _read_header(line: bytes, path: Path) -> Header:
    from picbench.workloads.traffic.file_schema import HeaderSchema

    try:
        found = HeaderSchema.model_validate_json(line)
    except ValueError as error:
        raise ConfigError(
            f"`requests` {path}: no request file of version {VERSION}",
            hint="picbench traffic makes such files",
        ) from error
    return Header(**found.model_dump(exclude={"format", "version"}))


class _Reader:
    """Reads all lines after the first."""

    def __init__(self, path: Path, dataset: str) -> None:
        self._path = path
        self._dataset = dataset
        self._chunks: dict[str, SampleSegment] = {}
        self._preload: list[SampleSegment] = []
        self._samples: dict[str, Sample] = {}
        self._users: list[int] = []
        self._arrivals: list[float | None] = []

    def read(self, body: bytes) -> Stream:
        for number, line in enumerate(body.splitlines(), start=2):
            self._take(line, f"{self._path}:{number}")
        times = [time for time in self._arrivals if time is not None]
        if not self._samples:
            raise DataError(f"{self._path}: no requests", hint="`requests`")
        if times and len(times) < len(self._samples):
            raise DataError(
                f"{self._path}: some requests have an arrival time and some have none",
                hint="give all of them one, or none",
            )
        samples = tuple(self._samples.values())
        return Stream(samples, tuple(self._users), tuple(times) or None, tuple(self._preload))

    def _take(self, line: bytes, where: str) -> None:
        from picbench.workloads.sources.row_schema import first_problem
        from picbench.workloads.traffic.file_schema import ChunkSchema, LineSchema

        try:
            found = LineSchema.validate_json(line)
        except ValueError as error:
            raise DataError(f"{where}: {first_problem(error)}", hint=_HINT) from error
        if isinstance(found, ChunkSchema):
            before = _text(found.before) if found.before else None
            chunk = SampleSegment("chunk", found.text, tuple(found.tokens), before)
            self._chunks[found.chunk] = chunk
            self._preload += [chunk] * found.preload
            return
        if found.request in self._samples:
            raise DataError(
                f"{where}: a request before it is called {found.request!r}, too",
                hint="give each a name of its own: results are told apart by it",
            )
        segments = tuple(self._segment(segment, where) for segment in found.parts)
        sent = (segments, tuple(found.answers), found.max_tokens)
        self._samples[found.request] = Sample(found.request, self._dataset, *sent, where)
        self._users.append(found.user)
        self._arrivals.append(found.arrival)

    def _segment(self, segment: Any, where: str) -> SampleSegment:
        if not hasattr(segment, "chunk"):
            return _text(segment)
        if segment.chunk not in self._chunks:
            raise DataError(f"{where}: no chunk is called {segment.chunk!r} so far", hint=_HINT)
        return self._chunks[segment.chunk]


def _text(found: Any) -> SampleSegment:
    return SampleSegment("text", found.text, tuple(found.tokens))


_HINT = "a line is a chunk or a request; see picbench traffic"


def check_tokens(stream: Stream, tokenizer: Tokenizer, path: Path) -> None:
    """Raise ConfigError unless `tokenizer` encodes every text of `stream` to its ids.

    Segments without text, which are random tokens, are skipped.
    """
    segments = tuple(dict.fromkeys(segment for segment in _segments(stream) if segment.text))
    encode = Encoder(tokenizer)
    for segment, ids in zip(segments, encode(s.text for s in segments), strict=True):
        if segment.tokens != ids and [segment.tokens] != encode.prompt([segment.text]):
            raise ConfigError(
                f"`requests` {path}: its token ids are not those of `model`'s tokenizer "
                f"(first seen at {segment.text[:40]!r})",
                hint="make the file again for this model: picbench traffic `model`",
            )


def _segments(stream: Stream) -> Iterator[SampleSegment]:
    for segment in (*stream.preload, *(s for sample in stream.samples for s in sample.segments)):
        yield segment
        if segment.before:
            yield segment.before
