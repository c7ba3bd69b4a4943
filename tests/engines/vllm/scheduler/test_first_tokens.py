"""Which requests correct the costs of the machine, and by which time and size."""

from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.request import TokenCounts
from picbench.engines.vllm.scheduler.first_tokens import FirstTokens
from picbench.engines.vllm.scheduler.machine_costs import MEASURED, MachineCosts


class Bench:
    """Requests on one engine, by a clock that is set; `links` are of those with chunks."""

    def __init__(self, **links: Any) -> None:
        self.costs = MachineCosts("cuda", MEASURED["cuda"][0], 1024)
        self.found: list[tuple[tuple[float, ...], float, bool]] = []
        self.costs.correct = lambda factors, seconds, *, linked: self.found.append(  # type: ignore[method-assign]
            (factors, seconds, linked)
        )
        linker: Any = SimpleNamespace(link_of=links.get)
        self.now = 0.0
        self.tokens = FirstTokens(self.costs, linker, lambda: self.now)

    def arrive(self, name: str, prompt: int, *, alone: bool = True) -> Any:
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=prompt,
            num_computed_tokens=0,
            arrival_time=self.now,
        )
        self.tokens.arrive(request, alone=alone)  # type: ignore[arg-type]
        return request

    def step(self, request: Any, tokens: int, hit: int | None = None) -> Any:
        """Schedule a step; `hit` with the first of a request."""
        request.num_computed_tokens += tokens + (hit or 0)
        if hit is not None:
            self.tokens.begin(request, hit)
        output: Any = SimpleNamespace(num_scheduled_tokens={request.request_id: tokens})
        self.tokens.note(output)
        return output

    def end(self, output: Any, now: float) -> None:
        self.now = now
        self.tokens.end(output)


def test_a_request_alone_is_timed_from_its_arrival_to_its_first_token():
    bench = Bench()
    bench.now = 7.0
    request = bench.arrive("a", 4000)
    first, second = bench.step(request, 2048, hit=160), bench.step(request, 1792)
    decoding = bench.step(request, 1)
    for number, output in enumerate((first, second, decoding)):
        bench.end(output, 10.0 + number)
    [(factors, seconds, linked)] = bench.found
    assert seconds == 4.0 and not linked
    # A request, thousands of computed tokens, and its prompt's.
    assert factors[:2] == (1.0, 3.84) and factors[3] == 4.0


def test_requests_beside_others_correct_nothing():
    bench = Bench()
    first = bench.step(bench.arrive("a", 100), 100, hit=0)
    second = bench.step(bench.arrive("b", 100, alone=False), 100, hit=0)
    bench.end(first, 1.0)
    bench.end(second, 2.0)
    assert bench.found == []
    bench.end(bench.step(bench.arrive("c", 100), 100, hit=0), 3.0)
    assert [seconds for _, seconds, _ in bench.found] == [1.0]


def link(*, cost: bool = True, loaded: tuple[str, ...] = ()) -> Any:
    counts = TokenCounts(1200, reused=1000, compiled=100, prefix=0, compile_work=150)
    placed = [SimpleNamespace(view=SimpleNamespace(real=real)) for real in (50, 100)]
    return SimpleNamespace(
        cost=SimpleNamespace(tokens=counts) if cost else None,
        brought=SimpleNamespace(loaded=loaded),
        plan=SimpleNamespace(placed=placed),
    )


def test_chunks_and_what_is_compiled_for_them_are_counted():
    bench = Bench(a=link())
    bench.end(bench.step(bench.arrive("a", 96), 96, hit=0), 1.0)
    [(factors, _, linked)] = bench.found
    # Of 250 computed tokens 150 are of two chunks of 75 tokens.
    assert linked and factors[:6] == (1.0, 0.25, pytest.approx(0.13125), 1.2, 2, 2.0)


@pytest.mark.parametrize("unlike", [link(cost=False), link(loaded=("disk",))])
def test_what_was_not_counted_or_came_from_a_tier_corrects_nothing(unlike):
    bench = Bench(a=unlike)
    bench.end(bench.step(bench.arrive("a", 96), 96, hit=0), 1.0)
    assert bench.found == []
