"""What is kept of one request of one arm: a row of samples.jsonl."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from picbench.arms.messages import Failure
from picbench.engines.request import FAILED, Hits, Result, TokenCounts
from picbench.run.protocol import ArmBatch
from picbench.workloads.sample import Sample

#: The finish reason of a request that `on_pressure=reject` turned away.
REJECTED = "rejected"

#: Takes a reply and its right answers; None where a reply cannot be scored.
Score = Callable[[str, Sequence[str]], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One request of one arm; times in milliseconds, hashes of token ids.

    Either `error` is set or every field after it is, except `tpot_ms`, which needs two tokens.
    Rows that are not `timed` ran apart from their group, after another request had failed.
    `arrival_ms` counts from the start of the arm's batch; it is None in a closed loop. A request
    was submitted `late_ms` after it arrived, and that is part of its latencies.
    """

    arm: str
    sample: str
    round: int
    timed: bool
    prompt_sha256: str
    arrival_ms: float | None = None
    error: str | None = None
    late_ms: float | None = None
    ttft_ms: float | None = None
    prefill_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    output_tokens: int = 0
    output_sha256: str | None = None
    tokens: TokenCounts = field(default_factory=TokenCounts)
    hits: Hits = field(default_factory=Hits)
    finish_reason: str | None = None
    text: str | None = None
    score: float | None = None


def to_rows(batch: ArmBatch, score: Score) -> list[SampleRow]:
    """The rows of a batch, in the order of its samples."""
    arrivals: Sequence[float | None] = batch.arrivals or [None] * len(batch.samples)
    return [
        _failed(batch, sample, outcome, arrival)
        if isinstance(outcome, Failure) or outcome.finish_reason in (REJECTED, FAILED)
        else _answered(batch, sample, outcome, arrival, score)
        for sample, outcome, arrival in zip(
            batch.samples, batch.result.outcomes, arrivals, strict=True
        )
    ]


def hash_tokens(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit integers, in hex."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def _failed(
    batch: ArmBatch, sample: Sample, outcome: Failure | Result, arrival: float | None
) -> SampleRow:
    return SampleRow(
        arm=batch.arm,
        sample=sample.id,
        round=batch.round,
        timed=False,
        prompt_sha256=hash_tokens(sample.tokens),
        arrival_ms=_milliseconds(arrival),
        error=outcome.message if isinstance(outcome, Failure) else _reason(outcome),
    )


def _reason(result: Result) -> str:
    rejected = result.finish_reason == REJECTED
    return "rejected: short of KV blocks" if rejected else result.error or "an error"


def _answered(
    batch: ArmBatch, sample: Sample, result: Result, arrival: float | None, score: Score
) -> SampleRow:
    timings = result.timings
    return SampleRow(
        arm=batch.arm,
        sample=sample.id,
        round=batch.round,
        timed=batch.result.clean,
        prompt_sha256=hash_tokens(result.prompt_tokens),
        arrival_ms=_milliseconds(arrival),
        late_ms=None if arrival is None else 1e3 * timings.late,
        ttft_ms=1e3 * timings.ttft,
        prefill_ms=1e3 * timings.prefill,
        tpot_ms=_milliseconds(timings.tpot),
        e2e_ms=1e3 * timings.e2e,
        output_tokens=len(result.tokens),
        output_sha256=hash_tokens(result.tokens),
        tokens=result.counts,
        hits=result.hits,
        finish_reason=result.finish_reason,
        text=result.text,
        score=score(result.text, sample.answers),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
