from pathlib import Path

import pytest
from harness_fakes import InterruptedEngine, run_fakes
from sweep_fakes import BLOCK_BYTES, SweepHarness, make_cells

from picbench.errors import ConfigError
from picbench.experiments.sweep import PlannedCell, TimeEstimate, plan_sweep


@pytest.fixture
def harness(tmp_path: Path) -> SweepHarness:
    return SweepHarness(model=tmp_path)


def plan(harness: SweepHarness, tmp_path: Path, grid: str) -> list[PlannedCell]:
    return list(plan_sweep(make_cells(tmp_path, grid), harness.services()))


def test_a_cell_that_is_missing(harness: SweepHarness, tmp_path: Path) -> None:
    small, large = plan(harness, tmp_path, "{limit: [2, 6]}")
    assert (small.state, small.ended, small.arms) == ("missing", False, ("full", "mepic"))
    assert (small.requests, small.prompt_tokens, small.output_tokens) == (2, 72, 4)
    assert (large.requests, large.prompt_tokens, large.output_tokens) == (6, 216, 12)
    assert small.pool_bytes == 2 * small.pool * BLOCK_BYTES
    assert harness.order == []


def test_all_repeats_of_a_run_are_planned(harness: SweepHarness, tmp_path: Path) -> None:
    once, thrice = plan(harness, tmp_path, "{repeats: [1, 3]}")
    assert thrice.requests == 3 * once.requests
    assert thrice.prompt_tokens == 3 * once.prompt_tokens
    assert thrice.output_tokens == 3 * once.output_tokens


def test_time_is_not_known_before_a_cell_is_measured(harness: SweepHarness, tmp_path: Path) -> None:
    planned = plan(harness, tmp_path, "{limit: [2, 6]}")
    assert [TimeEstimate(planned).seconds(cell) for cell in planned] == [None, None]


def test_time_is_what_measured_cells_took_for_a_token(
    harness: SweepHarness, tmp_path: Path
) -> None:
    first = make_cells(tmp_path, "{limit: [2, 6]}")[0]
    run_fakes(harness, first.path, "full", "mepic", limit=2)
    kept, missing = plan(harness, tmp_path, "{limit: [2, 6]}")
    assert (kept.state, kept.ended, kept.tokens_left("mepic")) == ("complete", True, 0)
    estimate = TimeEstimate([kept, missing])
    assert estimate.cells == 1
    assert estimate.seconds(kept) == 0
    took = sum(work.seconds for work in kept.done.values())
    assert took > 0
    assert estimate.seconds(missing) == pytest.approx(3 * took)


def test_an_arm_that_was_never_measured_takes_the_mean(
    harness: SweepHarness, tmp_path: Path
) -> None:
    cells = make_cells(tmp_path, "{limit: [2]}")
    run_fakes(harness, cells[0].path, "full", "mepic", limit=2)
    (kept,) = plan(harness, tmp_path, "{limit: [2]}")
    other = PlannedCell(cells[0], "missing", ("naive",), 2, 72, 4, 1, None)
    took = sum(work.seconds for work in kept.done.values())
    assert TimeEstimate([kept, other]).seconds(other) == pytest.approx(took / 2)


def test_of_a_stopped_cell_the_rest_is_left(harness: SweepHarness, tmp_path: Path) -> None:
    harness.engines = {"mepic": InterruptedEngine("mepic")}
    (cell,) = make_cells(tmp_path, "{concurrency: [1]}")
    with pytest.raises(KeyboardInterrupt):
        run_fakes(harness, cell.path, "full", "mepic", concurrency=1)
    (stopped,) = plan(harness, tmp_path, "{concurrency: [1]}")
    assert (stopped.state, stopped.ended) == ("interrupted", False)
    done = stopped.done["mepic"].tokens
    assert 0 < done < stopped.prompt_tokens
    assert stopped.tokens_left("mepic") == stopped.prompt_tokens - done


def test_a_folder_with_another_run_is_refused(harness: SweepHarness, tmp_path: Path) -> None:
    (cell,) = make_cells(tmp_path, "{limit: [2]}")
    run_fakes(harness, cell.path, "full", "mepic", limit=3)
    with pytest.raises(ConfigError, match=r"has a run with other settings: limit"):
        plan(harness, tmp_path, "{limit: [2]}")


def test_a_setting_that_does_not_fit_the_workload_is_named(
    harness: SweepHarness, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"fake\.yaml: grid\.kv_blocks\[1\] 1: the longest"):
        plan(harness, tmp_path, "{kv_blocks: [50, 1]}")
