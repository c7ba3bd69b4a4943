"""A run over fake engines for tests that kill it: `python killed_run.py picbench's arguments`.

Every batch takes a few milliseconds, so that a kill finds the run at any of its steps.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness_fakes import CachingEngine, Harness, make_reusing_samples

from picbench.cli import main

REQUESTS = 60
SECONDS = 0.004


if __name__ == "__main__":
    samples = make_reusing_samples(REQUESTS)
    slow = Harness(samples, make=CachingEngine, watch=lambda: time.sleep(SECONDS))
    main(obj=slow.services())
