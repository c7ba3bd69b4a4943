"""Services that a Ray worker can make: fakes that take their time, so that nodes can be lost."""

import time
from dataclasses import dataclass
from pathlib import Path

from sweep_fakes import SweepHarness

from picbench.run.session import Services
from picbench.run.workload import Workload
from picbench.settings import RunConfig


@dataclass
class SlowHarness(SweepHarness):
    """Each cell says that it has begun in `folder`, and takes `seconds`."""

    folder: Path = Path()
    seconds: float = 0.0

    def load(self, config: RunConfig) -> Workload:
        path = self.folder / f"{time.monotonic_ns()}"
        path.touch()
        time.sleep(self.seconds)
        return super().load(config)


def slow_services(model: Path, folder: Path, seconds: float) -> Services:
    """Services of fakes."""
    return SlowHarness(model=model, folder=folder, seconds=seconds).services()
