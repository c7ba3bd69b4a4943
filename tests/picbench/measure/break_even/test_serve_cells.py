"""What arms serve in a cell, and how many requests at a time."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.experiments import grid as serving
from picbench.experiments.grid import CellWork, make_work, serve_cells
from picbench.experiments.grid_plan import GRIDS, draw_traffic, plan_grid

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


class Served:
    """An engine that notes how many requests each call has, and how many it is to run at a time."""

    memory: tuple[()] = ()
    busy_s = 1.5

    def __init__(self) -> None:
        self.calls: list[tuple[int, int | None]] = []

    def reset(self) -> None: ...

    def measure(self) -> None: ...

    def generate(self, requests: Sequence[Request], **given: Any) -> list[Result]:
        self.calls.append((len(requests), given["concurrency"]))
        timings = Timings(ttft=0.5, prefill=0.25, tpot=None, e2e=1.0)
        counts = TokenCounts(prompt=100, reused=40, linked=10, compiled=0, padded=0)
        return [Result("", (1, 2), (3,), timings, counts, Hits()) for _ in requests]


def cpu_work(requests: int, running: int) -> CellWork:
    """The first batch of mepic's, as many requests of it."""
    drawn = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    work = make_work("mepic", drawn, running, stock=False)
    batch = replace(work.batches[0], requests=work.batches[0].requests[:requests])
    return replace(work, batches=(batch,))


def test_what_fills_the_cache_is_served_together() -> None:
    requests = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    work = make_work("mepic", requests, 1, stock=False, filling=16)
    filled = tuple(batch for batch in work.batches if not batch.measured)
    engine = Served()
    serve_cells(replace(work, batches=filled), inf, engine)  # type: ignore[arg-type]
    assert engine.calls == [(len(filled[0].requests), 16)]
    assert work.running == 1


def test_requests_alone_begin_on_a_quiet_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cores:
        """The first of four requests finds no quiet core."""

        def __init__(self, shortest: float) -> None:
            self.shortest = shortest / 2
            self.settled = iter((False, True, True, True))

        def settle(self) -> bool:
            return next(self.settled)

    monkeypatch.setattr(serving, "QuietCores", Cores)
    engine = Served()
    served = serve_cells(cpu_work(4, running=1), 8.0, engine)  # type: ignore[arg-type]
    assert engine.calls == 4 * [(1, 1)]
    [cell] = served.cells
    assert served.shortest == 4.0
    assert (cell.requests, cell.quiet, cell.ttft_s) == (4, 0.75, 0.5)
    assert cell.requests_s == pytest.approx(4 / (4 * 1.5))


def test_without_quiet_cores_requests_alone_are_one_call() -> None:
    engine = Served()
    served = serve_cells(cpu_work(4, running=1), None, engine)  # type: ignore[arg-type]
    assert engine.calls == [(4, 1)]
    assert (served.shortest, served.cells[0].quiet) == (None, None)


def test_a_burst_is_one_call() -> None:
    engine = Served()
    [cell] = serve_cells(cpu_work(4, running=4), inf, engine).cells  # type: ignore[arg-type]
    assert engine.calls == [(4, 4)]
    assert cell.requests_s == pytest.approx(4 / 1.5)
    assert cell.quiet in (0.0, 1.0)
