"""Facts about a list of samples: sizes, reuse, a fingerprint."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from picbench.workloads.sample import Sample


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


def _length(chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    return sum(len(tokens) for _, tokens in chunks)
