"""What a run and the process of an arm's engine send each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
class GroupResult:
    """The results of a group of requests.

    `outcomes` are in request order, `busy` is the engine's wall-clock seconds and `snapshots` its
    block ledger, whose times start at the group's start. `moved` gives the bytes (loaded, stored)
    between the pool and each tier, `step_times` how long steps took and what tiers took of them,
    `compiled` the kernels that were compiled meanwhile, and `evicted` the blocks of `chunk` and
    `prefix` KV that lost it. If it is not `clean`, a request failed
    and each was run again on its own, so that timings mean nothing.
    """

    outcomes: tuple[Result | ServedReply | Failure, ...]
    busy: float
    snapshots: tuple[Snapshot, ...] = ()
    clean: bool = True
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: tuple[str, ...] = ()
    evicted: Mapping[str, int] = field(default_factory=dict)


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
