"""The columns that are shown of a run's arms, on a terminal and in files."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from picbench.store.summary import ArmSummary, Percentiles

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class ArmColumn:
    """A column: its heading, an arm's value, None where nothing was measured, and how it is shown.

    `shown` has the value on a terminal; by default it is the number with `digits`. `unit` is part
    of the heading where values stand alone.
    """

    heading: str
    value: Callable[[ArmSummary], float | None]
    digits: int = 1
    shown: Callable[[ArmSummary], str] | None = None
    unit: str = ""

    @property
    def title(self) -> str:
        """The heading on one line, with the unit."""
        return " ".join(self.heading.split()) + self.unit

    def text(self, arm: ArmSummary) -> str:
        """The value as it is printed."""
        if self.shown is not None:
            return self.shown(arm)
        return number(self.value(arm), self.digits)


def arm_columns(arms: Collection[ArmSummary], metric: str) -> list[ArmColumn]:
    """What is shown of arms; those in an open loop have columns of their own."""
    open_loop = any(arm.makespan_s is not None for arm in arms)
    tail = "p95" if open_loop else "p90"
    columns = [
        ArmColumn("requests", lambda arm: arm.requests - arm.failed, 0, _requests),
        ArmColumn("TTFT p50\nms", lambda arm: _at(arm.ttft_ms, "p50")),
        ArmColumn(f"TTFT {tail}\nms", lambda arm: _at(arm.ttft_ms, tail)),
        ArmColumn("TTFT\nvs full", _ratio, 2, _times),
        ArmColumn("TPOT\nms", lambda arm: arm.tpot_ms),
    ]
    if open_loop:
        columns.append(ArmColumn("makespan\ns", lambda arm: arm.makespan_s))
    if any(arm.goodput_req_s is not None for arm in arms):
        columns.append(ArmColumn("goodput\nreq/s", lambda arm: arm.goodput_req_s))
    return [
        *columns,
        ArmColumn("tokens/s", lambda arm: arm.throughput_tok_s, 0),
        ArmColumn(metric, lambda arm: arm.score.mean, 3, _score),
        ArmColumn("blocks\npeak", _peak_blocks, 0),
        *([ArmColumn("KV peak\nGiB", _peak_gib, 3)] if any(map(_peak_gib, arms)) else ()),
        _share_column("tokens\nreused", lambda arm: arm.reused_share),
        _share_column("tokens\ncomputed", _computed_share),
    ]


def _peak_gib(arm: ArmSummary) -> float | None:
    peak = arm.memory.peak_referenced_bytes if arm.memory else None
    return None if peak is None else peak / 2**30


def number(value: float | None, digits: int = 1) -> str:
    """A number for a reader; a dash for what was not measured."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _share_column(heading: str, part: Callable[[ArmSummary], float | None]) -> ArmColumn:
    def share(arm: ArmSummary) -> float | None:
        found = part(arm)
        return None if found is None else 100 * found

    def percent(arm: ArmSummary) -> str:
        found = share(arm)
        return NOTHING if found is None else f"{found:.1f}%"

    return ArmColumn(heading, share, 1, percent, unit=" %")


def _computed_share(arm: ArmSummary) -> float | None:
    if arm.computed_tokens is None or not arm.tokens.prompt:
        return None
    return arm.computed_tokens / arm.tokens.prompt


def _at(percentiles: Percentiles | None, name: str) -> float | None:
    return getattr(percentiles, name, None)


def _peak_blocks(arm: ArmSummary) -> float | None:
    """None without a ledger, as servers elsewhere have none."""
    return arm.blocks.peak_referenced if arm.blocks.pool else None


def _requests(arm: ArmSummary) -> str:
    return f"{arm.requests - arm.failed}/{arm.requests}" if arm.failed else str(arm.requests)


def _ratio(arm: ArmSummary) -> float | None:
    return None if arm.ttft_vs_full is None else arm.ttft_vs_full.geomean


def _times(arm: ArmSummary) -> str:
    found = _ratio(arm)
    return NOTHING if found is None else f"{found:.2f}x"


def _score(arm: ArmSummary) -> str:
    if arm.score.mean is None:
        return NOTHING
    return f"{arm.score.mean:.3f}{'' if arm.score.meaningful else '*'}"
