"""Options whose values are numbers: any of a range, not only some."""

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers from `low` to `high`, both included; without `high` there is no upper bound.

    They are whole numbers if `low` is an int, otherwise any.
    """

    low: int | float
    high: int | float | None = None

    def parse(self, text: str) -> int | float | None:
        """The number that `text` is; None if it is none of these."""
        try:
            value = type(self.low)(text)
            finite = isfinite(value)
        except (ValueError, OverflowError):  # the latter for whole numbers of hundreds of digits
            return None
        above = self.high is not None and value > self.high
        return None if above or value < self.low or not finite else value

    def __str__(self) -> str:
        kind = "a whole number" if isinstance(self.low, int) else "a number"
        if self.high is None:
            return f"{kind} of at least {self.low}"
        return f"{kind} from {self.low} to {self.high}"
