"""A parent whose engine is busy: `python busy_engine.py LOG` prints the id of its process."""

import sys
from pathlib import Path

from harness_fakes import BusyEngine

from picbench.engines.config import EngineConfig
from picbench.run.server import Server

if __name__ == "__main__":
    Server.engine = BusyEngine  # type: ignore[assignment]
    server = Server("mepic", EngineConfig("m"), Path(sys.argv[1]))
    print(server.ready()["pid"], flush=True)
    server.reset()
