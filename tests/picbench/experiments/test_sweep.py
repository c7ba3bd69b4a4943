"""A sweep's file, its cells and their names, what is planned, and workloads that cells share."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import InterruptedEngine, run_fakes
from hypothesis import given
from hypothesis import strategies as st
from sweep_fakes import BLOCK_BYTES, SweepHarness, make_cells

from picbench.errors import ConfigError
from picbench.experiments.sweep import (
    UNREAD,
    SweepCell,
    TimeEstimate,
    cell_name,
    expand,
    load_once,
    read_sweep,
)
from picbench.run.workload import load_workload
from picbench.settings import RunConfig, parse_config

BASE = "base: {dataset: musique, algo: full}\n"


def read(tmp_path: Path, text: str, **settings: Any) -> list[SweepCell]:
    """The cells of a file with this text."""
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    return expand(path, read_sweep(path), tmp_path / "out", **settings)


def test_every_combination_is_a_cell(tmp_path: Path) -> None:
    cells = read(
        tmp_path,
        "base: {dataset: musique, limit: 8}\n"
        "grid: {kv_blocks: [200, null], algo: [[full, mepic], 'full,epic:k=16']}",
    )
    assert [cell.name for cell in cells] == [
        "algo=full+mepic,kv_blocks=200",
        "algo=full+epic_k=16,kv_blocks=200",
        "algo=full+mepic,kv_blocks=null",
        "algo=full+epic_k=16,kv_blocks=null",
    ]
    assert cells[0].path == tmp_path / "out" / cells[0].name
    assert cells[0].config.algo == ("full", "mepic")
    assert [cell.config.kv_blocks for cell in cells] == [200, 200, None, None]
    assert {cell.config.limit for cell in cells} == {8}
    assert cells[1].settings == {"algo": "full,epic:k=16", "kv_blocks": 200}


def test_a_cell_may_have_servers_elsewhere(tmp_path: Path) -> None:
    one, other = "a=http://h:1/v1", "b=http://h:2/v1"
    (cell,) = read(
        tmp_path, f"base: {{dataset: musique, algo: full, arm: {one}}}\ngrid: {{seed: [1]}}"
    )
    assert cell.config.arm == (one,)
    cells = read(tmp_path, f"{BASE}grid: {{arm: [[], {one}, [{one}, '{other},model=m']]}}")
    assert [cell.config.arm for cell in cells] == [(), (one,), (one, f"{other},model=m")]
    assert [cell.settings["arm"] for cell in cells] == ["", one, f"{one},{other},model=m"]
    assert len({cell.name for cell in cells}) == 3


def test_a_cell_has_the_name_that_it_has_alone(tmp_path: Path) -> None:
    (once,) = read(tmp_path, BASE + "grid: {seed: [1]}")
    thrice = read(tmp_path, BASE + "grid: {seed: [1]}\nrepeats: 3")
    assert [cell.name for cell in thrice] == [once.name, "seed=1,repeat=2", "seed=1,repeat=3"]
    assert len({cell.config.model_copy(update={"output": ""}) for cell in [once, *thrice]}) == 1
    (one,) = read(tmp_path, BASE + "grid: {seed: [1], kv_blocks: [200]}")
    more = read(tmp_path, BASE + "grid: {kv_blocks: [100, 200], seed: [3, 1]}")
    assert one.name in {cell.name for cell in more}


def test_a_sweep_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    for name, called in (("", "pools"), ("name: mine\n", "mine")):
        path.write_text(f"{BASE}{name}grid: {{seed: [1]}}")
        assert read_sweep(path).name == called
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        read_sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "written", "values"),
    [
        ("chat", "on, off, auto", ["on", "off", "auto"]),
        ("shared_decode", "off, auto", ["off", "auto"]),
        ("eager", "on, off", [True, False]),
    ],
)
def test_on_and_off_are_words(tmp_path: Path, name: str, written: str, values: list[Any]) -> None:
    cells = read(tmp_path, f"{BASE}grid: {{{name}: [{written}]}}")
    assert [getattr(cell.config, name) for cell in cells] == values


def test_offline_holds_for_all_cells_and_passwords_are_in_no_name(tmp_path: Path) -> None:
    grid = 'grid: {seed: [1, 2], tiers: ["redis://me:s3cret@kv:6379/0"]}'
    cells = read(tmp_path, BASE + grid, offline=True)
    assert len(cells) == 2
    for cell in cells:
        assert cell.config.offline
        assert cell.config.tiers == "redis://me:s3cret@kv:6379/0"
        assert "s3cret" not in f"{cell.name} {cell.settings}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BASE + "grid: {kv_blok: [1]}", "grid.kv_blok: no such setting (did you mean 'kv_bl"),
        (BASE + "gird: {seed: [1]}", "gird: no such field (did you mean 'grid'?)"),
        (BASE + "grid: {kv_blocks: [9, x]}", "grid.kv_blocks[1] 'x': input should be"),
        (BASE + "grid: {kv_blocks: 9}", "grid.kv_blocks: input should be a valid list"),
        (BASE + "grid: {shared_decode: [on]}", "grid.shared_decode[0]"),
        (BASE + "grid: {seed: []}", "grid.seed: list should have at least 1 item"),
        (BASE + "grid: {algo: [mepic]}", "grid.algo: is in base, too"),
        (BASE + "grid: {seed: [1, 2, 1]}", "grid.seed[2]: is 1, as grid.seed[0] is"),
        (BASE + "grid: {output: [a]}", "grid.output: holds for all cells"),
        (BASE + "grid: {seed: [1]", "line 2: expected ',' or '}'"),
        (BASE + "base: {limit: 3}\ngrid: {seed: [1]}", "line 2: base is there twice"),
        ("base: {algo: full, limit: 0}\ngrid: {seed: [1]}", "base.limit 0: input should be"),
        ("base: {dataset: musique}\ngrid: {seed: [1]}", "no algo in base or grid"),
        ("grid: {algo: [full, naive, 'mepic:k=1.5']}", "grid.algo[2]: 'mepic:k=1.5': unknown"),
        (BASE + "grid: {tiers: ['hst:1GiB']}", "grid.tiers[0] hst:1GiB: unknown kind"),
        ("[1]", "no mapping"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'pools.yaml'}: {said}")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 10**9),
    st.text(max_size=150),
    st.from_regex(r"[a-c:,+_=-]{0,5}", fullmatch=True),
)
SETTINGS = st.dictionaries(st.sampled_from(["algo", "seed", "data"]), VALUES, min_size=1)
CELLS = st.tuples(SETTINGS, st.integers(1, 3))


@given(CELLS, CELLS)
def test_different_cells_have_different_names(
    one: tuple[dict[str, Any], int], other: tuple[dict[str, Any], int]
) -> None:
    # In text True is not 1.
    texts = [repr((sorted(settings.items()), repeat)) for settings, repeat in (one, other)]
    if one[0].keys() == other[0].keys():
        assert (cell_name(*one) == cell_name(*other)) == (texts[0] == texts[1])


@given(CELLS)
def test_names_are_names_of_folders(cell: tuple[dict[str, Any], int]) -> None:
    name = cell_name(*cell)
    assert re.fullmatch(r"[A-Za-z0-9.,+=_-]{1,140}", name)
    assert not name.startswith(".")


@pytest.fixture
def harness(tmp_path: Path) -> SweepHarness:
    return SweepHarness(model=tmp_path)


def plan(harness: SweepHarness, tmp_path: Path, grid: str) -> list[SweepCell]:
    cells = make_cells(tmp_path, grid)
    for cell in cells:
        cell.plan(harness.services())
    return cells


def test_a_cell_that_is_missing(harness: SweepHarness, tmp_path: Path) -> None:
    small, large, thrice = plan(harness, tmp_path, "{limit: [2, 6]}") + plan(
        harness, tmp_path, "{limit: [2], repeats: [3]}"
    )
    assert (small.status, small.arms) == ("missing", ("full", "mepic"))
    assert (small.requests, small.prompt_tokens, small.output_tokens) == (2, 72, 4)
    assert (large.requests, large.prompt_tokens, large.output_tokens) == (6, 216, 12)
    assert (thrice.requests, thrice.prompt_tokens, thrice.output_tokens) == (6, 216, 12)
    assert small.left == {"full": 72, "mepic": 72}
    assert small.pool_bytes == 2 * small.pool * BLOCK_BYTES
    assert harness.order == []
    found = TimeEstimate(cell.measured for cell in (small, large))
    assert (found.cells, found.seconds(small.left)) == (0, None)


def test_time_is_what_measured_cells_took_for_a_token(
    harness: SweepHarness, tmp_path: Path
) -> None:
    first = make_cells(tmp_path, "{limit: [2, 6]}")[0]
    run_fakes(harness, first.path, "full", "mepic", limit=2)
    kept, missing = plan(harness, tmp_path, "{limit: [2, 6]}")
    assert (kept.status, kept.left) == ("complete", {})
    found = TimeEstimate(cell.measured for cell in (kept, missing))
    assert (found.cells, found.seconds(kept.left)) == (1, 0)
    took = sum(arm.busy_s for arm in kept.measured.values())
    assert took > 0
    assert found.seconds(missing.left) == pytest.approx(3 * took)
    # An arm that was never measured takes the mean.
    assert found.seconds({"naive": 72}) == pytest.approx(took / 2)


def test_of_a_stopped_cell_the_rest_is_left(harness: SweepHarness, tmp_path: Path) -> None:
    harness.engines = {"mepic": InterruptedEngine("mepic")}
    (cell,) = make_cells(tmp_path, "{concurrency: [1]}")
    with pytest.raises(KeyboardInterrupt):
        run_fakes(harness, cell.path, "full", "mepic", concurrency=1)
    (stopped,) = plan(harness, tmp_path, "{concurrency: [1]}")
    assert stopped.status == "interrupted"
    done = stopped.measured["mepic"].tokens.prompt
    assert 0 < done < stopped.prompt_tokens
    assert stopped.left["mepic"] == stopped.prompt_tokens - done


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


def test_cells_with_the_same_requests_load_them_once(harness: SweepHarness) -> None:
    given = ({"kv_blocks": 40, "output": "a"}, {"kv_blocks": 60, "output": "b"}, {"limit": 2})
    cells = [parse_config({"algo": ("full",), "dataset": "fake", **some}) for some in given]
    load = load_once(harness.load)
    found = [load(cell) for cell in (*cells, *cells)]
    assert harness.loads == 2
    assert found[0] is found[1] is found[3] is found[4]
    assert [len(workload.samples) for workload in found[:3]] == [6, 6, 2]


def test_no_workload_depends_on_what_is_not_decisive(tmp_path: Path) -> None:
    """Loading asks for none of these settings."""
    read: set[str] = set()

    class Asked(RunConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    asked = Asked(algo=("full", "mepic"), dataset="musique", limit=1, rate=2.0)
    load_workload(asked)
    assert {"dataset", "limit", "algo", "seed", "rate"} <= read
    assert read & UNREAD == set()
    assert set(RunConfig.model_fields) > UNREAD
