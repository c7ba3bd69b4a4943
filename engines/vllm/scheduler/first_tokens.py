"""How long requests waited for their first token; that corrects the costs of the machine."""

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

from picbench.engines.costs import RequestSize
from picbench.engines.request import TokenCounts
from picbench.engines.vllm.scheduler.linker import Link, Linker
from picbench.engines.vllm.scheduler.machine_costs import MachineCosts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FirstTokens:
    """Times the requests of one scheduler that had the engine to themselves.

    From a request's arrival to the end of the step with its first token: that is what the costs
    are of. Beside others a request shares its steps, and while another step runs, what the host
    takes to start one does not show, which is half of what a short request alone waits for. Times
    of a tier that loads chunks are not the machine's either.
    """

    def __init__(self, costs: MachineCosts, linker: Linker, clock: Callable[[], float]) -> None:
        self._costs, self._linker, self._clock = costs, linker, clock
        # The request that is alone, the tokens that the cache had of it, the step with its first.
        self._request: Request | None = None
        self._hit: int | None = None
        self._step: SchedulerOutput | None = None

    def arrive(self, request: "Request", *, alone: bool) -> None:
        """A user's request arrived; whether the engine has no other."""
        self._request, self._hit, self._step = request if alone else None, None, None

    def begin(self, request: "Request", hit: int) -> None:
        """A request was scheduled for the first time, with so many tokens in the cache."""
        if request is self._request and self._hit is None:
            self._hit = hit

    def note(self, output: "SchedulerOutput") -> None:
        """A step was scheduled."""
        one = self._request
        if one is None or self._step or one.request_id not in output.num_scheduled_tokens:
            return
        if one.num_computed_tokens >= one.num_prompt_tokens:
            self._step = output

    def end(self, output: "SchedulerOutput") -> None:
        """A step's output is there."""
        one, hit = self._request, self._hit
        if one is None or hit is None or self._step is not output:
            return
        self._request = None
        link = self._linker.link_of(one.request_id)
        if link and (link.cost is None or link.brought.loaded):
            return
        size = _linked(link, link.cost.tokens) if link and link.cost else _plain(one, hit)
        factors = size.first_token(self._costs.graph_tokens)
        self._costs.correct(factors, self._clock() - one.arrival_time, linked=link is not None)


def _plain(request: "Request", hit: int) -> RequestSize:
    prompt = request.num_prompt_tokens
    return RequestSize(prompt, prompt - hit, 0.0, 0, 0.0, 1.0)


def _linked(link: Link, counts: TokenCounts) -> RequestSize:
    work, placed = counts.compile_work, link.plan.placed
    mean = fmean(chunk.view.real for chunk in placed) if placed else 0.0
    computed = (counts.computed or 0) + work
    return RequestSize(counts.prompt, computed, work, len(placed), mean, 1.0)
