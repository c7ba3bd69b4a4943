"""What the harness itself costs: engines answer at once, and its work is counted, not timed."""

import cProfile
import pstats
from pathlib import Path

from harness_fakes import Harness, make_sample, run_fakes

#: Most calls of functions for a request of an arm, and bytes that it leaves in the directory: five
#: times what they are.
CALLS, BYTES = 3_500, 4_500


def cost(count: int, output: Path) -> tuple[int, int]:
    """The calls of a run with so many samples, and the bytes of what it writes."""
    harness = Harness([make_sample(n) for n in range(count)])
    with cProfile.Profile() as profile:
        run_fakes(harness, output, "full", "mepic")
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return int(pstats.Stats(profile).total_calls), written


def test_a_request_costs_the_harness_little(tmp_path: Path) -> None:
    cost(20, tmp_path / "first")  # What is imported or made once is not counted.
    few, many = cost(20, tmp_path / "few"), cost(120, tmp_path / "many")
    calls, written = ((more - less) / (2 * 100) for less, more in zip(few, many, strict=True))
    assert calls < CALLS
    assert written < BYTES
