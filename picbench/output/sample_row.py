"""What is kept of one request of one arm: a row of samples.jsonl."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from picbench.arms.messages import Failure, ServedReply
from picbench.engines.request import FAILED, Hits, Result, TokenCounts
from picbench.errors import DataError
from picbench.run.protocol import ArmBatch
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample

#: The finish reason of a request that `on_pressure=reject` turned away.
REJECTED = "rejected"

#: Takes a reply and its right answers; None where a reply cannot be scored.
Score = Callable[[str, Sequence[str]], float | None]

#: What became of a request: it was answered; the reply says that the prompt does not tell; there is
#: nothing in the reply to score; there is no reply.
Outcome = Literal["answered", "abstained", "unparsed", "error"]


def _never(_: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Grader:
    """Scores replies and tells what they are; `abstained` takes a reply."""

    score: Score
    abstained: Callable[[str], bool] = _never

    def __call__(self, reply: str, answers: Sequence[str]) -> tuple[float | None, Outcome]:
        """The score of a reply and its outcome.

        A blank reply has no score, as has one in which `score` finds nothing, and one to which no
        right answer is known. A right answer is never an abstention. Raises DataError where `score`
        gives what is no score.
        """
        if not answers:
            return None, "answered"
        score = self._checked(reply, answers) if reply.strip() else None
        if score is None:
            return None, "unparsed"
        return score, "abstained" if score < 1 and self.abstained(reply) else "answered"

    def _checked(self, reply: str, answers: Sequence[str]) -> float | None:
        score = self.score(reply, answers)
        # Of NaN neither is true; in a mean it would hide all other scores.
        if score is None or 0 <= score <= 1:
            return score
        raise DataError(
            f"the score of a reply is {score}, and not from 0 to 1",
            hint="see `score` of the data set's class",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One request of one arm; times in milliseconds, hashes of token ids.

    A server elsewhere tells neither `prefill_ms` nor the ids of a reply: `output_sha256` is then
    that of its text, in UTF-8, and `tokens.reused` is None where the server does not say.
    Either `error` is set or every field after it is, except `tpot_ms`, which needs two tokens, and
    `score`, which needs an answer to score. `documents` is a hash of the set of the prompt's
    chunks, `cluster` names the samples that share some (see `ChunkSet`); both are None in runs of
    schema 1, where they are unknown.
    Rows that are not `timed` ran apart from their group, after another request had failed.
    `expected_reuse` are the prompt tokens that the arm's cache has in the state that the run
    declares (see `DeclaredCache`), None without one; what was found is in `tokens`.
    `repeat` counts how often the whole schedule was run before; rounds are numbered through.
    `arrival_ms` counts from the start of the arm's batch; it is None in a closed loop. A request
    was submitted `late_ms` after it arrived, and that is part of its latencies.
    """

    arm: str
    sample: str
    round: int
    timed: bool
    prompt_sha256: str
    outcome: Outcome = "answered"
    documents: str | None = None
    cluster: str | None = None
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
    expected_reuse: int | None = None
    repeat: int = 0


def to_rows(batch: ArmBatch, grader: Grader, sets: Mapping[str, ChunkSet]) -> list[SampleRow]:
    """The rows of a batch, in the order of its samples; `sets` has every sample's chunks."""
    arrivals: Sequence[float | None] = batch.arrivals or [None] * len(batch.samples)
    rows = [
        _row(batch, sample, outcome, arrival, grader)
        for sample, outcome, arrival in zip(
            batch.samples, batch.result.outcomes, arrivals, strict=True
        )
    ]
    found = [sets[row.sample] for row in rows]
    return [
        replace(row, documents=chunks.documents, cluster=chunks.cluster)
        for row, chunks in zip(rows, found, strict=True)
    ]


def hash_tokens(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit integers, in hex."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def _row(
    batch: ArmBatch,
    sample: Sample,
    outcome: Result | ServedReply | Failure,
    arrival: float | None,
    grader: Grader,
) -> SampleRow:
    if isinstance(outcome, ServedReply):
        return _served(batch, sample, outcome, arrival, grader)
    if isinstance(outcome, Failure) or outcome.finish_reason in (REJECTED, FAILED):
        return _failed(batch, sample, outcome, arrival)
    return _answered(batch, sample, outcome, arrival, grader)


def _failed(
    batch: ArmBatch, sample: Sample, outcome: Failure | Result, arrival: float | None
) -> SampleRow:
    return SampleRow(
        arm=batch.arm,
        sample=sample.id,
        round=batch.round,
        timed=False,
        prompt_sha256=hash_tokens(sample.tokens),
        outcome="error",
        arrival_ms=_milliseconds(arrival),
        error=outcome.message if isinstance(outcome, Failure) else _reason(outcome),
    )


def _reason(result: Result) -> str:
    rejected = result.finish_reason == REJECTED
    return "rejected: short of KV blocks" if rejected else result.error or "an error"


def _answered(
    batch: ArmBatch, sample: Sample, result: Result, arrival: float | None, grader: Grader
) -> SampleRow:
    timings = result.timings
    score, outcome = grader(result.text, sample.answers)
    return SampleRow(
        arm=batch.arm,
        sample=sample.id,
        round=batch.round,
        timed=batch.result.clean,
        prompt_sha256=hash_tokens(result.prompt_tokens),
        outcome=outcome,
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
        score=score,
    )


def _served(
    batch: ArmBatch, sample: Sample, reply: ServedReply, arrival: float | None, grader: Grader
) -> SampleRow:
    """A server elsewhere has counted as many prompt tokens as the sample has."""
    score, outcome = grader(reply.text, sample.answers)
    return SampleRow(
        arm=batch.arm,
        sample=sample.id,
        round=batch.round,
        timed=batch.result.clean,
        prompt_sha256=hash_tokens(sample.tokens),
        outcome=outcome,
        arrival_ms=_milliseconds(arrival),
        late_ms=None if arrival is None else 1e3 * reply.late,
        ttft_ms=1e3 * reply.ttft,
        tpot_ms=_milliseconds(reply.tpot),
        e2e_ms=1e3 * reply.e2e,
        output_tokens=reply.output_tokens,
        output_sha256=hashlib.sha256(reply.text.encode("utf-8", "surrogatepass")).hexdigest(),
        tokens=TokenCounts(prompt=sample.prompt_tokens, reused=reply.cached_tokens),
        finish_reason=reply.finish_reason,
        text=reply.text,
        score=score,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
