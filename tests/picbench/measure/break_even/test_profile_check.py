"""Predictions held against engines; the engines are fakes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import ConfigError, IncomparableRuns
from picbench.experiments import profile_check
from picbench.experiments.grid import CellWork, GridRun
from picbench.experiments.grid_plan import ARMS, GRIDS, plan_grid
from picbench.experiments.profile_check import CheckVerdict, check_profile
from picbench.profile.grid import ArmCell, GridFacts, MeasuredCell, MeasuredGrid
from picbench.profile.predictor import GridPredictor

FACTS = GridFacts("a machine", {"commit": "abc"}, "m", "float32", 1 << 20, 100, 4, "")


def exact(prompt: float, computed: float, output: float, slow: float = 1.0) -> ArmCell:
    """A machine that computes a thousand tokens a second, and ten tokens of a reply."""
    seconds = slow * (0.01 + computed / 1000)
    whole = seconds + slow * (output - 1) / 10
    return ArmCell(
        requests=4,
        ttft_s=seconds,
        ttft_p95_s=seconds,
        requests_s=1 / whole,
        peak_blocks=10,
        prompt=prompt,
        computed=computed,
        output=output,
    )


def grid() -> MeasuredGrid:
    cells = []
    first = [traffic for traffic in plan_grid(GRIDS["cpu"]) if traffic.seed == 0]
    for number, traffic in enumerate(first):
        point = traffic.point
        prompt = point.chunks * point.chunk_tokens + 48
        sizes = {arm: prompt * (n + 1 + number % 3) / 9 for n, arm in enumerate(ARMS)}
        arms = {arm: exact(prompt, size, 4 + number % 2) for arm, size in sizes.items()}
        cells.append(MeasuredCell(point, traffic.seed, arms))
    return MeasuredGrid(FACTS, cells)


class SlowerEngine:
    """Is half as fast as the grid's machine from its second repeat on; computes whole prompts."""

    def __init__(self) -> None:
        self.called = 0

    def is_stock(self, arm: str) -> bool:
        return False

    def serve(self, work: CellWork) -> list[ArmCell]:
        [batch] = work.batches
        tokens = [len(s.tokens) for request in batch.requests for s in request.segments]
        prompt = sum(tokens) / len(batch.requests)
        self.called += 1
        repeat = (self.called - 1) // (3 * 4 * len(ARMS))
        return [exact(prompt, prompt, 4, 2.0 if repeat else 1.0)]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SlowerEngine:
    """The engine of all arms, which `FACTS` describe."""
    one = SlowerEngine()

    @contextmanager
    def engines(*_: object) -> Iterator[tuple[SlowerEngine, dict[str, object]]]:
        yield one, {}

    monkeypatch.setattr(profile_check, "open_engines", engines)
    monkeypatch.setattr(profile_check, "grid_facts", lambda run, described: FACTS)
    return one


@pytest.fixture
def run(tmp_path: Path) -> GridRun:
    return GridRun(model="testbed", device="cpu", dtype="float32", seconds=0, output=tmp_path)


def test_errors_are_those_of_the_median(run: GridRun) -> None:
    said: list[str] = []
    found, done = check_profile(run, GridPredictor(grid()), 2, said.append)
    assert done
    full = [one for one in found if one.arm == "full" and one.figure != "KV, GiB"]
    assert len(full) == 9
    for one in full:
        assert abs(one.error_at_speed) < 0.02, one
        if one.slowness:
            assert one.slowness == pytest.approx([1, 2], rel=0.02)
            assert one.verdict is CheckVerdict.AT_SPEED
        else:
            assert one.verdict is CheckVerdict.HOLDS
    mepic = {one.figure: one for one in found if one.arm == "mepic" and one.trace == "popular"}
    assert mepic["computed tokens"].error < -0.3
    assert mepic["TTFT, s"].verdict is CheckVerdict.FAILS
    assert [line.split(",")[0] for line in said[::2]] == ["1 of 2", "2 of 2"]
    assert "| popular | mepic | TTFT, s |" in (run.output / "profile.md").read_text()
    assert (run.output / "profile.json").exists()


def test_traces_are_drawn_with_a_seed(run: GridRun) -> None:
    first, _ = check_profile(run, GridPredictor(grid()), 1, print, seed=5)
    assert "drawn with seed 5," in (run.output / "profile.md").read_text()
    with pytest.raises(IncomparableRuns, match="drawn with seed 5, not 6"):
        check_profile(run, GridPredictor(grid()), 1, print, seed=6)
    apart = replace(run, output=run.output / "apart")
    again, _ = check_profile(apart, GridPredictor(grid()), 1, print, seed=5)
    assert [one.predicted for one in again] == [one.predicted for one in first]
    other, _ = check_profile(
        replace(run, output=run.output / "other"), GridPredictor(grid()), 1, print, seed=6
    )
    assert [one.predicted for one in other] != [one.predicted for one in first]


def test_the_page_says_how_quiet_the_host_was(
    run: GridRun, engine: SlowerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = engine.serve

    def quietly(work: CellWork) -> list[ArmCell]:
        [cell] = serve(work)
        return [replace(cell, quiet=0.75)]

    check_profile(run, GridPredictor(grid()), 1, print)
    text = "75% of the requests alone began on a core that nothing else used"
    assert text not in (run.output / "profile.md").read_text()
    monkeypatch.setattr(engine, "serve", quietly)
    quiet = replace(run, output=run.output / "quiet")
    check_profile(quiet, GridPredictor(grid()), 1, print)
    assert text in (quiet.output / "profile.md").read_text()


def test_other_graphs_are_warned_of(run: GridRun, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = replace(FACTS, versions={"commit": "abc", "driver": "1"}, graph_tokens={"mepic": 1024})
    monkeypatch.setattr(profile_check, "grid_facts", lambda *_: graphs)
    said: list[str] = []
    check_profile(run, GridPredictor(grid()), 1, said.append)
    assert said[0].startswith(
        "warning: these engines: CUDA graphs of up to 1,024 tokens, --grid: no"
    )
    assert said[0].removeprefix("warning: ") in (run.output / "profile.md").read_text()


def test_a_grid_of_another_model_is_refused(run: GridRun, monkeypatch: pytest.MonkeyPatch) -> None:
    other = GridFacts("b", {}, "other", "f", 1, 1, 1, "")
    monkeypatch.setattr(profile_check, "grid_facts", lambda *_: other)
    with pytest.raises(ConfigError, match="the grid is of m, this is other"):
        check_profile(run, GridPredictor(grid()), 1, print)


def test_a_part_without_repeats_is_refused(run: GridRun) -> None:
    with pytest.raises(ConfigError, match="`part` 2/2: no repeat of 1 is its own"):
        check_profile(replace(run, part=(2, 2)), GridPredictor(grid()), 1, print)


def test_no_engine_starts_where_nothing_is_left(
    run: GridRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, _ = check_profile(run, GridPredictor(grid()), 1, print)
    page = (run.output / "profile.md").read_text()
    (run.output / "profile.md").unlink()
    monkeypatch.delattr(profile_check, "open_engines")
    assert check_profile(run, GridPredictor(grid()), 1, print) == (measured, True)
    assert (run.output / "profile.md").read_text() == page


def test_the_same_call_goes_on(run: GridRun, engine: SlowerEngine) -> None:
    short, said = replace(run, seconds=1e-9), list[str]()
    for repeats in (1, 2):
        found, done = check_profile(short, GridPredictor(grid()), 3, said.append)
        assert not done
        assert {len(one.measured) for one in found} == {repeats}
        assert said[-2].startswith(f"{repeats} of 3")
    [popular] = [one for one in found if (one.trace, one.arm) == ("popular", "full") and one.rate]
    assert popular.slowness == pytest.approx([1, 2], rel=0.02)
    assert check_profile(run, GridPredictor(grid()), 3, said.append)[1]
    called = engine.called
    found, done = check_profile(run, GridPredictor(grid()), 3, said.append)
    assert done
    assert {len(one.measured) for one in found} == {3}
    assert engine.called == called


def test_parts_write_the_same_page(run: GridRun, engine: SlowerEngine) -> None:
    predictor = GridPredictor(grid())
    assert check_profile(replace(run, part=(2, 2)), predictor, 3, print)[1]
    found, done = check_profile(replace(run, part=(1, 2)), predictor, 3, print)
    assert done
    assert {len(one.measured) for one in found} == {3}
    [popular] = [one for one in found if (one.trace, one.arm) == ("popular", "full") and one.rate]
    assert popular.slowness == pytest.approx([2, 1, 2], rel=0.02)
    assert "of 3 repeats" in (run.output / "profile.md").read_text()
    called = engine.called
    assert check_profile(run, predictor, 3, print)[1]
    assert engine.called == called
