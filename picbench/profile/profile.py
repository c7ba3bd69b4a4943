"""A trace under every arm in one pass, what arms keep of answers, and whether PIC is worth it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib.resources import files
from itertools import islice
from math import isinf
from typing import Any

from picbench.engines.algorithms import Algorithm
from picbench.engines.costs import RequestSize
from picbench.errors import DataError
from picbench.profile.costs import ClosedLoop
from picbench.profile.predictor import ArmPrediction, GridPredictor, links_chunks
from picbench.profile.reuse import ArmSimulation, ReuseTotals
from picbench.profile.traces import Trace, TracedRequest
from picbench.tables.table import NOTHING, Column, Table

#: The budget of a step where no grid says another one: that of a served vLLM on a large GPU.
_STEP_TOKENS = 8192

#: Differences up to this share of the better figure decide nothing.
_MARGIN = 0.10

#: The lower bound of work and of accuracy: it is shown, and not advised.
_BOUND = "naive"

#: An arm that keeps at least this share of full recompute's score loses no answers.
_KEPT = 0.97

#: By data set: the share of full recompute's score that is kept, and its 95 % interval.
Kept = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class MeasuredAnswers:
    """What arms keep of answers: a file of ``answers``; `about` says what was measured, where."""

    name: str
    about: str
    kept: Mapping[str, Kept]

    def of(self, algorithm: Algorithm) -> Kept:
        """What an arm keeps; nothing where it was not measured. Copies answer as shared KV does."""
        if getattr(algorithm, "copy", None) == "shared":
            algorithm = replace(algorithm, copy="private")  # type: ignore[call-arg]
        return self.kept.get(algorithm.spec, {})


def read_answers() -> tuple[MeasuredAnswers, ...]:
    """The measurements that come with picbench."""
    found = sorted((files("picbench.profile") / "answers").iterdir(), key=lambda path: path.name)
    texts = ((path.name.removesuffix(".json"), path.read_text("utf-8")) for path in found)
    return tuple(MeasuredAnswers(name, **json.loads(text)) for name, text in texts)


@dataclass(slots=True)
class TrafficSums:
    """Sums over a trace: tokens, chunks (in `documents`), `first` and `last` arrival in seconds."""

    requests: int = 0
    prompt: int = 0
    output: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    documents: int = 0
    first: float | None = None
    last: float | None = None
    contents: set[int] = field(default_factory=set)
    contents_tokens: int = 0

    def add(self, request: TracedRequest) -> None:
        """Count a request; DataError where only some requests have times."""
        if self.requests and (request.arrival is None) != (self.last is None):
            raise DataError(
                f"{request.source}: field 'arrival': some requests have a time and some have none",
                hint="give all of them one, or none",
            )
        self.first = request.arrival if self.first is None else self.first
        self.last = request.arrival
        self.requests += 1
        self.prompt += request.prompt_tokens
        self.output += request.output
        for segment in request.segments:
            if not segment.chunk:
                continue
            self.chunks += 1
            self.chunk_tokens += segment.length
            self.documents += segment.before is not None
            if segment.content is None or segment.content not in self.contents:
                self.contents_tokens += segment.length
            if segment.content is not None:
                self.contents.add(segment.content)

    @property
    def repeated(self) -> float:
        """The share of chunk tokens in chunks that occurred before."""
        return 1 - self.contents_tokens / self.chunk_tokens if self.chunk_tokens else 0.0

    @property
    def rate(self) -> float | None:
        """Requests a second; None without times. Clocks may begin anywhere."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.requests - 1) / (self.last - self.first)


@dataclass(frozen=True, slots=True)
class ArmProfile:
    """What an arm reuses: with a pool that never evicts, and with the pool that was given.

    `peak_blocks` are held by the requests that run at the same time, in a pool that never evicts.
    `predicted` is None without a grid.
    """

    algorithm: Algorithm
    unbounded: ReuseTotals
    limited: ReuseTotals | None
    peak_blocks: int
    predicted: ArmPrediction | None = None

    @property
    def spec(self) -> str:
        """What the arm is called."""
        return self.algorithm.spec

    @property
    def counted(self) -> ReuseTotals:
        """With the pool that was given, or else without a limit."""
        return self.limited or self.unbounded

    @property
    def computed(self) -> float:
        """Tokens that are computed for a request, in the mean."""
        return self.counted.computed / max(1, self.counted.requests)

    @property
    def cost(self) -> float:
        """Predicted seconds of the engine for a request, or else computed tokens."""
        if self.predicted and self.predicted.requests_s:
            return 1 / self.predicted.requests_s
        return self.computed


@dataclass(frozen=True, slots=True)
class TraceProfile:
    """The arms of a trace, in the order that they were asked for, and what they keep of answers."""

    name: str
    kind: str
    exact: bool
    pool: int | None
    running: int
    traffic: TrafficSums
    arms: tuple[ArmProfile, ...]
    answers: tuple[MeasuredAnswers, ...] = field(default_factory=read_answers)

    def kept(self, arm: ArmProfile) -> dict[str, Kept]:
        """What an arm keeps, by measurement; documents that the trace lacks keep nothing."""
        if arm.algorithm.documents and not self.traffic.documents:
            return {}
        found = {measured.name: measured.of(arm.algorithm) for measured in self.answers}
        return {name: kept for name, kept in found.items() if kept}

    def least(self, arm: ArmProfile) -> float | None:
        """The least share of the score that an arm keeps on a data set; None if not measured."""
        shares = (share for kept in self.kept(arm).values() for share, *_ in kept.values())
        return min(shares, default=None)

    def kept_text(self, arm: ArmProfile, name: str) -> str:
        """The least and the most that an arm keeps on a data set, in one measurement."""
        shares = [share for share, *_ in self.kept(arm).get(name, {}).values()]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(shares), max(shares))) if shares else ()
        return "-".join(ends) or NOTHING


def profile_trace(
    name: str,
    trace: Trace,
    algorithms: Sequence[Algorithm],
    predictor: GridPredictor | None = None,
    *,
    pool: int | None = None,
    running: int = 16,
    requests: int | None = None,
) -> TraceProfile:
    """Count what each algorithm reuses of the first `requests`, all of them by default.

    `pool` is in usable blocks of 16 tokens. `running` requests are served at a time, in steps like
    those of the engines of the predictor's grid. Raises ConfigError for algorithms that are not
    counted and for a pool that is too small for its chunks, DataError as the trace does, and where
    it has no request.
    """
    arms = [_Arm(algorithm, pool, running, predictor, trace.exact) for algorithm in algorithms]
    traffic = TrafficSums()
    for request in islice(trace.requests, requests):
        traffic.add(request)
        for arm in arms:
            arm.serve(request)
    if not traffic.requests:
        raise DataError(f"{name}: no requests", hint="a trace has one a line")
    found = tuple(arm.profile(traffic.rate) for arm in arms)
    return TraceProfile(name, trace.kind, trace.exact, pool, running, traffic, found)


class _Arm:
    """An arm while the trace is read."""

    def __init__(
        self,
        algorithm: Algorithm,
        pool: int | None,
        running: int,
        predictor: GridPredictor | None,
        exact: bool,
    ) -> None:
        self._algorithm, self._predictor = algorithm, predictor
        self._unbounded = ArmSimulation(algorithm, exact=exact)
        self._limited = ArmSimulation(algorithm, exact=exact, blocks=pool) if pool else None
        budget, graphs = _STEP_TOKENS, 0
        if predictor:
            budget = predictor.grid.facts.step_tokens
            graphs = predictor.grid.facts.captured(linked=links_chunks(algorithm))
        self._loop = ClosedLoop(running, budget, graphs)
        self._sizes: list[RequestSize] = []

    def serve(self, request: TracedRequest) -> None:
        held = found = self._unbounded.serve(request)
        if self._limited is not None:
            found = self._limited.serve(request)
        if found is None:
            return
        lengths = [segment.length for segment in request.segments if segment.chunk]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        size = RequestSize(
            found.prompt, found.computed, found.compiled, len(lengths), mean, request.output
        )
        self._sizes.append(size)
        self._loop.push(size, held)

    def profile(self, rate: float | None) -> ArmProfile:
        unbounded, loop, predicted = self._unbounded.close(), self._loop.close(), None
        limited = self._limited.close() if self._limited else None
        peak = self._loop.peak_blocks
        if self._predictor:
            predicted = self._predictor.predict(self._algorithm, self._sizes, loop, peak, rate)
        return ArmProfile(self._algorithm, unbounded, limited, peak, predicted)


class Worth(StrEnum):
    """What to do."""

    YES = "yes"
    NO = "no"
    EQUAL = "no difference"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether PIC is worth it, the arm to take, and one line that says so."""

    worth: Worth
    arm: str | None
    line: str


def advise(profile: TraceProfile) -> Advice:
    """Compare the best arm with chunks with the best one without, by their costs.

    Only arms of known loss are compared; those that keep answers come first where they are worth
    it. Outside of the grid times decide nothing that computed tokens do not say as well.
    """
    known = [arm for arm in profile.arms if profile.least(arm) is not None]
    plain = [arm for arm in known if not links_chunks(arm.algorithm)]
    # Private copies are counted from a tier that never forgets, which no pool pays for.
    linked = [
        arm
        for arm in known
        if links_chunks(arm.algorithm)
        and arm.spec != _BOUND
        and not getattr(arm.algorithm, "private", False)
    ]
    if not linked or not plain:
        line = "unknown: an arm with chunks and one without are needed, whose loss was measured"
        return Advice(Worth.UNKNOWN, None, line)
    worst = max(linked + plain, key=lambda arm: arm.counted.refused)
    if worst.counted.refused:
        line = (
            f"unknown: a pool of {profile.pool:,} blocks is too small for "
            f"{worst.counted.refused:,} of {profile.traffic.requests:,} requests under "
            f"{worst.spec} (raise --pool)"
        )
        return Advice(Worth.UNKNOWN, None, line)
    theirs = min(plain, key=lambda arm: arm.cost)
    keeping = [arm for arm in linked if (profile.least(arm) or 0) >= _KEPT]
    ours = _cheapest(keeping or linked)
    if _verdict(ours.cost / max(theirs.cost, 1e-12)) is not Worth.YES:
        ours = _cheapest(linked)
    ratio = ours.cost / max(theirs.cost, 1e-12)
    worth = _verdict(ratio)
    predicted = [arm.predicted for arm in (ours, theirs) if arm.predicted]
    figure = "seconds of the engine a request" if predicted else "computed tokens"
    if not all(found.inside for found in predicted):
        tokens = ours.computed / max(theirs.computed, 1e-12)
        figure += f" (extrapolated, outside of the measured grid) and {tokens:.2f} of its tokens"
        worth = worth if _verdict(tokens) is worth else Worth.UNKNOWN
    parts = [f"{profile.kept_text(ours, name)} on {name}" for name in profile.kept(ours)]
    keeps = f"which keeps {', '.join(parts)} of full recompute's score"
    loss = "" if ours in keeping else " if its loss is"
    taken, words = {
        Worth.YES: (ours.spec, f"PIC is worth it{loss}: {ours.spec}, {keeps}"),
        Worth.NO: (theirs.spec, f"PIC is not worth it, it loses: stay with {theirs.spec}"),
        Worth.EQUAL: (theirs.spec, f"PIC makes no difference: stay with {theirs.spec}"),
        Worth.UNKNOWN: (None, "unknown, measure it"),
    }[worth]
    line = f"{words}. {ours.spec} takes {ratio:.2f} of {theirs.spec}'s {figure}"
    return Advice(worth, taken, f"{line}; {_why(profile.traffic, ours, theirs)}.")


def _cheapest(arms: Sequence[ArmProfile]) -> ArmProfile:
    """The arm of the least cost, mepic where it is as good."""
    least = min(arm.cost for arm in arms)
    good = [arm for arm in arms if arm.cost <= least * (1 + _MARGIN)]
    return min(good, key=lambda arm: (arm.algorithm.name != "mepic", arm.cost))


def _verdict(ratio: float) -> Worth:
    if ratio < 1 - _MARGIN:
        return Worth.YES
    return Worth.NO if ratio > 1 + _MARGIN else Worth.EQUAL


def _why(traffic: TrafficSums, ours: ArmProfile, theirs: ArmProfile) -> str:
    if not traffic.chunks:
        return "the trace has no chunks"
    reasons = [
        f"{traffic.repeated:z.0%} of chunk tokens recur",
        f"{ours.counted.saved:z.0%} of prompt tokens are saved against {theirs.counted.saved:z.0%}",
        f"prompts have {traffic.prompt / traffic.requests:,.0f} tokens in "
        f"{traffic.chunks / traffic.requests:.1f} chunks",
    ]
    if ours.limited and ours.limited.saved < ours.unbounded.saved - 0.05:
        reasons.append(f"the pool costs {ours.unbounded.saved - ours.limited.saved:.0%} of them")
    return ", ".join(reasons)


class ProfileReport:
    """What is shown: counts, what a grid predicts of them, and the advice."""

    def __init__(self, profile: TraceProfile, predictor: GridPredictor | None) -> None:
        self._profile, self._predictor = profile, predictor
        self._errors = predictor.errors() if predictor else None
        self._queues = bool(predictor and profile.traffic.rate)
        self.advice = advise(profile)

    def markdown(self) -> str:
        """The report as a page."""
        blocks = [*self._lines(), self._table().markdown(right=1), self._legend()]
        return "\n\n".join([*blocks, *self._grid_lines(), f"**{self.advice.line}**"])

    def text(self) -> str:
        """The report for a terminal."""
        table = self._table()
        columns = list(zip(table.head, *table.texts(), strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for first, *others in zip(*columns, strict=True):
            right = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
            lines.append("  ".join((first.ljust(widths[0]), *right)).rstrip())
        blocks = (self._lines(), lines, [self._legend()], self._grid_lines(), [self.advice.line])
        return "\n\n".join("\n".join(block) for block in blocks)

    def json(self) -> str:
        """All figures; times in seconds, None for what is infinite or not known."""
        profile, traffic, predictor = self._profile, self._profile.traffic, self._predictor
        calibration = predictor.calibration if predictor else None
        document = {
            "schema": 1,
            "simulation": True,
            "trace": {"name": profile.name, "kind": profile.kind, "exact": profile.exact},
            "pool": profile.pool,
            "running": profile.running,
            "traffic": {
                "requests": traffic.requests,
                "prompt_tokens": traffic.prompt,
                "output_tokens": traffic.output,
                "chunks": traffic.chunks,
                "chunk_tokens": traffic.chunk_tokens,
                "repeated": traffic.repeated,
                "rate": traffic.rate,
            },
            "arms": {arm.spec: _figures(arm) | {"kept": profile.kept(arm)} for arm in profile.arms},
            "answers": {measured.name: measured.about for measured in profile.answers},
            "grid": predictor.grid.about() if predictor else None,
            "calibration": calibration.about() if calibration else None,
            "warning": predictor.warning if predictor else None,
            "errors": asdict(self._errors) if self._errors else None,
            "advice": asdict(self.advice),
        }
        return json.dumps(document, indent=1)

    def _table(self) -> Table:
        """A row for each arm."""
        shown: dict[str, Callable[[ArmProfile], str]] = {
            "arm": lambda arm: arm.spec,
            "saved": lambda arm: f"{arm.unbounded.saved:z.1%}",
            "computed a request": lambda arm: (
                f"{arm.computed:,.0f}" if arm.counted.requests else NOTHING
            ),
        }
        if self._profile.pool:
            shown |= {
                f"saved, pool of {self._profile.pool:,}": lambda arm: f"{arm.counted.saved:z.1%}",
                "evicted blocks": lambda arm: f"{arm.counted.evicted_blocks:,}",
                "refused": lambda arm: f"{arm.counted.refused:,}",
            }
        for measured in self._profile.answers:
            shown[f"keeps, {measured.name}"] = partial(self._profile.kept_text, name=measured.name)
        columns = {name: [text(arm) for arm in self._profile.arms] for name, text in shown.items()}
        found = [arm.predicted for arm in self._profile.arms if arm.predicted]
        if found:
            columns["TTFT, ms"] = [_ranged(f.ttft_s, f.ttft_s_range, _ms) for f in found]
            columns["requests/s"] = [
                _ranged(f.requests_s, f.requests_s_range, "{:,.2f}".format) for f in found
            ]
            columns["KV, GiB"] = [f"{f.kv_gib:.2f}" for f in found]
        if self._queues:
            columns["TTFT at its rate, ms"] = [_ranged(f.loaded_ttft_s, None, _ms) for f in found]
        rows = list(zip(*columns.values(), strict=True))
        return Table(self._profile.name, [Column(heading) for heading in columns], rows)

    def _lines(self) -> Iterator[str]:
        """What stands above the table."""
        traffic = self._profile.traffic
        yield f"simulation: no model was run. {self._profile.name} ({self._profile.kind})"
        rate = f", {traffic.rate:.3g} a second" if traffic.rate else ""
        yield (
            f"{traffic.requests:,} request{'s' * (traffic.requests > 1)}{rate}; "
            f"{traffic.prompt / traffic.requests:,.0f} prompt tokens, "
            f"{traffic.chunks / traffic.requests:.1f} chunks and "
            f"{traffic.output / traffic.requests:,.0f} generated tokens each on average; "
            f"{traffic.repeated:.1%} of chunk tokens in chunks seen before"
        )
        yield (
            "Reuse is counted by token ids, block by block."
            if self._profile.exact
            else "Reuse is counted block by block; contents with different names count as "
            "different from their first token on."
        )

    def _legend(self) -> str:
        """What the columns mean."""
        arms = self._profile.arms
        copies = any(getattr(arm.algorithm, "private", False) for arm in arms)
        ranges = any(arm.predicted and arm.predicted.ttft_s_range for arm in arms)
        parts = {
            "saved: prompt tokens that need not be computed, less those of compiling chunks; by a "
            "cache that never evicts.": True,
            "Private copies are made from a tier that never forgets.": copies,
            "Not counted: what it takes to pick tokens while a request runs.": any(
                arm.algorithm.plan_chunk(1, 100).selection for arm in arms
            ),
            "In brackets: where 90 % of the grid's single measurements lie around such a "
            "prediction, TTFT's around medians of as many such requests.": ranges,
            f"KV: of {self._profile.running} requests at a time.": self._predictor,
            "TTFT at its rate: by the formula of a queue.": self._queues,
        }
        unknown = [arm.spec for arm in arms if self._profile.least(arm) is None]
        parts |= {
            f"keeps, {one.name}: the share of full recompute's score, the least and the most of "
            f"{len(next(iter(one.kept.values())))} data sets, with {one.about}.": True
            for one in self._profile.answers
        }
        parts[f"Not advised, as their loss is not known here: {', '.join(unknown)}."] = bool(
            unknown
        )
        return " ".join(text for text, shown in parts.items() if shown)

    def _grid_lines(self) -> Iterator[str]:
        """What the predictions are worth."""
        if self._predictor is None or self._errors is None:
            yield "No grid was measured: neither times nor memory are predicted."
            return
        yield f"Predicted from: {self._predictor.grid.about()}"
        if self._predictor.calibration:
            yield f"At the speed of: {self._predictor.calibration.about()}"
        if self._predictor.warning:
            yield f"Warning: {self._predictor.warning}"
        ttft, requests_s = self._errors.texts()
        yield f"Leave-one-out error of TTFT: {ttft}"
        yield f"Leave-one-out error of requests/s: {requests_s}"
        pool, running, arms = self._profile.pool, self._profile.running, self._profile.arms
        if crowded := [arm.spec for arm in arms if pool and arm.peak_blocks > pool]:
            yield (
                f"{running} requests at a time hold more than the pool, so they would wait, which "
                f"requests/s and KV leave out (lower --running): {', '.join(crowded)}"
            )
        if outside := [arm.spec for arm in arms if arm.predicted and not arm.predicted.inside]:
            yield f"Outside of the measured grid, so extrapolated: {', '.join(outside)}"


def _ranged(
    value: float | None, ends: tuple[float, float] | None, text: Callable[[float], str]
) -> str:
    if value is None:
        return NOTHING
    return text(value) + (f" ({text(ends[0])}-{text(ends[1])})" if ends else "")


def _ms(seconds: float) -> str:
    return "overloaded" if isinf(seconds) else f"{seconds * 1e3:,.1f}"


def _figures(arm: ArmProfile) -> dict[str, Any]:
    figures = asdict(arm.predicted) if arm.predicted else {}
    finite = {k: None if isinstance(v, float) and isinf(v) else v for k, v in figures.items()}
    return {
        "unbounded": asdict(arm.unbounded) | {"saved": arm.unbounded.saved},
        "limited": asdict(arm.limited) | {"saved": arm.limited.saved} if arm.limited else None,
        "peak_blocks": arm.peak_blocks,
        "predicted": finite or None,
    }
