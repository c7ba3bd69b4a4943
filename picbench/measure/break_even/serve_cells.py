"""Serve a cell's requests in an engine, and note what they took."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Request, Result
from picbench.errors import EngineError
from picbench.grid.measured_grid import ArmCell
from picbench.run.chunk_order import ChunkOrder
from picbench.run.protocol import to_request
from picbench.workloads.sample import Sample


@dataclass(frozen=True, slots=True)
class CellWork:
    """What an arm serves: batches one after another, without dropping KV between them.

    Each batch is measured by itself. `running` requests are served at a time, or all at their
    `arrivals`, in seconds from the start of their batch.
    """

    arm: str
    batches: tuple[tuple[Request, ...], ...]
    running: int
    arrivals: tuple[tuple[float, ...], ...] | None = None


def make_work(
    arm: str,
    batches: Sequence[Sequence[Sample]],
    running: int,
    arrivals: Sequence[float] | None,
    *,
    stock: bool,
) -> CellWork:
    """The requests of an arm. A stock engine serves `full` with a tenant for each request."""
    order, number = ChunkOrder(), 0
    requests: list[tuple[Request, ...]] = []
    times: list[tuple[float, ...]] = []
    for batch in batches:
        made = []
        for sample in batch:
            sent = order.arrange(sample) if arm == "reorder" else sample
            algorithm = None if stock else "prefix" if arm == "reorder" else arm
            request = to_request(sent, algorithm)
            if stock and arm == "full":
                request = replace(request, salt=f"tenant {number}")
            made.append(request)
            number += 1
        if arrivals is not None:
            begin = arrivals[number - len(made)]
            times.append(tuple(time - begin for time in arrivals[number - len(made) : number]))
        requests.append(tuple(made))
    return CellWork(arm, tuple(requests), running, tuple(times) or None)


def without_replies(work: CellWork) -> CellWork:
    """The same prompts, of whose replies only the first token is generated: for TTFT."""
    batches = (tuple(replace(r, max_tokens=1) for r in batch) for batch in work.batches)
    return replace(work, batches=tuple(batches))


def serve_cells(work: CellWork, engine: Engine) -> list[ArmCell]:
    """Serve all batches from an empty cache; a cell for each. Raises EngineError for a failure."""
    engine.reset()
    found = []
    for number, batch in enumerate(work.batches):
        arrivals = work.arrivals[number] if work.arrivals else None
        engine.measure()
        results = engine.generate(
            batch,
            ignore_eos=True,
            concurrency=None if arrivals else work.running,
            arrivals=arrivals,
        )
        found.append(_cell(results, engine.busy_s, summarise(engine.memory).peak_referenced))
    return found


def _cell(results: Sequence[Result], took: float, peak: float) -> ArmCell:
    failed = next((result.error for result in results if result.error), None)
    if failed is not None:
        raise EngineError(f"a request of the grid failed: {failed}")
    ttft = [result.timings.ttft for result in results]
    counts = [result.counts for result in results]
    computed = [c.prompt - (c.reused or 0) + c.compiled for c in counts]
    compiled = [count.compiled for count in counts]
    return ArmCell(
        requests=len(results),
        ttft_s=float(np.median(ttft)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        requests_s=len(results) / took,
        peak_blocks=peak,
        prompt=float(np.mean([count.prompt for count in counts])),
        computed=float(np.mean(computed)),
        output=float(np.mean([len(result.tokens) for result in results])),
        compiled=float(np.mean(compiled)),
        middle=_middle(sorted(zip(computed, compiled, strict=True))),
    )


def _middle(ascending: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The means of the one or two requests whose TTFT makes the median."""
    low, high = ascending[(len(ascending) - 1) // 2], ascending[len(ascending) // 2]
    return (low[0] + high[0]) / 2, (low[1] + high[1]) / 2
