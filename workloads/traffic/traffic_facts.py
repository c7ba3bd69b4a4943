"""Facts about a stream of requests, beside those of every workload."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from picbench.workloads.sample import SampleSegment
from picbench.workloads.traffic.draw import Stream


@dataclass(frozen=True, slots=True)
class TrafficFacts:
    """Means are over requests, tokens are prompt tokens.

    `reuse` is the share of chunk tokens in chunks that were preloaded or occurred before,
    `fresh_tokens` the mean number of all other tokens: new chunks and text. `cached` is
    the share of chunk tokens in preloaded chunks, `top_chunk` the share of requests with the most
    frequent chunk in them. `rate` is in requests a second, None in a closed loop and where all
    arrive at once.
    """

    requests: int
    users: int
    mean_tokens: float
    mean_chunks: float
    mean_chunk_tokens: float
    unique_chunks: int
    reuse: float
    fresh_tokens: float
    cached: float
    top_chunk: float
    rate: float | None


def measure(stream: Stream) -> TrafficFacts:
    """The facts about a stream, which has at least one request."""
    count = len(stream.samples)
    chunks = [chunk for sample in stream.samples for chunk in sample.chunks]
    context = _length(chunks)
    total = sum(sample.prompt_tokens for sample in stream.samples)
    preload = set(stream.preload)
    new = _length(set(chunks) - preload)
    cached = _length(chunk for chunk in chunks if chunk in preload)
    seen = Counter(chunk for sample in stream.samples for chunk in set(sample.chunks))
    return TrafficFacts(
        requests=count,
        users=len(set(stream.users)),
        mean_tokens=total / count,
        mean_chunks=len(chunks) / count,
        mean_chunk_tokens=context / len(chunks) if chunks else 0.0,
        unique_chunks=len(set(chunks)),
        reuse=1 - new / context if context else 0.0,
        fresh_tokens=(total - context + new) / count,
        cached=cached / context if context else 0.0,
        top_chunk=max(seen.values(), default=0) / count,
        rate=_rate(stream),
    )


def _rate(stream: Stream) -> float | None:
    if not stream.arrivals:
        return None
    # A trace's first request arrives at 0: it is the gaps that are counted, one less.
    span = max(stream.arrivals) - min(stream.arrivals)
    return (len(stream.arrivals) - 1) / span if span > 0 else None


def _length(chunks: Iterable[SampleSegment]) -> int:
    return sum(len(chunk.tokens) for chunk in chunks)
