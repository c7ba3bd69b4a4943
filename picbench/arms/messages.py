"""What a run and the process of an arm's engine send each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import Snapshot
from picbench.engines.request import Request, Result


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that gave no result, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class ServedReply:
    """The reply of a server elsewhere; times in seconds, as in `Timings`.

    Of its tokens only the number is known. `cached_tokens` of the prompt came from the server's
    cache, None where it does not say.
    """

    text: str
    output_tokens: int
    ttft: float
    tpot: float | None
    e2e: float
    late: float = 0.0
    cached_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What a server elsewhere counted by itself, over all of its engines and users.

    Tokens of prompts: all, those that came from any cache, those looked up in its prefix cache,
    those found there, and those found in a cache outside of the engine. `peak_kv_usage` is the
    largest share of its KV memory, from 0 to 1, that was seen in use. None is what it does not say.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    preemptions: int | None = None
    peak_kv_usage: float | None = None

    @property
    def reused_share(self) -> float | None:
        """The share of prompt tokens that came from its caches, None where it does not say."""
        if self.prompt_tokens and self.cached_tokens is not None:
            return self.cached_tokens / self.prompt_tokens
        if self.queried_tokens and self.hit_tokens is not None:
            return (self.hit_tokens + (self.external_hit_tokens or 0)) / self.queried_tokens
        return None

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        """Both together; what one of them does not say is not known of both."""
        sums = {
            name: None if one is None or two is None else one + two
            for name, one, two in (
                (f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
            )
        }
        usages = (self.peak_kv_usage, other.peak_kv_usage)
        known = [usage for usage in usages if usage is not None]
        return replace(ServerCounts(**sums), peak_kv_usage=max(known, default=None))


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The results of a group of requests.

    `outcomes` are in request order, `busy` is the engine's wall-clock seconds and `snapshots` its
    block ledger, whose times start at the group's start. `moved` gives the bytes (loaded, stored)
    between the pool and each tier, `step_times` how long steps took and what tiers took of them,
    `compiled` the kernels that were compiled meanwhile, and `evicted` the blocks of `chunk` and
    `prefix` KV that lost it. If it is not `clean`, a request failed
    and each was run again on its own, so that timings mean nothing. `counted` is what a server
    elsewhere counted meanwhile, None where it does not say.
    """

    outcomes: tuple[Result | ServedReply | Failure, ...]
    busy: float
    snapshots: tuple[Snapshot, ...] = ()
    clean: bool = True
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: tuple[str, ...] = ()
    evicted: Mapping[str, int] = field(default_factory=dict)
    counted: ServerCounts | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Requests to run together, at most `concurrency` at a time or at `arrivals` (seconds)."""

    requests: tuple[Request, ...]
    concurrency: int | None
    arrivals: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a module, to be called with the engine; its answer crosses back."""

    function: Callable[[Any], Any]
