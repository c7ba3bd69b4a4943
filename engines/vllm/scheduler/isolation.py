"""The linker as the scheduler and the connector call it: no hook of it raises.

An exception ends the request for which the hook was called, or, if that is one of the linker's own,
also a request that waits for its chunk. What a hook answers instead keeps the request where it is
until the scheduler ends it: out of the step if possible, else in the step with an output that is
dropped.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.linker import Linker

if TYPE_CHECKING:
    from vllm.v1.request import Request

T = TypeVar("T")


def _guarded(hook: str, doing: str, otherwise: T) -> Callable[..., T]:
    """The hook of the linker with a name; where it raises, `otherwise`, and its request ends."""

    def guarded(self: "IsolatedLinker", request: "Request", *args: Any, **kwargs: Any) -> T:
        call = partial(getattr(self._linker, hook), request, *args, **kwargs)
        return self._faults.attempt(doing, request.request_id, call, otherwise)

    return guarded


class IsolatedLinker:
    """The hooks of a `Linker`, in the order in which they are called.

    `unloaded` are requests for whose blocks no load was commanded after all; `ended` are the
    clients of those that were ending when their last hook failed.
    """

    def __init__(self, linker: Linker, faults: Faults) -> None:
        self._linker = linker
        self._faults = faults
        self.unloaded: set[str] = set()
        self.ended: dict[str, int] = {}

    def has_failed(self, request: "Request") -> bool:
        """Whether a request is to be ended."""
        return request.request_id in self._faults

    on_arrival = _guarded("on_arrival", "plan a request", None)

    def before_schedule(self, waiting: "Iterable[Request]", reserved: int) -> None:
        """Request chunks; what fails for no request in particular is the first one's fault."""

        def first() -> str | None:
            names = (request.request_id for request in waiting)
            return next((name for name in names if self._linker.plan_of(name)), None)

        prepare = partial(self._linker.before_schedule, waiting, reserved)
        self._faults.succeeds("prepare a step", first, prepare)

    can_schedule = _guarded("can_schedule", "look up chunks", False)

    check_hits = _guarded("check_hits", "map chunks", None)

    _external_tokens = _guarded("external_tokens", "find chunks", (0, False))

    def external_tokens(self, request: "Request", hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a tier or a copy provides; None keeps the request out of the step."""
        found = self._external_tokens(request, hit_tokens)
        return (None, False) if self.has_failed(request) else found

    def on_allocated(self, request: "Request", block_ids: tuple[int, ...], external: int) -> None:
        """Command loads and copies; after a fault, none of them."""
        command = partial(self._linker.on_allocated, request, block_ids, external)
        if not self._faults.succeeds("load chunks", request.request_id, command):
            self._linker.withdraw(request)
            self.unloaded.add(request.request_id)

    on_scheduled = _guarded("on_scheduled", "count a request's cost", None)

    def on_transfer_results(self, results: TransferResults) -> None:
        """Apply the results; what cannot be applied counts as a failure of the tiers."""
        for request_id, reason in results.faults.items():
            self._faults.blame(request_id, reason)
        for received in (results, results.as_failed()):
            apply = partial(self._linker.on_transfer_results, received)
            if self._faults.succeeds("use a tier's results", None, apply):
                return

    on_preempted = _guarded("on_preempted", "preempt a request", None)

    def on_finished(self, request: "Request", block_ids: tuple[int, ...], *, success: bool) -> None:
        """Drop everything kept for a request, also if that fails at first."""
        own = self._linker.is_own(request)
        finish = partial(self._linker.on_finished, request, block_ids, success=success)
        if not self._faults.succeeds("finish a request", request.request_id, finish):
            self._faults.succeeds("clean up", None, partial(self._linker.abandon, request))
            if not own:
                self.ended[request.request_id] = request.client_index

    def orphans(self) -> list[str]:
        """Ids of the linker's own requests that no request waits for any more."""
        return self._faults.attempt("find orphans", None, self._linker.orphans, [])
