"""How long steps took that compute prompts, by which the costs of the machine are corrected."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from picbench.engines.costs import step_factors
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.machine_costs import MachineCosts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class PromptSteps:
    """Times the steps of one scheduler, from when each could begin to when its output is there.

    A step that was scheduled while another one ran begins when that ends; one of requests that
    found the engine idle begins with the arrival of the first of them. While another step runs,
    what the host takes to start one that graphs serve does not show, which is half of what a
    request alone waits for: such steps correct nothing.
    """

    def __init__(
        self, costs: MachineCosts, linker: Linker, jobs: ChunkJobs, clock: Callable[[], float]
    ) -> None:
        self._costs, self._linker, self._jobs, self._clock = costs, linker, jobs, clock
        # Their outputs, when they began, their factors, if they correct anything, and whether any
        # request in them is linked.
        self._steps: deque[tuple[SchedulerOutput, float, tuple[float, ...], bool]] = deque(
            maxlen=16
        )
        self._ended = 0.0

    def begin(
        self, output: "SchedulerOutput", requests: "Mapping[str, Request]", begun: Iterable[str]
    ) -> None:
        """A step was scheduled; requests `begun` compute the first tokens of their prompts."""
        new, tokens = set(begun), output.total_num_scheduled_tokens
        if tokens <= len(output.num_scheduled_tokens) and not new:
            return
        pairs = prompt = chunks = jobs = 0
        linked = False
        for name, own in output.num_scheduled_tokens.items():
            if own == 1 and name not in new:
                continue
            plan, job = self._linker.plan_of(name), self._jobs.find(name)
            length = plan.prompt_tokens if plan else requests[name].num_prompt_tokens
            if job is not None:
                jobs += 1
            elif name in new:
                prompt += length
                chunks += len(plan.placed) if plan else 0
            linked |= plan is not None
            pairs += own * length
        prefill = 1.0, tokens / 1e3, pairs / 1e6, prompt / 1e3, chunks, jobs
        factors = step_factors(prefill, tokens, jobs, self._costs.graph_tokens)
        arrived = min((requests[name].arrival_time for name in new), default=0.0)
        idle = not self._steps and arrived > self._ended
        if not idle and tokens <= self._costs.graph_tokens:
            factors = ()
        self._steps.append((output, arrived if idle else self._clock(), factors, linked))

    def end(self, output: "SchedulerOutput") -> None:
        """A step's output is there."""
        now = self._clock()
        if self._steps and self._steps[0][0] is output:
            _, began, factors, linked = self._steps.popleft()
            if factors:
                self._costs.correct(factors, now - max(began, self._ended), linked=linked)
        self._ended = now
