"""Facts about a list of samples: sizes, reuse, a fingerprint, which samples share chunks."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from picbench.workloads.sample import Sample, SampleSegment


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """Facts about the samples of a run, for `summary.json`.

    `mean_tokens` counts prompt tokens. `reuse` is the share of all prompt tokens in chunks that
    occurred before, in an earlier prompt or earlier in the same one: the hit rate of a
    position-independent cache that never evicts. A chunk in another document is another chunk.
    """

    dataset: str
    samples: int
    fingerprint: str
    mean_tokens: float
    max_tokens: int
    chunks: int
    unique_chunks: int
    reuse: float
    truncated: int


def summarise(samples: Sequence[Sample]) -> WorkloadFacts:
    """Return the facts about `samples`, of which there is at least one."""
    chunks = [(chunk.context, chunk.tokens) for sample in samples for chunk in sample.chunks]
    unique = set(chunks)
    total = sum(sample.prompt_tokens for sample in samples)
    return WorkloadFacts(
        dataset=",".join(dict.fromkeys(sample.dataset for sample in samples)),
        samples=len(samples),
        fingerprint=fingerprint(samples),
        mean_tokens=total / len(samples),
        max_tokens=max(sample.prompt_tokens for sample in samples),
        chunks=len(chunks),
        unique_chunks=len(unique),
        reuse=(_length(chunks) - _length(unique)) / total,
        truncated=sum(sample.truncated for sample in samples),
    )


def fingerprint(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 of the requests: segments, documents, answers, output lengths.

    Runs with equal fingerprints sent the same requests.
    """
    digest = hashlib.sha256()
    for sample in samples:
        segments = [
            [segment.kind, segment.tokens, *([segment.context] if segment.before else ())]
            for segment in sample.segments
        ]
        line = json.dumps([sample.dataset, segments, sample.answers, sample.max_tokens])
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ChunkSet:
    """The chunks of one sample: their ids, a hash of the set, and the sample's cluster.

    Samples of one cluster are linked by chunks that they share; it is named after its first sample.
    """

    chunks: tuple[str, ...]
    documents: str
    cluster: str


def chunk_id(chunk: SampleSegment) -> str:
    """An id of a chunk's content and document: 16 hexadecimal digits."""
    content = json.dumps([chunk.tokens, chunk.context if chunk.before else None])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def chunk_sets(samples: Sequence[Sample]) -> dict[str, ChunkSet]:
    """The chunk sets of samples, by sample id.

    Chunks that every sample has (examples, a common preface) link none: they are part of the
    setting, and would make one cluster of everything.
    """
    ids = {sample.id: tuple(chunk_id(chunk) for chunk in sample.chunks) for sample in samples}
    common = set.intersection(*map(set, ids.values())) if ids else set()
    clusters = _components({name: set(chunks) - common for name, chunks in ids.items()})
    return {
        name: ChunkSet(chunks, _hash(sorted(set(chunks))), clusters[name])
        for name, chunks in ids.items()
    }


def _components(members: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The first name of each name's component; names with a member in common are connected."""
    root = {name: name for name in members}
    place = {name: number for number, name in enumerate(members)}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    owner: dict[str, str] = {}
    for name, contents in members.items():
        for member in contents:
            both = {find(owner.setdefault(member, name)), find(name)}
            first, second = min(both, key=place.__getitem__), max(both, key=place.__getitem__)
            root[second] = first
    return {name: find(name) for name in members}


def _hash(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def _length(chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    return sum(len(tokens) for _, tokens in chunks)
