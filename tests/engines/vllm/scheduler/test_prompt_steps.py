"""Which steps correct the costs of the machine, and from when they are timed."""

from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.scheduler.machine_costs import MEASURED, MachineCosts
from picbench.engines.vllm.scheduler.prompt_steps import PromptSteps


class Bench:
    """Steps of plain prompts on one engine, by a clock that is set."""

    def __init__(self, graph_tokens: int) -> None:
        self.costs = MachineCosts("cuda", MEASURED["cuda"][0], graph_tokens)
        self.times: list[float] = []
        self.costs.correct = lambda factors, seconds, *, linked: self.times.append(seconds)  # type: ignore[method-assign]
        nothing: Any = SimpleNamespace(plan_of=lambda name: None, find=lambda name: None)
        self.now = 0.0
        self.steps = PromptSteps(self.costs, nothing, nothing, lambda: self.now)

    def begin(self, name: str, tokens: int, arrived: float) -> Any:
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens={name: tokens}
        )
        request: Any = SimpleNamespace(num_prompt_tokens=tokens, arrival_time=arrived)
        new = (name,) if tokens > 1 else ()
        self.steps.begin(output, {name: request}, new)
        return output

    def end(self, output: Any) -> None:
        self.steps.end(output)


@pytest.mark.parametrize(("graph_tokens", "tokens"), [(0, 160), (1024, 160), (1024, 4096)])
def test_a_request_that_finds_the_engine_idle_is_timed_from_its_arrival(graph_tokens, tokens):
    bench = Bench(graph_tokens)
    bench.now = 10.0
    step = bench.begin("a", tokens, arrived=7.0)
    bench.now = 15.0
    bench.end(step)
    assert bench.times == [8.0]


@pytest.mark.parametrize(
    ("graph_tokens", "tokens", "seconds"),
    [(0, 160, [5.0, 3.0]), (1024, 1024, [5.0]), (1024, 1025, [5.0, 3.0])],
)
def test_what_the_host_takes_does_not_show_while_another_step_runs(graph_tokens, tokens, seconds):
    """Only without graphs, as on a CPU, or where the GPU takes far longer, is it no matter."""
    bench = Bench(graph_tokens)
    first = bench.begin("a", 4096, arrived=0.0)
    bench.now = 1.0
    second = bench.begin("b", tokens, arrived=0.5)
    bench.now = 5.0
    bench.end(first)
    bench.now = 8.0
    bench.end(second)
    third = bench.begin("c", 160, arrived=7.5)
    bench.now = 9.0
    bench.end(third)
    hidden = [] if graph_tokens else [1.0]
    assert bench.times == [*seconds, *hidden]


def test_the_next_idle_step_counts_again():
    bench = Bench(1024)
    steps = [bench.begin("a", 160, arrived=1.0), bench.begin("b", 160, arrived=1.0)]
    bench.now = 2.0
    for step in steps:
        bench.end(step)
    bench.now = 3.5
    last = bench.begin("c", 160, arrived=3.0)
    bench.now = 4.0
    bench.end(last)
    assert bench.times == [1.0, 1.0]


def test_steps_that_only_decode_do_not_count():
    bench = Bench(0)
    bench.end(bench.begin("a", 1, arrived=1.0))
    assert bench.times == []
