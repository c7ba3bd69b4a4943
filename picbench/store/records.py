"""What a run and the process of an arm's engine send each other, and the rows made of it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import IDLE, Snapshot
from picbench.engines.request import FAILED, Hits, Result, TokenCounts
from picbench.errors import ConfigError, DataError
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that gave no result, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class ServedReply:
    """The reply of a remote server; times in seconds, as in `Timings`.

    Only the number of its tokens is known. `cached_tokens` of the prompt came from the server's
    cache, None if it does not say.
    """

    text: str
    output_tokens: int
    ttft: float
    tpot: float | None
    e2e: float
    late: float = 0.0
    cached_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What a remote server counted by itself, over all of its engines and users.

    Tokens of prompts: all, those that came from any cache, those looked up in its prefix cache,
    those found there, and those found in a cache outside of the engine. `peak_kv_usage` is the
    largest share of its KV memory, from 0 to 1, that was seen in use. None is what it does not say.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    preemptions: int | None = None
    peak_kv_usage: float | None = None

    @property
    def reused_share(self) -> float | None:
        """The share of prompt tokens that came from its caches, None where it does not say."""
        if self.prompt_tokens and self.cached_tokens is not None:
            return self.cached_tokens / self.prompt_tokens
        if self.queried_tokens and self.hit_tokens is not None:
            return (self.hit_tokens + (self.external_hit_tokens or 0)) / self.queried_tokens
        return None

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        """Both together; what one of them does not say is not known of both."""
        sums: dict[str, Any] = {}
        for name in (known.name for known in fields(self)):
            one, two = getattr(self, name), getattr(other, name)
            sums[name] = None if one is None or two is None else one + two
        usages = (self.peak_kv_usage, other.peak_kv_usage)
        sums["peak_kv_usage"] = max((u for u in usages if u is not None), default=None)
        return ServerCounts(**sums)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The results of a group of requests.

    `outcomes` are in request order, `busy` is the engine's wall-clock seconds and `snapshots` its
    block ledger, whose times start at the group's start. `moved` gives the bytes (loaded, stored)
    between the pool and each tier, `step_times` how long steps took and what tiers took of them,
    `compiled` the kernels that were compiled meanwhile, and `evicted` the blocks of `chunk` and
    `prefix` KV that lost it. If it is not `clean`, a request failed and each was run again on its
    own, so that timings mean nothing. `counted` is what a remote server counted meanwhile, None if
    it does not say.
    """

    outcomes: tuple[Result | ServedReply | Failure, ...]
    busy: float
    snapshots: tuple[Snapshot, ...] = ()
    clean: bool = True
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: tuple[str, ...] = ()
    evicted: Mapping[str, int] = field(default_factory=dict)
    counted: ServerCounts | None = None


@dataclass(frozen=True, slots=True)
class ArmBatch:
    """One arm's answer to one group of samples, which are as they were sent to it.

    `arrivals` are in seconds, None in a closed loop. `lost` says why the arm's engine is gone, None
    if it served the group.
    """

    round: int
    arm: str
    samples: Sequence[Sample]
    result: GroupResult
    arrivals: Sequence[float] | None = None
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: `context` in tokens, the rest in blocks of 16 tokens.

    `longest` is what the longest request needs at least, `chunks` all distinct chunks, `pool`
    what every arm's engine gets.
    """

    context: int
    longest: int
    chunks: int
    pool: int


#: The finish reason of a request that `on_pressure=reject` turned away.
REJECTED = "rejected"

#: Takes a reply and its right answers; None if a reply cannot be scored.
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
        right answer is known. A right answer is never an abstention. Raises DataError if `score`
        gives what is no score.
        """
        if not answers:
            return None, "answered"
        score = self.score(reply, answers) if reply.strip() else None
        if score is None:
            return None, "unparsed"
        # A NaN is refused as well: in a mean it would hide all other scores.
        if not 0 <= score <= 1:
            raise DataError(
                f"the score of a reply is {score}, and not from 0 to 1",
                hint="see `score` of the data set's class",
            )
        return score, "abstained" if score < 1 and self.abstained(reply) else "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One request of one arm; times in milliseconds, hashes of token ids.

    A remote server tells neither `prefill_ms` nor the ids of a reply: `output_sha256` is then that
    of its text, in UTF-8, and `tokens.reused` is None if the server does not say. Either `error` is
    set or every field after it is, except `tpot_ms`, which needs two tokens, and `score`, which
    needs an answer to score. `documents` is a hash of the set of the prompt's chunks, `cluster`
    names the samples that share some (see `ChunkSet`). Rows that are not `timed` ran apart from
    their group, after another request had failed. `expected_reuse` are the prompt tokens that the
    arm's cache has in the state that the run declares (see `DeclaredCache`), None without one; what
    was found is in `tokens`. `repeat` counts how often the whole schedule was run before; rounds
    are numbered through. `arrival_ms` counts from the start of the arm's batch; it is None in a
    closed loop. A request was submitted `late_ms` after it arrived, which is part of its latencies.
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
    outcomes = zip(batch.samples, batch.result.outcomes, arrivals, strict=True)
    rows = []
    for sample, outcome, arrival in outcomes:
        row = SampleRow(
            arm=batch.arm,
            sample=sample.id,
            round=batch.round,
            timed=False,
            prompt_sha256=hash_tokens(sample.tokens),
            documents=sets[sample.id].documents,
            cluster=sets[sample.id].cluster,
            arrival_ms=_milliseconds(arrival),
        )
        if (error := _error(outcome)) is not None:
            rows.append(replace(row, outcome="error", error=error))
        elif not isinstance(outcome, Failure):
            score, kind = grader(outcome.text, sample.answers)
            row = replace(row, timed=batch.result.clean, outcome=kind, score=score)
            rows.append(_answered(row, sample, outcome))
    return rows


def hash_tokens(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit integers, in hex."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def _error(outcome: Result | ServedReply | Failure) -> str | None:
    """Why a request has no reply; None if it has one."""
    if isinstance(outcome, Failure):
        return outcome.message
    if isinstance(outcome, ServedReply) or outcome.finish_reason not in (REJECTED, FAILED):
        return None
    rejected = outcome.finish_reason == REJECTED
    return "rejected: short of KV blocks" if rejected else outcome.error or "an error"


def _answered(row: SampleRow, sample: Sample, reply: Result | ServedReply) -> SampleRow:
    times = reply if isinstance(reply, ServedReply) else reply.timings
    row = replace(
        row,
        late_ms=None if row.arrival_ms is None else 1e3 * times.late,
        ttft_ms=1e3 * times.ttft,
        tpot_ms=_milliseconds(times.tpot),
        e2e_ms=1e3 * times.e2e,
        finish_reason=reply.finish_reason,
        text=reply.text,
    )
    if isinstance(reply, ServedReply):
        return replace(
            row,
            output_tokens=reply.output_tokens,
            output_sha256=hashlib.sha256(reply.text.encode("utf-8", "surrogatepass")).hexdigest(),
            # The server has counted as many prompt tokens as the sample has.
            tokens=TokenCounts(prompt=sample.prompt_tokens, reused=reply.cached_tokens),
        )
    return replace(
        row,
        prompt_sha256=hash_tokens(reply.prompt_tokens),
        prefill_ms=1e3 * reply.timings.prefill,
        output_tokens=len(reply.tokens),
        output_sha256=hash_tokens(reply.tokens),
        tokens=reply.counts,
        hits=reply.hits,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


@dataclass(frozen=True, slots=True)
class Objectives:
    """The longest latencies that still count as good, in milliseconds; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, row: SampleRow) -> bool:
        """Whether a request was answered, and in time."""
        taken = (row.ttft_ms, row.tpot_ms, row.e2e_ms)
        bounds = (self.ttft, self.tpot, self.e2e)
        return row.error is None and all(
            bound is None or time is None or time <= bound
            for time, bound in zip(taken, bounds, strict=True)
        )


def parse_slo(text: str) -> Objectives:
    """Read ``ttft=500,tpot=50``. Raises ConfigError for anything else."""
    names = [field.name for field in fields(Objectives)]
    bounds: dict[str, float] = {}
    for setting in text.split(","):
        name, _, number = setting.strip().partition("=")
        if name not in names or name in bounds or not _is_positive(number):
            raise ConfigError(
                f"`slo` {text!r}: {setting!r} is no objective",
                hint="write ttft=MS, tpot=MS and e2e=MS, with commas between them",
            )
        bounds[name] = float(number)
    return Objectives(**bounds)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


#: Kinds of slot that a step with prompt tokens adds.
_PROMPT = ("chunk", "linked", "prompt", "private")

#: A step may take this many times the upper quartile of its engine's slowest class of steps: within
#: a class steps differ by how full they are, in prompts by less than a factor of ten.
FACTOR = 10.0

#: Nor is anything shorter a stall, in seconds: a step that waits for the operating system, for
#: Python's garbage collector or for another process on the same cores takes that long.
LEAST = 1.0

#: Fewest steps of a class that have a quartile.
ENOUGH = 8


@dataclass(frozen=True, slots=True)
class Stalls:
    """Steps of an arm that took longer than `allowed_s`: how many, and the longest of all steps."""

    steps: int
    allowed_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of steps while requests were running: those with prompt tokens, and all others."""

    prompt: Sequence[float] = ()
    other: Sequence[float] = ()


def step_seconds(batches: Iterable[Sequence[Snapshot]]) -> StepSeconds:
    """The times between the snapshots of each batch, by the class of the step between them.

    A snapshot is taken when a step is scheduled. If it has more of a prompt than the one before,
    the step computes prompt tokens. Time in which nothing was running is no step's.
    """
    prompt: list[float] = []
    other: list[float] = []
    for snapshots in batches:
        before = dict.fromkeys(_PROMPT, 0.0)
        for now, following in pairwise(snapshots):
            grown = any(now.blocks[kind] > before[kind] for kind in _PROMPT)
            if now.pool > sum(now.blocks[kind] for kind in IDLE):
                (prompt if grown else other).append(following.time - now.time)
            before = {kind: now.blocks[kind] for kind in _PROMPT}
    return StepSeconds(prompt, other)


def find_stalls(seconds: StepSeconds) -> Stalls | None:
    """Stalls by the arm's own measure; None if it has too few steps to have one.

    The quartile of a class does not change by a few steps that stalled, and the slowest class
    decides, so that a long prompt among many steps of decoding is none.
    """
    if len(seconds.prompt) < ENOUGH:
        # Prompts take longest, and the slowest class is not known.
        return None
    classes = (steps for steps in (seconds.prompt, seconds.other) if len(steps) >= ENOUGH)
    slowest = max(float(np.quantile(steps, 0.75)) for steps in classes)
    allowed = max(LEAST, FACTOR * slowest)
    found = [*seconds.prompt, *seconds.other]
    return Stalls(sum(step > allowed for step in found), allowed, max(found))


@dataclass(slots=True)
class Tally:
    """What one arm did, round after round: rows, and results without their outcomes."""

    rows: list[SampleRow] = field(default_factory=list)
    results: list[GroupResult] = field(default_factory=list)

    def add(self, rows: Sequence[SampleRow], result: GroupResult) -> None:
        """Add a round."""
        self.rows.extend(rows)
        self.results.append(replace(result, outcomes=()))

    @property
    def busy(self) -> float:
        """Busy seconds of clean rounds, which are those with timings."""
        return sum((result.busy for result in self.results if result.clean), 0.0)

    @property
    def snapshots(self) -> list[Snapshot]:
        """The block ledger of all rounds.

        Its clock stops while other arms compute, so that averages over time are averages over the
        arm's own busy time.
        """
        found: list[Snapshot] = []
        clock = 0.0
        for result in self.results:
            found += (
                replace(snapshot, step=step, time=clock + snapshot.time)
                for step, snapshot in enumerate(result.snapshots, len(found))
            )
            clock += result.busy
        return found

    @property
    def moved(self) -> dict[str, tuple[int, int]]:
        """Bytes (loaded, stored) by tier."""
        found: dict[str, tuple[int, int]] = {}
        for tier, (loaded, stored) in chain.from_iterable(r.moved.items() for r in self.results):
            before = found.get(tier, (0, 0))
            found[tier] = (before[0] + loaded, before[1] + stored)
        return found

    @property
    def step_times(self) -> StepTimes:
        """How long steps took, and what tiers took of them."""
        return sum((result.step_times for result in self.results), StepTimes())

    @property
    def compiled(self) -> Counter[str]:
        """How often each kernel was compiled."""
        return Counter(chain.from_iterable(result.compiled for result in self.results))

    @property
    def evicted(self) -> Counter[str]:
        """How many blocks of `chunk` and `prefix` KV lost it."""
        found = Counter[str]()
        for result in self.results:
            found.update(result.evicted)
        return found

    @property
    def stalls(self) -> Stalls | None:
        """Steps that took too long, None if there are too few to tell."""
        return find_stalls(step_seconds(result.snapshots for result in self.results))

    @property
    def counted(self) -> ServerCounts | None:
        """What a remote server counted in all rounds; None unless it did so in each."""
        known = [result.counted for result in self.results if result.counted is not None]
        return sum(known[1:], known[0]) if known and len(known) == len(self.results) else None

    @property
    def failed(self) -> int:
        """Requests without a result."""
        return sum(row.error is not None for row in self.rows)
