"""Every metric of a run, listed once: what it is, where it comes from and where it is used.

The table of a run, its report, the status line, sweeps, comparisons, gates and docs/metrics.md take
their metrics from `METRICS`, in this order. A metric that is added here is known to all of them.

python -m picbench.tables.metrics prints the table of docs/metrics.md.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from picbench.engines.request import TokenCounts
from picbench.store.records import SampleRow
from picbench.store.summary import ArmSummary
from picbench.tables.table import Column, table

#: Where a metric is shown: in tables of a closed and an open loop, in reports, in the status line.
View = Literal["closed", "open", "report", "status"]

#: Units that stand after each value, and what a title has of them where values stand alone.
_SUFFIXES = {"%": " %", "x": ""}

#: Metrics whose values are shown with what a reader must know of them.
ANSWERED, SCORE = "answered", "score"

#: What tells of answers, and so means nothing with random weights.
OF_ANSWERS = ("perplexity", "exp_kl")
JUDGED = (SCORE, *OF_ANSWERS, "nll", "kept", "same_first", "kl", "same_top")


class Pairing(StrEnum):
    """How a metric of two arms is compared, and what a gate allows of it.

    `DIFFERENCE`: of means over pairs of samples; a gate has a margin. `RATIO`: of geometric means
    over pairs; a gate has the largest ratio. `COUNT`: the same for each pair, or for whole arms if
    rows do not have it; a gate has a relative tolerance. `QUANTILE`: of all requests of each arm,
    with intervals; a gate has nothing. `WHOLE`: one value of each arm, without intervals; a gate
    has the relative loss.
    """

    DIFFERENCE = "difference"
    RATIO = "ratio"
    COUNT = "count"
    QUANTILE = "quantile"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number about arms, requests or both.

    `heading` has line breaks for terminals. `of_arm` takes an arm's summary, `of_row` a request's
    row; either gives None if nothing was measured. `of_ends` takes an arm's summary as well, and
    gives the ends of the interval of 95 % that is shown with the value. A metric with a `quantile`
    is that of the metric `base` over requests; one that is `over_full` is `base` over that of
    `full`, request by request.

    A metric that is `optional` is shown if an arm has a value, one that is `rare` if an arm has
    another value than 0. `usual` is what a gate allows if the user does not say: against a baseline
    of one run, and against one of several, whose drift is known. A gate checks a metric that has a
    pairing and no `usual` only if the user says what is allowed.
    """

    name: str
    heading: str
    meaning: str
    _: KW_ONLY
    unit: str = ""
    digits: int = 1
    better: Literal["lower", "higher"] | None = None
    of_arm: Callable[[ArmSummary], float | None] | None = None
    of_row: Callable[[SampleRow], float | None] | None = None
    of_ends: Callable[[ArmSummary], tuple[float, float] | None] | None = None
    base: str | None = None
    quantile: float | None = None
    over_full: bool = False
    pairing: Pairing | None = None
    usual: tuple[float, float] | None = None
    shown: tuple[View, ...] = ()
    optional: bool = False
    rare: bool = False

    @property
    def column(self) -> Column:
        """The column of a table."""
        if self.unit in _SUFFIXES:
            return Column(self.heading, self.digits, _SUFFIXES[self.unit])
        return Column(f"{self.heading}\n{self.unit}".strip(), self.digits)

    @property
    def title(self) -> str:
        """The heading on one line, with the unit."""
        return self.column.title

    def value(self, arm: ArmSummary) -> float | None:
        """The value of an arm; None if nothing was measured."""
        return None if self.of_arm is None else self.of_arm(arm)

    def known(self, arm: ArmSummary) -> float | None:
        """The value of an arm; None if it means nothing, as the scores of random weights do."""
        sound = self.name not in JUDGED or arm.score.meaningful
        return self.value(arm) if sound else None

    def text(self, arm: ArmSummary) -> str | None:
        """The value with what a reader must know of it; None without a value."""
        value = self.value(arm)
        if value is None:
            return None
        suffix = self.unit if self.unit in _SUFFIXES else ""
        if ends := self.of_ends and self.of_ends(arm):
            suffix += " ({:.{digits}f} to {:.{digits}f})".format(*ends, digits=self.digits)
        if self.name in JUDGED and not arm.score.meaningful:
            suffix += "*"
        if self.name == ANSWERED and arm.failed:
            suffix = f"/{arm.requests}"
        return f"{value:,.{self.digits}f}{suffix}"


def metrics_shown(arms: Collection[ArmSummary], view: View | None = None) -> list[Metric]:
    """The metrics that a view has of these arms; without a view those of a run's table.

    The heading of the score is how replies were scored.
    """
    if view is None:
        view = "open" if any(arm.makespan_s is not None for arm in arms) else "closed"
    scored = "/".join(dict.fromkeys(arm.score.metric for arm in arms))
    found = []
    for metric in METRICS.values():
        values = [metric.value(arm) for arm in arms]
        needed = any(values) if metric.rare else any(value is not None for value in values)
        if view in metric.shown and (needed or not (metric.rare or metric.optional)):
            score = metric.name == SCORE and scored
            found.append(replace(metric, heading=scored) if score else metric)
    return found


def metrics_paired(*pairings: Pairing) -> list[Metric]:
    """The metrics that are compared in one of these ways."""
    return [metric for metric in METRICS.values() if metric.pairing in pairings]


def metrics_table() -> str:
    """The table of docs/metrics.md: every metric, in Markdown."""
    rows = []
    for m in METRICS.values():
        usual = " or ".join(f"{allowed:g}" for allowed in sorted({*(m.usual or ())}))
        rows.append((f"`{m.name}`", m.title, m.better or "", m.pairing or "", usual, m.meaning))
    head = ("name", "heading", "better", "compared", "a gate allows", "definition")
    return table(head, rows) + "\n"


_TABLE: tuple[View, ...] = ("closed", "open")
_ALL: tuple[View, ...] = (*_TABLE, "report")


def _field(path: str, scale: float = 1) -> Callable[[Any], float | None]:
    """Takes a value by its path, times `scale`; None if anything on the way is None."""

    def take(record: Any) -> float | None:
        for name in path.split("."):
            record = None if record is None else getattr(record, name)
        found: float | None = record
        return found if found is None or scale == 1 else scale * found

    return take


def _time(name: str, heading: str, meaning: str, **more: Any) -> Metric:
    """A time of a request, in milliseconds."""
    return Metric(
        name, heading, meaning, unit="ms", better="lower", of_row=attrgetter(name), **more
    )


def _ttft(percent: int, *shown: View, pairing: Pairing | None = None) -> Metric:
    """A percentile of TTFT."""
    return Metric(
        f"ttft_p{percent}_ms",
        f"TTFT p{percent}",
        f"percentile {percent} of TTFT over the timed requests of an arm",
        unit="ms",
        better="lower",
        of_arm=_field(f"ttft_ms.p{percent}"),
        base="ttft_ms",
        quantile=percent / 100,
        pairing=pairing,
        shown=shown,
    )


def _vs_full(base: str, heading: str, **more: Any) -> Metric:
    """A time over that of `full` for the same request."""
    return Metric(
        f"{base.removesuffix('_ms')}_vs_full",
        f"{heading}\nvs full",
        f"{heading} over that of `full` for the same request; the geometric mean",
        unit="x",
        digits=2,
        better="lower",
        base=base,
        over_full=True,
        pairing=Pairing.RATIO,
        usual=(1.03, 1.03),
        **more,
    )


def _count(name: str, meaning: str, path: str = "", *, loose: bool = False, **more: Any) -> Metric:
    """A count, by its path in a row; `loose` if it depends on replies or on when tiers are done."""
    facts: dict[str, Any] = {"digits": 0, "of_row": attrgetter(path) if path else None} | more
    usual = None if loose else (0.0, 0.0)
    words = facts.pop("heading", name.replace("_", " "))
    return Metric(name, words, meaning, pairing=Pairing.COUNT, usual=usual, **facts)


def _of_answers(
    name: str, heading: str, meaning: str, digits: int, path: str = "", **more: Any
) -> Metric:
    """What an arm thinks of given replies, by its `path` in a summary; without one a factor."""
    facts: dict[str, Any] = {"pairing": Pairing.RATIO, "usual": (1.02, 1.02)}
    if path:
        facts = {"of_arm": _field(path), "shown": (*_ALL, "status")}
    facts |= {"better": "lower", "of_row": attrgetter(name)} | more
    return Metric(name, heading, meaning, digits=digits, optional=True, **facts)


def _outcome(name: str, meaning: str) -> Metric:
    more: dict[str, Any] = {"digits": 0, "shown": ("report",), "rare": True}
    return Metric(name, name, meaning, of_arm=lambda arm: arm.outcomes.get(name, 0), **more)


def _kept_ends(arm: ArmSummary) -> tuple[float, float] | None:
    found = arm.likelihood
    if found is None or found.low is None or found.high is None:
        return None
    return found.low, found.high


def _peak_pct(arm: ArmSummary) -> float | None:
    return 100 * arm.blocks.peak_referenced / arm.blocks.pool if arm.blocks.pool else None


def _percent(
    name: str, heading: str, meaning: str, of_arm: Callable[[ArmSummary], float | None], **more: Any
) -> Metric:
    """A share in percent, less of which is better."""
    facts: dict[str, Any] = {"better": "lower", "shown": _ALL} | more
    return Metric(name, heading, meaning, unit="%", of_arm=of_arm, **facts)


def _share(read: Callable[[TokenCounts], int | None]) -> Callable[[ArmSummary], float | None]:
    """A share of an arm's prompt tokens, in percent; not known where a server does not say."""

    def share(arm: ArmSummary) -> float | None:
        count = None if arm.tokens.reused is None else read(arm.tokens)
        return None if count is None or not arm.tokens.prompt else 100 * count / arm.tokens.prompt

    return share


_LISTED = (
    Metric(
        "requests",
        "requests",
        "requests that were sent",
        digits=0,
        of_arm=_field("requests"),
        shown=("report", "status"),
    ),
    Metric(
        ANSWERED,
        "requests",
        "requests with a result, as answered/sent if others have none",
        digits=0,
        of_arm=lambda arm: arm.requests - arm.failed,
        shown=_TABLE,
    ),
    _time(
        "ttft_ms",
        "TTFT",
        "from a request's arrival to its first token, with its time in the queue",
        pairing=Pairing.RATIO,
        usual=(2.0, 1.05),
    ),
    _ttft(50, *_ALL, "status", pairing=Pairing.QUANTILE),
    _ttft(90, "closed", "report", pairing=Pairing.QUANTILE),
    _ttft(95, "open"),
    _ttft(99, "report", pairing=Pairing.QUANTILE),
    _vs_full("ttft_ms", "TTFT", of_arm=_field("ttft_vs_full.geomean"), shown=(*_ALL, "status")),
    _time(
        "prefill_ms",
        "prefill",
        "from the first step that computed for the request to its first token",
    ),
    _time(
        "tpot_ms",
        "TPOT",
        "mean gap between later tokens; none if there are fewer than two tokens",
        of_arm=_field("tpot_ms"),
        pairing=Pairing.RATIO,
        usual=(2.0, 1.05),
        shown=_ALL,
    ),
    _vs_full("tpot_ms", "TPOT"),
    _time("e2e_ms", "E2E", "from arrival to the last token", pairing=Pairing.RATIO),
    Metric(
        "makespan_s",
        "makespan",
        "in an open loop, from the start to the last token of the last request; with `--repeats`, "
        "the mean",
        unit="s",
        better="lower",
        of_arm=_field("makespan_s"),
        shown=("open", "report"),
        optional=True,
    ),
    Metric(
        "goodput_req_s",
        "goodput",
        "requests per second that met all objectives (`--slo`): per second of makespan, or of busy "
        "time in a closed loop",
        unit="req/s",
        better="higher",
        of_arm=_field("goodput_req_s"),
        pairing=Pairing.WHOLE,
        shown=_ALL,
        optional=True,
    ),
    Metric(
        "throughput_tok_s",
        "tokens/s",
        "prompt and output tokens per second of the arm's own busy time",
        digits=0,
        better="higher",
        of_arm=_field("throughput_tok_s"),
        pairing=Pairing.WHOLE,
        shown=_ALL,
    ),
    Metric(
        SCORE,
        "score",
        "0 to 1, by the data set's metric (word F1, Rouge-L, string match); none if a reply has "
        "nothing to score, which counts as 0 in the mean of an arm",
        digits=3,
        better="higher",
        of_arm=_field("score.mean"),
        of_row=_field("score"),
        pairing=Pairing.DIFFERENCE,
        usual=(0.01, 0.01),
        shown=(*_ALL, "status"),
    ),
    _of_answers(
        "nll",
        "answer\nnats",
        "with `--scoring likelihood`, the negative log-probability of the right answer in nats a "
        "token; the mean over requests",
        3,
        "likelihood.nll",
    ),
    _of_answers(
        "perplexity",
        "answer\nperplexity",
        "e to the power of `nll`, so that its ratio is e to the power of the difference; the "
        "geometric mean over requests",
        2,
    ),
    _of_answers(
        "kept",
        "context\nkept",
        "what is left of what context is worth: `nll` of the arm `nocontext` less the arm's, over "
        "that less `full`'s, in the mean over requests that all three answered; with 95 %",
        2,
        "likelihood.kept",
        better="higher",
        of_row=None,
        of_ends=_kept_ends,
    ),
    _of_answers(
        "same_first",
        "same 1st\ntoken",
        "the share of requests at which the arm would begin the answer with the token that `full` "
        "would, where right answers are forced",
        3,
        "likelihood.same_first",
        better="higher",
        of_row=None,
    ),
    _of_answers(
        "kl",
        "KL from\nfull",
        "with `--scoring fidelity`, the Kullback-Leibler divergence of an arm's next token from "
        "`full`'s, along `full`'s reply, in nats a token; the mean over requests",
        4,
        "fidelity.kl",
    ),
    _of_answers("exp_kl", "e^KL", "e to the power of `kl`, compared as perplexity is", 4),
    _of_answers(
        "same_top",
        "same top\ntoken",
        "top-1 agreement: the share of tokens of `full`'s reply at which the arm's likeliest token "
        "is `full`'s; the mean over requests",
        3,
        "fidelity.same_top",
        better="higher",
    ),
    _count("prompt_tokens", "tokens of the prompt", "tokens.prompt"),
    _count("output_tokens", "tokens of the reply", "output_tokens", loose=True),
    _count(
        "computed_tokens",
        "prompt tokens that were neither reused nor compiled: text, and linked tokens",
        "tokens.computed",
    ),
    _count(
        "reused_tokens",
        "prompt tokens that were cached before the request needed them, in the pool or in tiers",
        "tokens.reused",
        of_arm=_field("tokens.reused"),
        shown=("status",),
    ),
    _count(
        "compiled_tokens",
        "prompt tokens in chunks that were compiled for the request, which needed them first",
        "tokens.compiled",
    ),
    _count(
        "compile_work",
        "tokens that were computed to compile these chunks",
        "tokens.compile_work",
    ),
    _count(
        "prefix_tokens",
        "reused tokens that follow the prompt's beginning; the others are in chunks",
        "tokens.prefix",
    ),
    _count(
        "loaded_tokens",
        "reused tokens that tiers loaded",
        loose=True,
        of_row=lambda row: sum(row.tokens.loaded.values()),
    ),
    _count("linked_tokens", "prompt tokens that were recomputed in chunks", "tokens.linked"),
    _count("padded_slots", "slots of KV that hold no visible token", "tokens.padded"),
    _count("chunk_blocks", "blocks of chunks that the request shares", "hits.chunk"),
    _count("prefix_blocks", "blocks that prefix caching found", "hits.prefix"),
    _count("copied_blocks", "the request's own copies of blocks of chunks", "hits.copied"),
    _count(
        "tier_blocks",
        "blocks that were loaded from tiers",
        loose=True,
        of_row=lambda row: sum(row.hits.tiers.values()),
    ),
    _count(
        "peak_blocks",
        "most blocks that running requests held in any step",
        heading="blocks\npeak",
        better="lower",
        of_arm=lambda arm: arm.blocks.peak_referenced if arm.blocks.pool else None,
        shown=(*_ALL, "status"),
    ),
    _count(
        "peak_resident_blocks",
        "most blocks with KV in them in any step, in use or idle",
        loose=True,
        of_arm=lambda arm: arm.blocks.peak_resident if arm.blocks.pool else None,
    ),
    Metric(
        "peak_gib",
        "KV peak",
        "peak blocks times the bytes of a block of one worker",
        unit="GiB",
        digits=3,
        better="lower",
        of_arm=_field("memory.peak_referenced_bytes", 2**-30),
        shown=_ALL,
        rare=True,
    ),
    _percent(
        "peak_pct",
        "peak referenced",
        "peak blocks, as a share of the pool",
        _peak_pct,
        shown=("report",),
    ),
    _percent(
        "reused_pct",
        "tokens\nreused",
        "share of prompt tokens that were cached, by request or as a server counts",
        _field("reused_share", 100),
        better="higher",
    ),
    _percent(
        "loaded_pct",
        "from\ntiers",
        "share of prompt tokens that tiers loaded; these are reused, too",
        _share(lambda tokens: sum(tokens.loaded.values())),
        better=None,
        rare=True,
    ),
    _percent(
        "compiled_pct",
        "tokens\ncompiled",
        "compiled tokens over prompt tokens",
        _share(lambda tokens: tokens.compiled),
        rare=True,
    ),
    _percent(
        "computed_pct",
        "tokens\ncomputed",
        "computed tokens over prompt tokens",
        _share(lambda tokens: tokens.computed),
    ),
    _percent(
        "text_pct",
        "chunks\nas text",
        "of chunks that could be served as text (`auto`), the share that was",
        _field("choices.text_share", 100),
        better=None,
        optional=True,
    ),
    _count(
        "text_chunks",
        "chunks that were served as text (`auto`)",
        loose=True,
        of_row=lambda row: len(row.choice.texts) if row.choice else None,
    ),
    Metric(
        "ttft_over_expected",
        "TTFT /\nexpected",
        "TTFT over what `auto` expected when it chose, of a request alone; the median",
        unit="x",
        digits=2,
        of_arm=_field("choices.ttft_over_expected"),
        of_row=attrgetter("ttft_over_expected"),
        shown=_ALL,
        optional=True,
    ),
    _count(
        "loaded_bytes",
        "bytes that tiers gave to the KV pool",
        loose=True,
        of_arm=lambda arm: sum(tier.loaded_bytes for tier in arm.moved.values()),
    ),
    _count(
        "stored_bytes",
        "bytes that tiers got from the KV pool",
        loose=True,
        of_arm=lambda arm: sum(tier.stored_bytes for tier in arm.moved.values()),
    ),
    _count(
        "failed",
        "requests without a result",
        better="lower",
        of_arm=_field("failed"),
        shown=("report", "status"),
    ),
    _outcome("abstained", "replies that say that the prompt does not tell"),
    _outcome("unparsed", "replies in which there is nothing to score"),
)

#: The metrics by name, in the order of tables.
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _LISTED})


if __name__ == "__main__":
    print(metrics_table(), end="")
