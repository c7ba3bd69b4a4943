"""Objectives of latency, and which requests meet them."""

from dataclasses import dataclass, fields

from picbench.errors import ConfigError
from picbench.output.sample_row import SampleRow


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
    """Read ``ttft=500,tpot=50``; ConfigError for anything else."""
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
