"""workload.jsonl: what a run sent, so that its replies can be read and scored from its directory.

A line is a chunk or a sample, and a chunk precedes the first sample that has it:

    {"chunk": "6f0e...", "tokens": 112, "text": "Passage 1: ..."}
    {"sample": "q7", "dataset": "musique", "cluster": "q2", "documents": "9c1b...",
     "answers": ["Oslo"], "max_tokens": 32, "segments": [{"tokens": 9, "text": "..."},
     {"chunk": "6f0e..."}, {"tokens": 12, "text": "..."}]}

`tokens` counts tokens. Where a segment has no text, `ids` are its token ids.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.output.json_file import parse_line
from picbench.whole_files import whole_file
from picbench.workloads.facts import ChunkSet, chunk_id
from picbench.workloads.sample import Sample, SampleSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """A segment of a prompt: of `tokens` tokens, with a `text`, or else with their `ids`.

    `chunk` is the id of a chunk, None for text of this prompt.
    """

    tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None
    chunk: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as workload.jsonl has it; see `ChunkSet` for `documents` and `cluster`."""

    sample: str
    dataset: str
    cluster: str
    documents: str
    answers: Sequence[str]
    max_tokens: int
    segments: Sequence[StoredSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLine:
    """A line with a chunk."""

    chunk: str
    tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReference:
    """A segment that is a chunk of an earlier line."""

    chunk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment:
    """A segment that only this prompt has."""

    tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine:
    """A line with a sample; its chunks are on lines of their own."""

    sample: str
    dataset: str
    cluster: str
    documents: str
    answers: Sequence[str]
    max_tokens: int
    segments: Sequence[ChunkReference | TextSegment]


_STORED = TypeAdapter(StoredSample)
_SEGMENT = TypeAdapter(StoredSegment)


def write_workload(path: Path, samples: Iterable[Sample], sets: Mapping[str, ChunkSet]) -> None:
    """Write what `samples` send; `sets` has the chunks of each. A reader finds all or no file."""
    with whole_file(path, durable=True) as file:
        for line in _lines(samples, sets):
            text = json.dumps(line, ensure_ascii=False) + "\n"
            file.write(text.encode("utf-8", "backslashreplace"))


def read_workload(path: Path, only: Container[str] | None = None) -> dict[str, StoredSample]:
    """The samples by id, in the order of the run; OSError or ValueError for another file.

    `only` names the samples that are wanted, None for all. Nothing else is checked then, which
    reads few of many several times as fast.
    """
    chunks: dict[str, StoredSegment | Mapping[str, Any]] = {}
    samples: dict[str, StoredSample] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line: dict[str, Any] = parse_line(text)
            try:
                if "sample" not in line:
                    whole = only is None
                    chunks[line["chunk"]] = _SEGMENT.validate_python(line) if whole else line
                elif only is None or line["sample"] in only:
                    line["segments"] = [_segment(s, chunks) for s in line["segments"]]
                    samples[line["sample"]] = _STORED.validate_python(line)
            except KeyError as error:
                raise ValueError(f"line {number}: no {error}") from error
    return samples


def _segment(
    segment: Mapping[str, Any], chunks: dict[str, StoredSegment | Mapping[str, Any]]
) -> StoredSegment:
    """A segment; a chunk is checked when it is first used, and its object then is the chunk's."""
    if "chunk" not in segment:
        return _SEGMENT.validate_python(segment)
    found = chunks[segment["chunk"]]
    if not isinstance(found, StoredSegment):
        found = chunks[segment["chunk"]] = _SEGMENT.validate_python(found)
    return found


def _lines(samples: Iterable[Sample], sets: Mapping[str, ChunkSet]) -> Iterator[dict[str, Any]]:
    written: set[str] = set()
    for sample in samples:
        segments: list[dict[str, Any]] = []
        for segment in sample.segments:
            if segment.kind == "text":
                segments.append(_content(segment))
                continue
            name = chunk_id(segment)
            segments.append({"chunk": name})
            if name not in written:
                written.add(name)
                yield {"chunk": name} | _content(segment)
        found = sets[sample.id]
        yield {
            "sample": sample.id,
            "dataset": sample.dataset,
            "cluster": found.cluster,
            "documents": found.documents,
            "answers": list(sample.answers),
            "max_tokens": sample.max_tokens,
            "segments": segments,
        }


def _content(segment: SampleSegment) -> dict[str, Any]:
    content: dict[str, Any] = {"tokens": len(segment.tokens)}
    if segment.text:
        return content | {"text": segment.text}
    return content | {"ids": list(segment.tokens)}
