"""A parent whose engine is busy: `python busy_engine.py LOG` prints the id of its process."""

import os
import sys
import time
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)
sys.path.insert(0, str(Path(__file__).parent))

from harness_fakes import FakeEngine

from picbench.engines.config import EngineConfig
from picbench.run.server import Server


class BusyEngine(FakeEngine):
    """Does not answer."""

    def reset(self) -> None:
        if "reset" in self.calls:
            time.sleep(600)
        super().reset()


if __name__ == "__main__":
    from busy_engine import BusyEngine as Engine  # By a name that its process can import.

    Server.engine = Engine  # type: ignore[assignment]
    server = Server("mepic", EngineConfig("m"), Path(sys.argv[1]))
    print(server.ready()["pid"], flush=True)
    server.reset()
