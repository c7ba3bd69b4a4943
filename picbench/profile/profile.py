"""A trace under every arm in one pass, what arms keep of answers, and whether PIC is worth it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.resources import files
from itertools import islice

from picbench.engines.algorithms import Algorithm
from picbench.engines.costs import RequestSize
from picbench.errors import DataError
from picbench.profile.costs import ClosedLoop
from picbench.profile.headroom import Headroom
from picbench.profile.predictor import ArmPrediction, GridPredictor, links_chunks
from picbench.profile.reuse import ArmSimulation, ReuseTotals
from picbench.tables.run import times_sooner
from picbench.tables.table import NOTHING
from picbench.workloads.traffic.trace import Sees, Trace, TracedRequest

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
    """The arms of a trace, in the order that they were asked for, and what they keep of answers.

    `headroom` is what prefix caching leaves, `sees` and `note` are those of the trace.
    """

    name: str
    kind: str
    exact: bool
    pool: int | None
    running: int
    traffic: TrafficSums
    arms: tuple[ArmProfile, ...]
    answers: tuple[MeasuredAnswers, ...] = field(default_factory=read_answers)
    headroom: Headroom | None = None
    sees: Sees = "contents"
    note: str = ""

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
    limit: int | None = None,
) -> TraceProfile:
    """Count what each algorithm reuses of the first `limit` requests, all of them by default.

    `pool` is in usable blocks of 16 tokens. `running` requests are served at a time, in steps like
    those of the engines of the predictor's grid. Raises ConfigError for algorithms that are not
    counted and for a pool that is too small for its chunks, DataError as the trace does, and where
    it has no request.
    """
    arms = [_Arm(algorithm, pool, running, predictor, trace.exact) for algorithm in algorithms]
    traffic, headroom = TrafficSums(), Headroom(exact=trace.exact, blocks=pool)
    for request in islice(trace.requests, limit):
        traffic.add(request)
        headroom.serve(request)
        for arm in arms:
            arm.serve(request)
    if not traffic.requests:
        raise DataError(f"{name}: no requests", hint="a trace has one a line")
    found = tuple(arm.profile(traffic.rate) for arm in arms)
    return TraceProfile(
        *(name, trace.kind, trace.exact, pool, running, traffic, found),
        headroom=headroom,
        sees=trace.sees,
        note=trace.note,
    )


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
    """Whether PIC is worth it, the arm to take, one line that says so, and why.

    `sentence` is what a person would say, against prefix caching; `ours` the best arm with chunks.
    """

    worth: Worth
    arm: str | None
    line: str
    sentence: str = ""
    ours: str | None = None


def advise(profile: TraceProfile) -> Advice:
    """Compare the best arm with chunks with the best one without, by their costs.

    Only arms of known loss are compared; those that keep answers come first where they are worth
    it. Outside of the grid times decide nothing that computed tokens do not say as well.
    """
    if profile.sees != "contents":
        return _unseen(profile)
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
    whole = f"{line}; {_why(profile.traffic, ours, theirs)}."
    return Advice(worth, taken, whole, _sentence(profile, worth, ours, theirs), ours.spec)


def _unseen(profile: TraceProfile) -> Advice:
    """What can be said of a trace that does not show what prompts share."""
    found = next((a.counted.saved for a in profile.arms if a.spec == "prefix"), None)
    saved = f"prefix caching saves {found:z.0%} of prompt tokens; " if found else ""
    line = f"unknown: {saved}whether PIC would save more cannot be seen here ({profile.note})"
    said = f"{line[9].upper()}{line[10:]}. A log with texts would say it."
    return Advice(Worth.UNKNOWN, None, line, said)


def _sentence(profile: TraceProfile, worth: Worth, ours: ArmProfile, theirs: ArmProfile) -> str:
    """The advice as one would say it, against prefix caching where that was counted."""
    against = next((arm for arm in profile.arms if arm.spec == "prefix"), theirs)
    name = "prefix caching" if against.spec == "prefix" else against.spec
    ratio = ours.computed / max(against.computed, 1e-12)
    less = f"{abs(1 - ratio):.0%} {'fewer' if ratio <= 1 else 'more'} prompt tokens than {name}"
    parts = [f"{ours.spec} computes {less}"]
    if ours.predicted and against.predicted:
        first, before = ours.predicted.ttft_s, against.predicted.ttft_s
        if first and before:
            parts.append(f"its first token is predicted {times_sooner(first / before)}")
        memory = ours.predicted.kv_gib / max(against.predicted.kv_gib, 1e-12)
        parts.append(f"with {memory:.2f} of the KV memory")
    shares = [k for kept in profile.kept(ours).values() for k, *_ in kept.values()]
    keeps = min(shares) >= _KEPT
    loss = f" It kept {min(shares):.0%} to {max(shares):.0%} of full recompute's score elsewhere."
    told = {
        Worth.YES: f"PIC is worth it{'' if keeps else ' if some answers may change'}",
        Worth.NO: f"PIC is not worth it, stay with {theirs.spec}",
        Worth.EQUAL: f"PIC makes no difference, stay with {theirs.spec}",
        Worth.UNKNOWN: "It is not known whether PIC is worth it, measure it",
    }[worth]
    return f"{told}: {', '.join(parts)}.{loss if worth is Worth.YES else ''}"


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
