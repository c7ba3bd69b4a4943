"""What a gate lets pass, metric by metric."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from picbench.comparison.measured_arm import COUNTERS, TOTALS

#: Counts that depend on more than plans: on what was answered, or on when a tier was done.
_LOOSE = {"output_tokens", "tier_blocks", "loaded_bytes", "stored_bytes", "peak_resident_blocks"}

#: Counts that are checked where a baseline does not say, exactly.
CHECKED = tuple(name for name in (*COUNTERS, *TOTALS) if name not in _LOOSE)

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _ThresholdModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScoreThreshold(_ThresholdModel):
    """The loss of score, from 0 to 1, that is acceptable."""

    margin: float = Field(gt=0, le=1)


class TimeThreshold(_ThresholdModel):
    """The slowdown that is acceptable, as a ratio of geometric means."""

    ratio: float = Field(gt=1, allow_inf_nan=False)


class Thresholds(_ThresholdModel):
    """What is checked of every arm; None: nothing of this.

    `ttft_vs_full` and `tpot_vs_full` are times as ratios to those of `full` on the same requests.
    `counters` have relative tolerances; 0 is exact.
    """

    score: ScoreThreshold | None = None
    ttft_ms: TimeThreshold | None = None
    tpot_ms: TimeThreshold | None = None
    e2e_ms: TimeThreshold | None = None
    ttft_vs_full: TimeThreshold | None = None
    tpot_vs_full: TimeThreshold | None = None
    counters: Mapping[str, Tolerance] = Field(default_factory=dict)

    @field_validator("counters")
    @classmethod
    def _known(cls, counters: Mapping[str, float]) -> Mapping[str, float]:
        unknown = [name for name in counters if name not in (*COUNTERS, *TOTALS)]
        if unknown:
            raise ValueError(f"no such count: {', '.join(unknown)}")
        return counters

    @property
    def times(self) -> dict[str, float]:
        """Acceptable slowdowns by metric."""
        found = {name: getattr(self, name) for name in TIME_METRICS}
        return {name: time.ratio for name, time in found.items() if time is not None}


#: The metrics with a `TimeThreshold`.
TIME_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "ttft_vs_full", "tpot_vs_full")


def usual_thresholds(counters: Iterable[str], *, repeated: bool) -> Thresholds:
    """Tight on `counters` and scores, tight on relative times, loose on milliseconds.

    Milliseconds drift from run to run. How much is known of a baseline that is `repeated`; of a
    single run it is not, and then they may double.
    """
    loose = TimeThreshold(ratio=1.05 if repeated else 2.0)
    return Thresholds(
        score=ScoreThreshold(margin=0.01),
        ttft_ms=loose,
        tpot_ms=loose,
        ttft_vs_full=TimeThreshold(ratio=1.03),
        tpot_vs_full=TimeThreshold(ratio=1.03),
        counters=dict.fromkeys(counters, 0.0),
    )
