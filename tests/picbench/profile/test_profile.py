"""Steps of a simulated scheduler, and the blocks that are held in them."""

import pytest

from picbench.profile.profile import ClosedLoop, RequestSize, serve_loop
from picbench.profile.reuse import RequestReuse


def size(computed: float = 100, output: float = 4, prompt: float = 100) -> RequestSize:
    return RequestSize(prompt, computed, 0, 0, 0, output)


def test_one_at_a_time_takes_a_step_for_each_token() -> None:
    found = serve_loop([size(), size()], 1, 2048)
    assert found.requests == 2
    assert (found.steps, found.replies) == (8, 6)
    assert found.read == pytest.approx(2 * (101 + 102 + 103) / 1e3)
    assert found.prefill[1] == pytest.approx(0.2)


def test_a_budget_spreads_prompts_over_steps() -> None:
    # 250 tokens take three steps, in the last of which the next request begins.
    found = serve_loop([size(250, 1), size(250, 1)], 2, 100)
    assert found.steps == 5
    assert found.replies == 0
    assert found.prefill_steps == 5


@pytest.mark.parametrize(
    ("computed", "steps", "started", "beyond"),
    # 2 x 200 tokens are one step, which a graph serves; one of 2 x 400 is beyond 500 tokens, and of
    # no graph; of 2 x 1,300 one step has 2,048 tokens and the other 552.
    [
        (200, 1, 0, (0.0, 0.0)),
        (400, 1, 1, (0.3, 0.0)),
        (1300, 2, 2, (1.548 + 0.052, 1.048)),
    ],
)
def test_steps_of_prompts_are_counted(
    computed: float, steps: float, started: float, beyond: tuple[float, ...]
) -> None:
    found = serve_loop([size(computed), size(computed)], 2, 2048, 512)
    assert found.prefill_steps == steps
    assert found.started == started
    assert found.beyond == pytest.approx(beyond)
    assert serve_loop([size(computed), size(computed)], 2, 2048).started == 0
    assert found.steps > steps
    assert found.step_costs() == found.costs()[len(found.prefill) :]


def test_a_slot_is_filled_when_its_request_has_ended() -> None:
    # The short request ends after its second step, and the third one runs beside the long one.
    found = serve_loop([size(output=10), size(output=2), size(output=8)], 2, 2048)
    assert found.steps == 10
    assert found.replies == 9 + 1 + 7


@pytest.mark.parametrize(("output", "peak"), [(1, 20), (1 + 16, 22)])
def test_blocks_of_requests_that_run_together(output: int, peak: int) -> None:
    loop = ClosedLoop(2, 2048)
    for number in range(4):
        own = 6 + (output > 1)
        reuse = RequestReuse(100, 0, own_blocks=own, shared=((b"chunk", 8),))
        loop.push(size(output=output), reuse)
        assert number == 3 or loop.counts.requests <= number + 1
    loop.close()
    assert loop.held.peak == peak
    assert loop.counts.requests == 4


def test_compiles_hold_blocks_until_their_step_has_ended() -> None:
    loop = ClosedLoop(1, 2048)
    loop.push(size(), RequestReuse(100, 0, 100, own_blocks=5, compile_blocks=3))
    loop.push(size(), RequestReuse(100, 0, own_blocks=6))
    loop.close()
    assert loop.held.peak == 8
