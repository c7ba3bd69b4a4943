"""Engines whose ledgers differ, for the tests of papers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness_fakes import FakeEngine, FakeServer, no_gpu

from picbench.engines.config import EngineConfig
from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.request import Request, Result
from picbench.run.session import Services

POOL = 100

#: Blocks by kind at each step, by arm.
LEDGERS = {
    "mepic": [{"chunk": 4.0, "linked": 1.5, "prompt": 0.5}, {"chunk": 6.0, "linked": 2.0}],
    "epic:k=16": [{"private": 10.0, "linked": 1.0}, {"private": 30.0, "linked": 2.0, "pad": 8.0}],
}


@dataclass
class LedgerEngine(FakeEngine):
    """Returns the ledger of its arm, or that of the arm whose requests it served last."""

    def generate(self, requests: Sequence[Request], **options: Any) -> list[Result]:
        self.algorithm = requests[0].algorithm or self.algorithm
        known = {name: options.get(name) for name in ("concurrency", "arrivals")}
        found = super().generate(requests, **known)
        return [replace(one, counts=replace(one.counts, linked=0)) for one in found]

    @property
    def memory(self) -> Sequence[Snapshot]:
        [ledger] = (LEDGERS[arm] for arm in LEDGERS if self.algorithm.startswith(arm))
        found = []
        for step, held in enumerate(ledger):
            kinds = dict.fromkeys(KINDS, 0.0) | held | {"free": POOL - sum(held.values())}
            found.append(Snapshot(step, step / 2, POOL, kinds))
        return found


@dataclass
class Bench:
    """Counts which arms were started; everything but the engines is real.

    Every arm dies at its run number `dies_at`; all are interrupted after `stops_at` runs.
    """

    order: list[str] = field(default_factory=list)
    dies_at: int | None = None
    stops_at: int | None = None

    def services(self) -> Services:
        return Services(launch=self._launch, memory=no_gpu)

    def _launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        self.order.append(f"launch {name}")
        engine = LedgerEngine(name)
        return FakeServer(name, config, self.order, engine, self.dies_at, self._stop)

    def _stop(self) -> None:
        if sum(self.order.count(name) for name in LEDGERS) == self.stops_at:
            raise KeyboardInterrupt

    @property
    def runs(self) -> int:
        """How many runs mepic has served."""
        return self.order.count("mepic")
