"""Predictions held against engines, which are fakes; what is kept of repeats, and what is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_servers import LocalLauncher

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError, EngineError, IncomparableRuns
from picbench.experiments.grid import (
    ARMS,
    GridEngines,
    SampleBatch,
    draw_traffic,
    plan_grid,
    read_grids,
)
from picbench.experiments.profile_check import (
    CheckedFigure,
    CheckedRepeat,
    CheckedRepeats,
    CheckedServing,
    RepeatsRecord,
    check_profile,
    choose_control,
    read_repeats,
    slowness_by_kind,
    summarise_figures,
)
from picbench.profile.predictor import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    GridPredictor,
    MeasuredCell,
    MeasuredGrid,
)
from picbench.profile.profile import ArmProfile, TraceProfile, TrafficSums
from picbench.profile.reuse import ReuseTotals
from picbench.run.measurements import ProfileCheck
from picbench.run.runner import Cell

SETTINGS = read_grids()["cpu"]
FACTS = GridFacts(
    *("a machine", {"commit": "abc"}, "m", "float32", 1 << 20, 100, 4, ""),
    graph_tokens={"mepic": 0},
)


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
    first = [traffic for traffic in plan_grid(SETTINGS) if traffic.seed == 0]
    for number, traffic in enumerate(first):
        prompt = traffic.point.prompt + 48
        sizes = {arm: prompt * (n + 1 + number % 3) / 9 for n, arm in enumerate(ARMS)}
        arms = {arm: exact(prompt, size, 4 + number % 2) for arm, size in sizes.items()}
        cells.append(MeasuredCell(traffic.point, traffic.seed, arms))
    return MeasuredGrid(FACTS, cells)


class SlowerEngines(LocalLauncher):
    """Half as fast as the grid's machine from their second repeat on; they compute whole prompts.

    `quiet` is the share of requests that begin on a quiet core.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called = 0
        self.quiet: float | None = None

    def serve(self, batches: list[SampleBatch]) -> list[ArmCell]:
        [batch] = batches
        tokens = [len(s.tokens) for sample in batch.samples for s in sample.segments]
        prompt = sum(tokens) / len(batch.samples)
        self.called += 1
        repeat = (self.called - 1) // (3 * 4 * len(ARMS))
        return [replace(exact(prompt, prompt, 4, 2.0 if repeat else 1.0), quiet=self.quiet)]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> SlowerEngines:
    """The engines of all arms, which `FACTS` describe."""
    found = SlowerEngines()
    monkeypatch.setattr(GridEngines, "serve", lambda *given: found.serve(given[3]))
    monkeypatch.setattr(GridEngines, "facts", lambda *_: FACTS)
    return found


#: Checks with some settings in place of others: the figures, and whether nothing is left.
Check = Callable[..., tuple[list[CheckedFigure], bool]]


@pytest.fixture
def check(tmp_path: Path, engines: SlowerEngines) -> Check:
    def checked(repeats: int, **others: object) -> tuple[list[CheckedFigure], bool]:
        settings = ProfileCheck(device="cpu", output=tmp_path, grid="none", repeats=repeats)
        return check_profile(settings.model_copy(update=others), GridPredictor(grid()), engines)

    return checked


def page(folder: Path) -> str:
    return (folder / "profile.md").read_text()


def test_errors_are_those_of_the_median(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, done = check(2)
    assert done
    full = [one for one in found if one.arm == "full" and one.figure != "KV, GiB"]
    assert len(full) == 9
    for one in full:
        assert abs(one.error_at_speed) < 0.02, one
        if one.slowness:
            assert one.slowness == pytest.approx([1, 2], rel=0.02)
            assert one.verdict == "at the grid's speed"
        else:
            assert one.verdict == "holds"
    mepic = {one.figure: one for one in found if one.arm == "mepic" and one.trace == "popular"}
    assert mepic["computed tokens"].error < -0.3
    assert mepic["TTFT, s"].verdict == "fails"
    said = capsys.readouterr().out.splitlines()
    repeats = [line.split(":")[0] for line in said if line.startswith("repeat")]
    assert repeats == ["repeat 0, round 1", "repeat 1, round 1"]
    assert summarise_figures(found) in said
    assert "| popular | mepic | TTFT, s |" in page(tmp_path)
    assert (tmp_path / "profile.json").exists()


def test_traces_are_drawn_with_a_seed(check: Check, tmp_path: Path, engines: SlowerEngines) -> None:
    engines.quiet = 0.75
    first, _ = check(1, seed=5)
    assert "drawn with seed 5," in page(tmp_path)
    assert "75% of the requests alone began on a core that nothing else used" in page(tmp_path)
    with pytest.raises(IncomparableRuns, match="drawn with seed 5, not 6"):
        check(1, seed=6)
    again, _ = check(1, seed=5, output=tmp_path / "apart")
    other, _ = check(1, seed=6, output=tmp_path / "other")
    predicted = [[one.predicted for one in found] for found in (first, again, other)]
    assert predicted[0] == predicted[1] != predicted[2]


def test_other_graphs_are_warned_of(
    check: Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphs = replace(FACTS, graph_tokens={"mepic": 1024})
    monkeypatch.setattr(GridEngines, "facts", lambda *_: graphs)
    check(1)
    said = capsys.readouterr().out.splitlines()
    [warning] = [line for line in said if line.startswith("warning: ")]
    warning = warning.removeprefix("warning: ")
    assert warning.startswith("these engines: CUDA graphs of up to 1,024 tokens, --grid: no")
    assert warning in page(tmp_path)


def test_a_grid_of_another_model_is_refused(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GridEngines, "facts", lambda *_: replace(FACTS, model="other"))
    with pytest.raises(ConfigError, match="the grid is of m, this is other"):
        check(1)


def test_a_part_without_repeats_is_refused(check: Check) -> None:
    with pytest.raises(ConfigError, match="`part` 2/2: no repeat of 1 is its own"):
        check(1, part=(2, 2))


def test_no_engine_starts_where_nothing_is_left(
    check: Check, tmp_path: Path, engines: SlowerEngines
) -> None:
    measured, _ = check(1)
    before, started = page(tmp_path), len(engines.servers)
    (tmp_path / "profile.md").unlink()
    assert check(1) == (measured, True)
    assert page(tmp_path) == before
    assert len(engines.servers) == started


def test_what_was_measured_before_a_failure_is_on_the_page(
    check: Check, tmp_path: Path, engines: SlowerEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*given: Any) -> list[ArmCell]:
        if engines.called == 3 * 4 * len(ARMS):
            raise EngineError("it ended")
        return engines.serve(given[3])

    monkeypatch.setattr(GridEngines, "serve", serve)
    with pytest.raises(EngineError):
        check(2)
    assert "of 1 repeats" in page(tmp_path)


def slowness(found: list[CheckedFigure]) -> list[float]:
    """Of full's requests a second on one trace."""
    [popular] = [one for one in found if (one.trace, one.arm) == ("popular", "full") and one.rate]
    return popular.slowness


def test_the_same_call_continues(check: Check, engines: SlowerEngines) -> None:
    for repeats in (1, 2):
        found, done = check(3, seconds=1e-9)
        assert not done
        assert {len(one.measured) for one in found} == {repeats}
    assert slowness(found) == pytest.approx([1, 2], rel=0.02)
    assert check(3)[1]
    called = engines.called
    found, done = check(3)
    assert done
    assert {len(one.measured) for one in found} == {3}
    assert engines.called == called


def test_parts_write_the_same_page(check: Check, tmp_path: Path) -> None:
    assert check(3, part=(2, 2))[1]
    found, done = check(3, part=(1, 2))
    assert done
    assert slowness(found) == pytest.approx([2, 1, 2], rel=0.02)
    assert "of 3 repeats" in page(tmp_path)


def serving(ttft: float) -> CheckedServing:
    cell = replace(exact(100, 80, 4), ttft_s=ttft, compiled=3.0, middle=(80.0, 3.0))
    point = GridPoint(
        reuse=0.5, chunks=2, chunk_tokens=64, corpus=24, load=ALONE, output=4, cache="cold"
    )
    return CheckedServing(cell, replace(cell, output=5), ((point, cell), (point, cell)))


def add(
    path: Path, number: int, ttft: float = 0.1, facts: GridFacts = FACTS, seed: int = 77
) -> CheckedRepeats:
    """All repeats after one was added."""
    record = RepeatsRecord(path, seed, "m", lambda _: facts)
    record.begin({}, {}, 1.0)
    record.note(Cell("repeat", rank=number), 1, {"popular": {"mepic": serving(ttft)}}, 2.0)
    assert record.found == read_repeats(path)
    assert record.found is not None
    return record.found


def test_repeats_are_read_in_order_as_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "profile-cells.json"
    assert read_repeats(path) is None
    add(path, 2, 0.3)
    expected = [
        CheckedRepeat(number, {"popular": {"mepic": serving(ttft)}})
        for number, ttft in ((0, 0.1), (2, 0.3))
    ]
    assert add(path, 0).repeats == expected
    # One that is there stays; caveats may differ.
    assert add(path, 0, 0.2, replace(FACTS, caveat="other")).repeats == expected


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(FACTS, dtype="bfloat16"), "dtype float32, here is bfloat16"),
        (replace(FACTS, versions={"commit": "def"}), "commit abc, here is def"),
        (replace(FACTS, versions={"commit": "abc", "torch": "2"}), "torch None, here is 2"),
        (replace(FACTS, graph_tokens={"full": 512}), "graph_tokens .*, here is"),
    ],
)
def test_other_engines_are_refused(tmp_path: Path, other: GridFacts, says: str) -> None:
    path = tmp_path / "profile-cells.json"
    add(path, 0)
    with pytest.raises(IncomparableRuns, match=says):
        add(path, 1, facts=other)
    found = read_repeats(path)
    assert found is not None
    assert len(found.repeats) == 1


def test_a_file_that_does_not_say_its_seed_is_of_the_usual_one(tmp_path: Path) -> None:
    path = tmp_path / "profile-cells.json"
    add(path, 0)
    older = json.loads(path.read_text())
    del older["seed"]
    path.write_text(json.dumps(older))
    assert len(add(path, 2).repeats) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "repeats": []}', "{"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile-cells.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile-cells.json: ."):
        read_repeats(path)
    path.unlink()
    add(path, 0)
    path.write_text(path.read_text().replace('"ttft_s"', '"other"', 1))
    with pytest.raises(ConfigError, match=r"repeats.0.traces.popular.mepic.alone.ttft_s"):
        read_repeats(path)


def figure(
    measured: list[float],
    predicted: float,
    slowness: float = 1.0,
    within: tuple[float, float] | None = None,
    *,
    rate: bool = False,
) -> CheckedFigure:
    slow = [slowness] * len(measured)
    return CheckedFigure(
        "t", "mepic", "TTFT, s", measured, predicted, True, slow, rate=rate, within=within
    )


@pytest.mark.parametrize(
    ("measured", "predicted", "slowness", "rate", "verdict"),
    [
        ([9.0, 10.0, 30.0], 11.5, 1.0, False, "holds"),
        ([9.0, 10.0, 30.0], 11.6, 1.0, False, "fails"),
        ([20.0], 10.0, 2.0, False, "at the grid's speed"),
        ([20.0], 30.0, 2.0, False, "fails"),
        # A slow machine answers fewer requests.
        ([10.0], 20.0, 2.0, True, "at the grid's speed"),
    ],
)
def test_a_prediction_holds_for_the_median_or_at_the_grids_speed(
    measured: list[float], predicted: float, slowness: float, rate: bool, verdict: str
) -> None:
    assert figure(measured, predicted, slowness, rate=rate).verdict == verdict


@pytest.mark.parametrize(
    ("within", "inside"), [((9.0, 11.0), True), ((10.1, 11.0), False), (None, True)]
)
def test_the_median_is_held_against_the_range(
    within: tuple[float, float] | None, inside: bool
) -> None:
    assert figure([5.0, 10.0, 50.0], 10.0, within=within).in_range is inside


def test_a_summary_counts_what_holds() -> None:
    good, slow = figure([10.0], 10.0, 1.0, (9.0, 11.0)), figure([20.0], 10.0, 2.0, (9.0, 11.0))
    assert summarise_figures([good, slow]) == (
        "TTFT, s: 1 of 2 within 15% (2 at the grid's speed), 1 in the predicted range, "
        "median error 25%, worst 50%"
    )


@pytest.fixture(scope="module")
def shared() -> MeasuredGrid:
    """Of prompts mepic computes what does not recur, the others nearly all."""
    cells = []
    for traffic in plan_grid(SETTINGS):
        prompt = traffic.point.prompt
        shares = {"full": 1.0, "prefix": 0.9, "mepic": 1.02 - traffic.point.reuse}
        arms = {arm: exact(prompt, prompt * share, 4) for arm, share in shares.items()}
        cells.append(MeasuredCell(traffic.point, traffic.seed, arms))
    return MeasuredGrid(FACTS, cells)


def choose(
    measured: MeasuredGrid, arm: str, prompt: int, computed: int, load: str
) -> tuple[GridPoint, object]:
    """The control for a trace of two requests alike, of which an arm computes so much."""
    totals = ReuseTotals(requests=2, prompt=2 * prompt, reused=2 * (prompt - computed))
    found = ArmProfile(Registry().parse(arm), totals, None, 1)
    traffic = TrafficSums(requests=2, prompt=2 * prompt, output=8)
    whole = TraceProfile("trace", "named", True, None, 4, traffic, (found,))
    return choose_control(measured, SETTINGS, whole, found, load)


@pytest.mark.parametrize(
    ("arm", "prompt", "computed", "load", "expected"),
    [
        ("mepic", 96, 96, ALONE, (2, 48, 0.0)),
        ("mepic", 96, 48, ALONE, (2, 48, 0.5)),
        ("mepic", 96, 7, ALONE, (2, 48, 0.95)),
        ("naive", 96, 7, ALONE, (2, 48, 0.95)),
        ("prefix", 700, 650, BURST, (6, 128, None)),
    ],
)
def test_a_control_is_about_as_long_and_computes_about_as_much(
    shared: MeasuredGrid, arm: str, prompt: int, computed: int, load: str, expected: object
) -> None:
    point, samples = choose(shared, arm, prompt, computed, load)
    reuse = point.reuse if load == ALONE else None
    assert (point.chunks, point.chunk_tokens, reuse) == expected
    assert point.load == load
    [traffic] = [t for t in plan_grid(SETTINGS) if (t.point, t.seed) == (point, 0)]
    assert samples == draw_traffic(traffic, SETTINGS).cold.samples


def test_a_grid_without_such_arms_is_refused(shared: MeasuredGrid) -> None:
    cells = [
        replace(one, arms={arm: value for arm, value in one.arms.items() if arm != "mepic"})
        for one in shared.cells
    ]
    with pytest.raises(ConfigError, match="the grid has no cells of alone requests"):
        choose(MeasuredGrid(FACTS, cells), "naive", 96, 48, ALONE)


def test_arms_that_map_chunks_have_a_speed_of_their_own(shared: MeasuredGrid) -> None:
    predictor = GridPredictor(shared)
    points = {point.load: point for point in shared.points() if point.reuse == 0.5}

    def served(arm: str, slow: float) -> tuple[tuple[GridPoint, ArmCell], ...]:
        found = []
        for load in (ALONE, BURST):
            point = points[load]
            [one] = {c.arms[arm] for c in shared.points()[point]}
            slower = replace(one, ttft_s=slow * one.ttft_s, requests_s=one.requests_s / slow)
            found.append((point, slower))
        return tuple(found)

    arms = {"full": served("full", 1.0), "prefix": served("prefix", 1.2)}
    found = slowness_by_kind(predictor, arms | {"mepic": served("mepic", 1.5)})
    assert found[True] == pytest.approx((1.5, 1.5), rel=0.02)
    assert found[False] == pytest.approx((1.1, 1.1), rel=0.02)
