"""The parameters of traffic."""

from dataclasses import dataclass
from typing import Literal

from picbench.errors import ConfigError

Process = Literal["poisson", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A stream of requests that share chunks.

    Each request is about one topic and contains all its chunks in order. With `chunks` it has
    that many chunks in total (uniform from the first number to the second); the others are drawn
    from all topics without repetition and placed before and after the topic's. Topics and chunks
    are drawn by popularity: rank r has weight ``r ** -zipf``, so that 0 is uniform.

    `cached` is EPIC's context-cache ratio: this share of all chunk tokens is in the cache before
    the run, all others are in chunks of one request only. None starts with an empty cache.
    `users` repeat one request each; None makes every request a new one. `rate` is the mean number
    of arrivals a second; None is a closed loop. Everything is drawn from `seed`. Raises
    ConfigError for impossible values.
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
        chunks = "-".join(map(str, self.chunks or ()))
        _check("chunks", chunks, _is_range(self.chunks), "N or LOW-HIGH, from 1 on")
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
