"""Serve a cell's requests in an engine, and note what they took.

On a GPU requests alone begin on a quiet core each, because small steps wait for the host: what else
a rented machine does there would otherwise decide how long they take.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Request, Result
from picbench.errors import EngineError
from picbench.grid.measured_grid import ArmCell
from picbench.measure.break_even.grid_plan import GridRequests
from picbench.measure.warm.quiet_cores import QuietCores
from picbench.run.chunk_order import ChunkOrder
from picbench.run.protocol import to_request
from picbench.workloads.sample import Sample


@dataclass(frozen=True, slots=True)
class CellBatch:
    """Requests that are served together, at their `arrivals` if any: seconds from its start.

    One that is not `measured` is there for the cache.
    """

    requests: tuple[Request, ...]
    arrivals: tuple[float, ...] | None = None
    measured: bool = True


@dataclass(frozen=True, slots=True)
class CellWork:
    """What an arm serves: batches one after another, without dropping KV between them.

    Where they do not arrive, `running` requests are served at a time, and `filling` of those that
    are there for the cache: what it has in the end is the same.
    """

    arm: str
    batches: tuple[CellBatch, ...]
    running: int
    filling: int = 1


class CellWorkMaker:
    """Makes requests of samples for one arm; `full` of a stock engine gets a tenant for each."""

    def __init__(self, arm: str, *, stock: bool) -> None:
        self._arm, self._stock = arm, stock
        self._order, self._tenants = ChunkOrder(), 0

    def make(
        self,
        samples: Sequence[Sample],
        arrivals: Sequence[float] | None = None,
        *,
        measured: bool = True,
    ) -> CellBatch:
        """A batch that follows those that were made before; `arrivals` may begin at any time."""
        times = None if arrivals is None else tuple(time - arrivals[0] for time in arrivals)
        return CellBatch(tuple(map(self._request, samples)), times, measured)

    def _request(self, sample: Sample) -> Request:
        reordered = self._arm == "reorder"
        sent = self._order.arrange(sample) if reordered else sample
        request = to_request(sent, None if self._stock else "prefix" if reordered else self._arm)
        if not (self._stock and self._arm == "full"):
            return request
        self._tenants += 1
        return replace(request, salt=f"tenant {self._tenants}")


def make_work(
    arm: str, requests: GridRequests, running: int, *, stock: bool, filling: int = 1
) -> CellWork:
    """What an arm serves at a point. Nothing fills the cache of `full`, which has none."""
    maker, count = CellWorkMaker(arm, stock=stock), len(requests.cold)
    times = requests.arrivals
    cold = maker.make(requests.cold, times and times[:count])
    fill = maker.make(() if arm == "full" else requests.fill, measured=False)
    warm = maker.make(requests.warm, times and times[count:])
    return CellWork(arm, (cold, fill, warm), running, filling)


def without_replies(work: CellWork) -> CellWork:
    """The same prompts, of whose replies only the first token is generated: for TTFT."""
    batches = (
        replace(batch, requests=tuple(replace(r, max_tokens=1) for r in batch.requests))
        for batch in work.batches
    )
    return replace(work, batches=tuple(batches))


@dataclass(frozen=True, slots=True)
class ServedCells:
    """A cell for each batch that is measured, and the shortest loop on a core; see `QuietCores`."""

    cells: list[ArmCell]
    shortest: float | None


def serve_cells(work: CellWork, shortest: float | None, engine: Engine) -> ServedCells:
    """Serve all batches from an empty cache.

    The `shortest` loop that was met before says which cores are quiet; None: any core will do.
    Raises EngineError for a failure.
    """
    engine.reset()
    cores = None if shortest is None else QuietCores(shortest)
    found = []
    for batch in work.batches:
        if not batch.requests:
            continue
        engine.measure()
        running = work.running if batch.measured else work.filling
        served = _serve(engine, batch, running, cores)
        failed = next((result.error for result in served.results if result.error), None)
        if failed is not None:
            raise EngineError(f"a request of the grid failed: {failed}")
        if batch.measured:
            found.append(_cell(served, summarise(engine.memory).peak_referenced))
    return ServedCells(found, None if cores is None else cores.shortest)


@dataclass(frozen=True, slots=True)
class _Served:
    """Results, the seconds that the engine was busy, and the share of calls on a quiet core."""

    results: Sequence[Result]
    busy_s: float
    quiet: float | None


def _serve(engine: Engine, batch: CellBatch, running: int, cores: QuietCores | None) -> _Served:
    """Serve a batch in one call of the engine; where cores matter, one for each request alone."""
    alone = cores is not None and running == 1 and batch.arrivals is None
    calls = [(one,) for one in batch.requests] if alone else [batch.requests]
    results, busy, quiet = list[Result](), 0.0, 0
    for requests in calls:
        quiet += cores is not None and cores.settle()
        results += engine.generate(
            requests,
            ignore_eos=True,
            concurrency=None if batch.arrivals else running,
            arrivals=batch.arrivals,
        )
        busy += engine.busy_s
    return _Served(results, busy, None if cores is None else quiet / len(calls))


def _cell(served: _Served, peak: float) -> ArmCell:
    results = served.results
    ttft = [result.timings.ttft for result in results]
    counts = [result.counts for result in results]
    computed = [c.prompt - (c.reused or 0) + c.compiled for c in counts]
    compiled = [count.compiled for count in counts]
    return ArmCell(
        requests=len(results),
        ttft_s=float(np.median(ttft)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        requests_s=len(results) / served.busy_s,
        peak_blocks=peak,
        prompt=float(np.mean([count.prompt for count in counts])),
        computed=float(np.mean(computed)),
        output=float(np.mean([len(result.tokens) for result in results])),
        compiled=float(np.mean(compiled)),
        middle=_middle(sorted(zip(computed, compiled, strict=True))),
        quiet=served.quiet,
    )


def _middle(ascending: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The means of the one or two requests whose TTFT makes the median."""
    low, high = ascending[(len(ascending) - 1) // 2], ascending[len(ascending) // 2]
    return (low[0] + high[0]) / 2, (low[1] + high[1]) / 2
