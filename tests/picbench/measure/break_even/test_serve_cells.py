"""What arms serve in a cell, and how many requests at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from picbench.engines.request import Request, Result
from picbench.measure.break_even.grid_plan import GRIDS, draw_traffic, plan_grid
from picbench.measure.break_even.serve_cells import make_work, serve_cells

SETTINGS = GRIDS["cpu"]


def test_stock_engines_serve_full_with_a_tenant_each() -> None:
    requests = draw_traffic(plan_grid(SETTINGS)[0], SETTINGS)
    full = make_work("full", requests, 1, stock=True)
    salts = [request.salt for batch in full.batches for request in batch.requests]
    assert len(set(salts)) == len(salts) == len(requests.cold) + len(requests.warm)
    assert {r.algorithm for batch in full.batches for r in batch.requests} == {None}
    ours = make_work("reorder", requests, 1, stock=False)
    assert {r.algorithm for batch in ours.batches for r in batch.requests} == {"prefix"}


def test_the_cache_is_filled_between_what_is_measured() -> None:
    requests = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    for arm in ("prefix", "reorder", "mepic"):
        cold, fill, warm = make_work(arm, requests, 1, stock=False).batches
        assert cold.measured and warm.measured and not fill.measured
        assert len(fill.requests) == len(requests.fill) > 0


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("device", GRIDS)
def test_what_is_not_reordered_is_served_once(device: str, stock: bool) -> None:
    settings = GRIDS[device]
    left_out = 0
    for traffic in plan_grid(settings)[:100]:
        requests = draw_traffic(traffic, settings)
        one, other = (make_work(arm, requests, 1, stock=stock) for arm in ("prefix", "reorder"))
        served = "reorder" in settings.arms_at(traffic.point)
        assert served or one.batches == other.batches
        left_out += not served
    assert left_out > 5


def test_each_batch_has_arrivals_of_its_own() -> None:
    requests = draw_traffic(plan_grid(SETTINGS)[0], SETTINGS)
    times = tuple(float(number) for number in range(2 * len(requests.cold)))
    cold, fill, warm = make_work("mepic", replace(requests, arrivals=times), 1, stock=False).batches
    assert cold.arrivals == warm.arrivals == times[: len(requests.cold)]
    assert fill.arrivals is None


def test_what_fills_the_cache_is_served_together() -> None:
    class Served:
        """An engine that notes how many requests it would run at a time."""

        memory: tuple[()] = ()
        busy_s = 1.0

        def __init__(self) -> None:
            self.running: list[int | None] = []

        def reset(self) -> None: ...

        def measure(self) -> None: ...

        def generate(self, _: Sequence[Request], **given: Any) -> list[Result]:
            self.running.append(given["concurrency"])
            return []

    requests = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    work = make_work("mepic", requests, 1, stock=False, filling=16)
    filled = tuple(batch for batch in work.batches if not batch.measured)
    engine = Served()
    serve_cells(replace(work, batches=filled), engine)  # type: ignore[arg-type]
    assert engine.running == [16]
    assert work.running == 1
