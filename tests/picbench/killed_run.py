"""A run over fake engines for tests that kill it: `python killed_run.py picbench's arguments`.

Every batch takes a few milliseconds, so that a kill finds the run at any of its steps.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness_fakes import CachingEngine, FakeServer, Harness, make_reusing_samples

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request
from picbench.store.records import GroupResult
from picbench.workloads.sample import Sample

REQUESTS = 60
SECONDS = 0.004


class SlowServer(FakeServer):
    """Takes a while for each group."""

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        time.sleep(SECONDS)
        return super().run(requests, concurrency, arrivals)


@dataclass
class SlowHarness(Harness):
    """Engines that remember, in servers that are slow."""

    samples: Sequence[Sample] = field(default_factory=lambda: make_reusing_samples(REQUESTS))

    def launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        super().launch(name, config, log)
        return SlowServer(name, config, self.order, CachingEngine(name))


if __name__ == "__main__":
    main(obj=SlowHarness().services())
