"""The engines that serve a grid's cells: all up at once, each in a process of its own.

On a GPU `full`, `prefix` and `reorder` are stock vLLM with the budgets that it has by default. On a
CPU one engine serves all arms: stock vLLM has blocks of another size there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf

from picbench.arms.server import Server
from picbench.engines.config import EngineConfig
from picbench.grid.measured_grid import ArmCell
from picbench.measure.break_even.grid_plan import ARMS, GridSettings
from picbench.measure.break_even.serve_cells import CellWork, ServedCells, serve_cells
from picbench.measure.started_engines import started_engines

#: What the engine of each arm says of itself.
Described = Mapping[str, Mapping[str, object]]

#: Arms that stock vLLM serves.
_STOCK = ("full", "prefix", "reorder")


class GridEngines:
    """The engine of each arm, which serves cells.

    With `settles` requests alone begin on quiet cores. All engines hold a core against the quietest
    one that any of them has met so far.
    """

    def __init__(
        self, servers: Mapping[str, Server], stock: frozenset[str], *, settles: bool
    ) -> None:
        self._servers, self._stock = servers, stock
        self._shortest = inf if settles else None

    def is_stock(self, arm: str) -> bool:
        """Whether stock vLLM serves an arm."""
        return arm in self._stock

    def serve(self, work: CellWork) -> list[ArmCell]:
        """Serve what an arm is to serve; a cell for each batch that is measured.

        Raises EngineError for a failure.
        """
        serve = partial(serve_cells, work, self._shortest)
        served: ServedCells = self._servers[work.arm].call(serve)
        self._shortest = served.shortest
        return served.cells


@contextmanager
def open_engines(
    config: EngineConfig, settings: GridSettings
) -> Iterator[tuple[GridEngines, Described]]:
    """Engines of a model, for a device and a type, and what the one of each arm says of itself."""
    config = replace(config, context=settings.longest + 64, kv_blocks=settings.pool, tiers="")
    configs = {"picbench": config}
    if config.device == "cuda":
        configs["stock"] = replace(config, stock=True, algorithm="prefix")
    with started_engines(configs) as (servers, described):
        on_gpu = config.device == "cuda"
        stock = frozenset(_STOCK if on_gpu else ())
        names = {arm: "stock" if arm in stock else "picbench" for arm in ARMS}
        by_arm = {arm: servers[name] for arm, name in names.items()}
        # A CPU that computes the steps is never quiet.
        engines = GridEngines(by_arm, stock, settles=on_gpu)
        yield engines, {arm: described[name] for arm, name in names.items()}
