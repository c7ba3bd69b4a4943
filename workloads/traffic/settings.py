"""What traffic is asked for."""

from dataclasses import dataclass
from typing import Literal

from picbench.errors import ConfigError

Process = Literal["poisson", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A stream of requests that share chunks.

    Each request asks about one topic, all of whose chunks are in it, in their order. With `chunks`
    it has that many chunks in all (equally likely from the first number to the second), and those
    that are not its topic's are drawn from all topics' chunks, none twice, and stand around it.
    Topics and chunks are drawn by popularity: the one of rank r with a weight of ``r ** -zipf``,
    so that 0 makes all equally likely.

    `cached` is EPIC's context-cache ratio: this share of all chunk tokens is in the cache before
    the run, the rest are chunks that no other request has. None leaves the cache cold.
    `users` send one request each, again and again; None makes every request a new one.
    `rate` is the mean number of arrivals a second; None leaves requests to a closed loop.
    Everything is drawn from `seed`. Raises ConfigError for what cannot be.
    """

    requests: int
    seed: int = 0
    chunks: tuple[int, int] | None = None
    zipf: float = 0.0
    cached: float | None = None
    users: int | None = None
    rate: float | None = None
    process: Process = "poisson"

    def __post_init__(self) -> None:
        _check("requests", self.requests, self.requests >= 1, "at least 1")
        _check("chunks", self.chunks, _is_range(self.chunks), "N or LOW-HIGH, from 1 on")
        _check("zipf", self.zipf, 0 <= self.zipf <= 10, "0 (uniform) to 10")
        cached = self.cached is None or 0 <= self.cached <= 1
        _check("cached", self.cached, cached, "a share from 0 to 1")
        _check("users", self.users, self.users is None or self.users >= 1, "at least 1")
        rate = self.rate is None or 0 < self.rate < float("inf")
        _check("rate", self.rate, rate, "requests a second, above 0")


def _is_range(chunks: tuple[int, int] | None) -> bool:
    return chunks is None or 1 <= chunks[0] <= chunks[1]


def _check(field: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ConfigError(f"`{field}` {value} is not possible", hint=f"`{field}` takes {wanted}")
