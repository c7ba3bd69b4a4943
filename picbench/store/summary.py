"""Aggregates of a run: what summary.json says of each arm."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, compress, pairwise
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from picbench.engines import ledger
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.request import Hits, TokenCounts
from picbench.statistics.intervals import mean_ratio
from picbench.store.records import Fidelity, Outcome, SampleRow, ServerCounts, Tally, sum_fields

#: The arm that ratios are taken to.
BASELINE = "full"

#: The arm whose prompts have no chunks.
NO_CONTEXT = "nocontext"

#: What stands beside the numbers of an arm, wherever they are shown, and what it means.
MARKS = {
    "simulated": "no engine computed anything, its numbers are a model's",
    "served without reuse": "it reused none of the chunks that it was sent",
}


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a tier gave to the KV pool and got from it."""

    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles, interpolated linearly between neighbours."""

    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """The mean over requests with a reply, from 0 to 1; not `meaningful` with random weights.

    In `mean` an unparsed reply counts as 0, so that an arm gains nothing by unusable replies;
    `parsed_mean` leaves these out.
    """

    metric: str
    mean: float | None
    meaningful: bool
    parsed_mean: float | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of per-sample ratios to the arm `full`, over `pairs` samples."""

    geomean: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The right answers' negative log-probability in nats a token: the mean over `samples`.

    `kept` is what is left of what context is worth, which is how much more likely `full` finds the
    right answer than the arm ``nocontext``: 1 for `full`, 0 without chunks. It is over the samples
    that all three arms have, from `low` to `high` with 95 % confidence: over sets of documents, or
    over requests where all are linked. None where `full` gains nothing or an arm is missing; `low`
    and `high` also where it may gain nothing. `same_first` is the share of samples that both have
    at which the arm would begin its reply with the token that `full` would.
    """

    nll: float
    samples: int
    same_first: float | None = None
    kept: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class DecayWindow:
    """A window of a steady stream: `requests` from number `first` (from 0) on, over all repeats.

    Tokens are sums over those that were answered: of prompts, of what a cache that never evicts
    would have of them, and of what was found.
    """

    first: int
    requests: int
    ttft_ms: Percentiles | None
    ttft_vs_full: Ratio | None
    prompt_tokens: int
    expected_tokens: int
    found_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """What became of an arm's cache in the declared state; tokens are sums over requests.

    `missed_requests` found less than they were to find in a warm cache, because blocks had been
    evicted; None in other states. `decay` are the windows of a steady stream.
    """

    expected_tokens: int
    found_tokens: int
    missed_requests: int | None
    evicted_blocks: Mapping[str, int]
    decay: tuple[DecayWindow, ...] = ()


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """An arm's memory in bytes of one worker.

    `block_bytes` are those of a block of the ledger in all layers, as the engine states them; None
    if it does not, as are the figures that follow from it: the peak and the mean over time of what
    running requests held (`referenced`) and of all KV (`resident`). `workers` have what each held
    when the run ended, and `residual_bytes` what it held beside weights, pool and workspaces; both
    are empty if engines were gone by then.
    """

    block_bytes: int | None
    peak_referenced_bytes: int | None
    mean_referenced_bytes: int | None
    peak_resident_bytes: int | None
    mean_resident_bytes: int | None
    workers: tuple[ledger.MemoryUse, ...] = ()
    residual_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """How `auto` served requests: with all `chunks` as chunks, all as `text`, some so (`mixed`).

    `text_share` is the share of chunks that were served as text, `ttft_over_expected` the median of
    what `SampleRow` has under this name.
    """

    chunks: int
    text: int
    mixed: int
    text_share: float
    ttft_over_expected: float | None


@dataclass(frozen=True, slots=True)
class Stalls:
    """Steps of an arm that took longer than `allowed_s`: how many, and the longest of all steps."""

    steps: int
    allowed_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm; times in milliseconds, None if nothing could be measured.

    `requests` were sent and `failed` of these gave no result; `outcomes` counts them by outcome
    (see `SampleRow`). Throughput is tokens a second of the arm's own busy time: prompt plus output
    tokens, and output tokens alone. `tpot_ms` is the mean over requests. `tokens` and `hits` are
    sums over requests.

    `makespan_s` is from the start to the last token of the last request, in the mean over repeats,
    and `late_ms` how late requests were submitted; both None in a closed loop. `goodput_req_s` is
    requests a second that met the objectives, None without any: a second of the makespans of all
    repeats, or of busy time. `moved` is what went through tiers, failed requests included, and
    `step_times` the seconds of the engine's steps and of what tiers took of them; zero without
    tiers. `compiled` says how often each kernel was compiled while requests were measured. `cache`
    is None if no state of it was declared, `memory` in runs from before it was measured, `stalls`
    if there are too few steps to tell. `counted` is what a remote server counted by itself, None of
    other arms; it served `without_reuse` if it was to reuse chunks and found none. `likelihood` is
    that of right answers and `fidelity` the mean over requests, None if not measured. `choices` are
    those of `auto`, None of other arms. Numbers whose
    `provenance` is "simulated", and those without reuse, say so wherever they are shown.
    """

    requests: int
    failed: int
    ttft_ms: Percentiles | None
    prefill_ms: Percentiles | None
    e2e_ms: Percentiles | None
    tpot_ms: float | None
    throughput_tok_s: float | None
    output_tok_s: float | None
    busy_s: float
    ttft_vs_full: Ratio | None
    score: ScoreSummary
    blocks: ledger.Occupancy
    tokens: TokenCounts
    output_tokens: int
    hits: Hits
    makespan_s: float | None = None
    late_ms: Percentiles | None = None
    goodput_req_s: float | None = None
    moved: Mapping[str, Moved] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    cache: CacheSummary | None = None
    memory: MemorySummary | None = None
    stalls: Stalls | None = None
    counted: ServerCounts | None = None
    provenance: Literal["measured", "simulated"] = "measured"
    without_reuse: bool = False
    likelihood: Likelihood | None = None
    fidelity: Fidelity | None = None
    choices: Choices | None = None

    @property
    def reused_share(self) -> float | None:
        """The share of prompt tokens that came from a cache.

        It is counted by request, or else by the server, and None where neither is known.
        """
        if self.tokens.reused is not None:
            return self.tokens.reused / self.tokens.prompt if self.tokens.prompt else None
        return None if self.counted is None else self.counted.reused_share

    @property
    def marks(self) -> list[str]:
        """Those of MARKS that the arm has."""
        return [*compress(MARKS, (self.provenance == "simulated", self.without_reuse))]

    def ttft_s(self, percentile: str) -> float | None:
        """TTFT in seconds at ``"p50"`` or another percentile; None where none was measured."""
        return None if self.ttft_ms is None else float(getattr(self.ttft_ms, percentile)) / 1e3


def summarise(
    tallies: Mapping[str, Tally],
    *,
    metric: str,
    meaningful: bool,
    objectives: Mapping[str, float] | None = None,
    engines: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, ArmSummary]:
    """Summaries by arm.

    `objectives` are the longest good times by field of a row (see `parse_slo`); `engines` say by
    arm whether their numbers are simulated.
    """
    full = tallies[BASELINE].rows if BASELINE in tallies else []
    found = {}
    for name, tally in tallies.items():
        results = tally.results
        answered = [row for row in tally.rows if row.error is None]
        timed = [row for row in answered if row.timed]
        output = sum(row.output_tokens for row in timed)
        tokens = sum_tokens(row.tokens for row in answered)
        makespans = _makespans_s(timed)
        bounds = (objectives or {}).items()
        good = sum(all((getattr(row, n) or 0) <= bound for n, bound in bounds) for row in timed)
        counted = [result.counted for result in results if result.counted is not None]
        simulated = engines.get(name, {}).get("provenance") == "simulated"
        found[name] = ArmSummary(
            requests=len(tally.rows),
            failed=tally.failed,
            ttft_ms=percentiles(row.ttft_ms for row in timed),
            prefill_ms=percentiles(row.prefill_ms for row in timed),
            e2e_ms=percentiles(row.e2e_ms for row in timed),
            late_ms=percentiles(row.late_ms for row in timed),
            tpot_ms=mean(row.tpot_ms for row in timed),
            throughput_tok_s=_rate(output + sum(row.tokens.prompt for row in timed), tally.busy),
            output_tok_s=_rate(output, tally.busy),
            busy_s=tally.busy,
            ttft_vs_full=ttft_ratio(timed, full),
            score=summarise_scores(answered, metric, meaningful=meaningful),
            blocks=ledger.summarise(tally.snapshots),
            tokens=tokens,
            output_tokens=sum(row.output_tokens for row in answered),
            hits=Hits(**sum_fields([Hits(), *(row.hits for row in answered)])),
            moved=_sum_moved(result.moved for result in results),
            step_times=sum((result.step_times for result in results), StepTimes()),
            compiled=dict(Counter(chain.from_iterable(r.compiled for r in results))),
            outcomes=count_outcomes(tally.rows),
            stalls=find_stalls(*step_seconds(result.snapshots for result in results)),
            # Of all rounds, or not known.
            counted=sum(counted[1:], counted[0]) if 0 < len(counted) == len(results) else None,
            makespan_s=mean(makespans),
            goodput_req_s=_rate(good, sum(makespans) or tally.busy) if objectives else None,
            provenance="simulated" if simulated else "measured",
            likelihood=summarise_likelihood(answered, tallies),
            fidelity=_mean_fidelity(answered),
            choices=summarise_choices(timed),
        )
    return found


def summarise_choices(rows: Sequence[SampleRow]) -> Choices | None:
    """How requests were served that could be served in several ways; None without any."""
    choices = [row.choice for row in rows if row.choice is not None and row.choice.chunks]
    if not choices:
        return None
    texts = [len(choice.texts) for choice in choices]
    whole = sum(count == choice.chunks for count, choice in zip(texts, choices, strict=True))
    none = texts.count(0)
    ratios = [row.ttft_over_expected for row in rows if row.ttft_over_expected is not None]
    return Choices(
        chunks=none,
        text=whole,
        mixed=len(texts) - none - whole,
        text_share=sum(texts) / sum(choice.chunks for choice in choices),
        ttft_over_expected=median(ratios) if ratios else None,
    )


def labels_of(arms: Mapping[str, ArmSummary]) -> dict[str, str]:
    """The names of arms as tables and figures show them."""
    return {n: f"{n} ({', '.join(arm.marks)})" if arm.marks else n for n, arm in arms.items()}


def summarise_memory(
    blocks: ledger.Occupancy, block_bytes: int | None, workers: Sequence[ledger.MemoryUse]
) -> MemorySummary:
    """An arm's memory in bytes, from its ledger and from what its workers held at the end."""
    counts = {f"{name}_bytes": count for name, count in asdict(blocks).items() if name != "pool"}
    sizes: dict[str, Any] = {
        name: None if block_bytes is None else round(count * block_bytes)
        for name, count in counts.items()
    }
    residual = tuple(worker.residual_bytes for worker in workers)
    return MemorySummary(block_bytes, **sizes, workers=tuple(workers), residual_bytes=residual)


def summarise_scores(
    answered: Iterable[SampleRow], metric: str, *, meaningful: bool
) -> ScoreSummary:
    """Mean scores of rows that have a reply."""
    scores = [(row.score, row.outcome) for row in answered]
    return ScoreSummary(
        metric=metric,
        mean=mean(0.0 if outcome == "unparsed" else score for score, outcome in scores),
        meaningful=meaningful,
        parsed_mean=mean(score for score, _ in scores),
    )


def summarise_likelihood(
    rows: Iterable[SampleRow], tallies: Mapping[str, Tally]
) -> Likelihood | None:
    """What an arm thinks of right answers, beside ``full`` and ``nocontext``; None if unknown."""
    own, clusters = _nats(rows := list(rows)), {row.sample: row.cluster for row in rows}
    if not own:
        return None
    full, bare = (tallies[name].rows if name in tallies else () for name in (BASELINE, NO_CONTEXT))
    begun, firsts = _firsts(rows), _firsts(full)
    same_first = mean(float(begun[key] == firsts[key]) for key in begun.keys() & firsts.keys())
    found = Likelihood(fmean(own.values()), len(own), same_first)
    best, worst = _nats(full), _nats(bare)
    shared = [key for key in own if key in best and key in worst]
    first = [worst[key] - own[key] for key in shared]
    second = [worst[key] - best[key] for key in shared]
    if sum(second) <= 0:
        return found
    samples = [sample for sample, _ in shared]
    names = [clusters[sample] or sample for sample in samples]
    interval = mean_ratio(first, second, names if len({*names}) > 1 else samples)
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return replace(found, kept=sum(first) / sum(second), low=low, high=high)


def _mean_fidelity(rows: Iterable[SampleRow]) -> Fidelity | None:
    known = [(row.kl, row.same_top) for row in rows]
    kl, same_top = (mean(column) for column in zip(*known, strict=True)) if known else (None, None)
    return None if kl is None or same_top is None else Fidelity(kl, same_top)


def _nats(rows: Iterable[SampleRow]) -> dict[tuple[str, int], float]:
    return {(row.sample, row.repeat): row.nll for row in rows if row.nll is not None}


def _firsts(rows: Iterable[SampleRow]) -> dict[tuple[str, int], int]:
    return {(row.sample, row.repeat): row.first for row in rows if row.first is not None}


def count_outcomes(rows: Iterable[SampleRow]) -> dict[str, int]:
    """How many rows have each outcome, in a fixed order."""
    found = Counter(row.outcome for row in rows)
    return {outcome: found[outcome] for outcome in get_args(Outcome)}


def _sum_moved(rounds: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, Moved]:
    found: dict[str, Moved] = {}
    for tier, (loaded, stored) in chain.from_iterable(moved.items() for moved in rounds):
        before = found.get(tier, Moved(0, 0))
        found[tier] = Moved(before.loaded_bytes + loaded, before.stored_bytes + stored)
    return found


def _makespans_s(rows: Iterable[SampleRow]) -> list[float]:
    """Seconds from the start to the last token, by repeat; none in a closed loop."""
    ends: dict[int, float] = {}
    for row in rows:
        if row.arrival_ms is not None and row.e2e_ms is not None:
            ends[row.repeat] = max(ends.get(row.repeat, 0.0), row.arrival_ms + row.e2e_ms)
    return [last / 1e3 for last in ends.values()]


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Percentiles of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return Percentiles(*map(float, np.percentile(known, (50, 90, 95, 99)))) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def ttft_ratio(rows: Iterable[SampleRow], full: Iterable[SampleRow]) -> Ratio | None:
    """TTFT of `rows` over that of `full`, paired by sample and repeat; None without a pair."""
    base = {(row.sample, row.repeat): row.ttft_ms for row in full if row.timed and row.ttft_ms}
    pairs = ((row.ttft_ms, base.get((row.sample, row.repeat))) for row in rows)
    ratios = [own / other for own, other in pairs if own and other]
    if not ratios:
        return None
    return Ratio(float(np.exp(np.mean(np.log(ratios)))), len(ratios))


def sum_tokens(counts: Iterable[TokenCounts]) -> TokenCounts:
    """The sum, kind by kind; None of a kind that is not known of all."""
    return TokenCounts(**sum_fields([TokenCounts(), *counts]))


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


def step_seconds(batches: Iterable[Sequence[ledger.Snapshot]]) -> tuple[list[float], list[float]]:
    """Seconds of steps while requests were running: those with prompt tokens, and all others.

    A snapshot is taken when a step is scheduled. If it has more of a prompt than the one before,
    the step computes prompt tokens. Time in which nothing was running is no step's.
    """
    prompt: list[float] = []
    other: list[float] = []
    for snapshots in batches:
        before = dict.fromkeys(_PROMPT, 0.0)
        for now, following in pairwise(snapshots):
            grown = any(now.blocks[kind] > before[kind] for kind in _PROMPT)
            if now.referenced > 0:
                (prompt if grown else other).append(following.time - now.time)
            before = {kind: now.blocks[kind] for kind in _PROMPT}
    return prompt, other


def find_stalls(prompt: Sequence[float], other: Sequence[float]) -> Stalls | None:
    """Stalls by the arm's own measure; None if it has too few steps with prompts to have one.

    The quartile of a class does not change by a few steps that stalled, and the slowest class
    decides, so that a long prompt among many steps of decoding is none.
    """
    if len(prompt) < ENOUGH:
        return None
    classes = (steps for steps in (prompt, other) if len(steps) >= ENOUGH)
    allowed = max(LEAST, FACTOR * max(float(np.quantile(steps, 0.75)) for steps in classes))
    found = [*prompt, *other]
    return Stalls(sum(step > allowed for step in found), allowed, max(found))
