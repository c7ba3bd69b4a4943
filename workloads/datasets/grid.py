"""Haystack lengths and needle depths."""

import re
from dataclasses import dataclass, replace

from picbench.errors import ConfigError

_FORM = re.compile(r"(\d+)-(\d+):(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Grid:
    """`lengths` haystacks of `shortest` to `longest` tokens, a needle at `depths` places of each.

    Both are spread evenly, ends included; a single length is the longest, a single depth the
    middle. Raises ConfigError for a grid without cells.
    """

    shortest: int
    longest: int
    lengths: int
    depths: int

    def __post_init__(self) -> None:
        if not (0 < self.shortest <= self.longest and self.lengths > 0 and self.depths > 0):
            raise _error(f"{self.shortest}-{self.longest}:{self.lengths}x{self.depths}")

    def sizes(self, available: int) -> list[int]:
        """Return the lengths in tokens, none above `available`, without repetitions."""
        longest = min(self.longest, available)
        if self.lengths == 1:
            return [longest]
        step = (longest - self.shortest) / (self.lengths - 1)
        return list(dict.fromkeys(round(self.shortest + step * i) for i in range(self.lengths)))

    def within(self, room: int | None, *, whole: bool = False) -> "Grid":
        """Leave out what `room` tokens do not hold (None: no bound); `whole` refuses that."""
        if room is None or room >= self.longest:
            return self
        if room < (least := self.longest if whole else self.shortest):
            raise ConfigError(
                f"`grid`: {least} tokens, where the context has room for {max(0, room)}",
                hint="raise `context`, take a model with a longer one, or a smaller `grid`",
            )
        return replace(self, longest=room)

    @property
    def depth_shares(self) -> list[float]:
        """The depths, from 0 (needle first) to 1 (needle last)."""
        if self.depths == 1:
            return [0.5]
        return [index / (self.depths - 1) for index in range(self.depths)]


#: EPIC's grid (arXiv 2410.15332, evaluation).
EPIC = Grid(1_000, 11_000, 20, 10)


def parse_grid(text: str) -> Grid:
    """Read ``SHORTEST-LONGEST:LENGTHSxDEPTHS``, or raise ConfigError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise _error(text)
    return Grid(*map(int, match.groups()))


def _error(text: str) -> ConfigError:
    return ConfigError(
        f"`grid` {text}: no such grid",
        hint="SHORTEST-LONGEST:LENGTHSxDEPTHS in tokens, such as 1000-11000:20x10",
    )
