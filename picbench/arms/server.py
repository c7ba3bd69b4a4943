"""The interface between the run protocol and an arm's engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from picbench.engines.ledger import Snapshot
from picbench.engines.request import Request, Result


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that gave no result, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The results of a group of requests.

    `outcomes` are in request order, `busy` is the engine's wall-clock seconds and `snapshots` its
    block ledger, whose times start at the group's start. `moved` gives the bytes (loaded, stored)
    between the pool and each tier. If it is not `clean`, a request failed and each was run again on
    its own, so that timings mean nothing.
    """

    outcomes: tuple[Result | Failure, ...]
    busy: float
    snapshots: tuple[Snapshot, ...] = ()
    clean: bool = True
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests to run together, and when; see `Server.run`."""

    requests: tuple[Request, ...]
    concurrency: int | None
    arrivals: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop all cached KV."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a module, to be called with the engine; its answer crosses back."""

    function: Callable[[Any], Any]


class Server(Protocol):
    """One arm's engine, which the constructor starts."""

    def ready(self) -> Mapping[str, object]:
        """Wait until the engine is up and return what it is; EngineError if it never will be."""

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time; EngineError when the engine is gone.

        With `arrivals`, each request is sent so many seconds after the group's start.
        """

    def reset(self) -> None:
        """Drop all cached KV; EngineError when the engine is gone."""

    def close(self) -> None:
        """Let the engine finish and end."""

    def kill(self) -> None:
        """End the engine at once."""
