"""The linker as the scheduler and the connector call it: no hook of it raises.

An exception ends the request for which the hook was called, or, if that is one of the linker's own,
also a request that waits for its chunk. What a hook answers instead keeps the request where it is
until the scheduler ends it: out of the step if possible, else in the step with an output that is
dropped.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.linker import Linker

if TYPE_CHECKING:
    from vllm.v1.request import Request


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

    def on_arrival(self, request: "Request") -> None:
        """Plan a new request."""
        self._faults.succeeds(
            "plan a request", request.request_id, lambda: self._linker.on_arrival(request)
        )

    def before_schedule(self, waiting: "Iterable[Request]", reserved: int) -> None:
        """Request chunks; what fails for no request in particular is the first one's fault."""

        def first() -> str | None:
            names = (request.request_id for request in waiting)
            return next((name for name in names if self._linker.plan_of(name)), None)

        self._faults.succeeds(
            "prepare a step", first, lambda: self._linker.before_schedule(waiting, reserved)
        )

    def can_schedule(self, request: "Request") -> bool:
        """Whether a waiting request may be scheduled now."""
        return self._faults.attempt(
            "look up chunks",
            request.request_id,
            lambda: self._linker.can_schedule(request),
            False,
        )

    def check_hits(self, request: "Request", hit_tokens: int) -> None:
        """Check that a request finds the chunks that it maps."""
        self._faults.succeeds(
            "map chunks",
            request.request_id,
            lambda: self._linker.check_hits(request, hit_tokens),
        )

    def external_tokens(self, request: "Request", hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a tier or a copy provides; None keeps the request out of the step."""
        tokens, loads = self._faults.attempt(
            "find chunks",
            request.request_id,
            lambda: self._linker.external_tokens(request, hit_tokens),
            (0, False),
        )
        return (None, False) if self.has_failed(request) else (tokens, loads)

    def on_allocated(self, request: "Request", block_ids: tuple[int, ...], external: int) -> None:
        """Command loads and copies; after a fault, none of them."""
        if not self._faults.succeeds(
            "load chunks",
            request.request_id,
            lambda: self._linker.on_allocated(request, block_ids, external),
        ):
            self._linker.withdraw(request)
            self.unloaded.add(request.request_id)

    def on_scheduled(self, request: "Request", hit_tokens: int) -> None:
        """Release what was held for a request, and count its cost."""
        self._faults.succeeds(
            "count a request's cost",
            request.request_id,
            lambda: self._linker.on_scheduled(request, hit_tokens),
        )

    def on_transfer_results(self, results: TransferResults) -> None:
        """Apply the results; what cannot be applied counts as a failure of the tiers."""
        for request_id, reason in results.faults.items():
            self._faults.blame(request_id, reason)
        for received in (results, results.as_failed()):
            if self._faults.succeeds(
                "use a tier's results",
                None,
                lambda received=received: self._linker.on_transfer_results(received),  # type: ignore[misc]
            ):
                return

    def on_preempted(self, request: "Request", block_ids: tuple[int, ...]) -> None:
        """Forget private blocks."""
        self._faults.succeeds(
            "preempt a request",
            request.request_id,
            lambda: self._linker.on_preempted(request, block_ids),
        )

    def on_finished(self, request: "Request", block_ids: tuple[int, ...], *, success: bool) -> None:
        """Drop everything kept for a request, also if that fails at first."""
        own = self._linker.is_own(request)
        if not self._faults.succeeds(
            "finish a request",
            request.request_id,
            lambda: self._linker.on_finished(request, block_ids, success=success),
        ):
            self._faults.succeeds("clean up", None, lambda: self._linker.abandon(request))
            if not own:
                self.ended[request.request_id] = request.client_index

    def orphans(self) -> list[str]:
        """Ids of the linker's own requests that no request waits for any more."""
        return self._faults.attempt("find orphans", None, self._linker.orphans, [])
