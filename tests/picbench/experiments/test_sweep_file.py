from pathlib import Path
from typing import Any

import pytest

from picbench.errors import ConfigError
from picbench.experiments.sweep import SweepCell, expand, read_sweep

BASE = "base: {dataset: musique, algo: full}\n"


def read(tmp_path: Path, text: str, **settings: Any) -> list[SweepCell]:
    """The cells of a file with this text."""
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    return expand(path, read_sweep(path), tmp_path / "out", **settings)


def fault(tmp_path: Path, text: str) -> str:
    """What is said of a file, from the place in it on."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    place = f"{tmp_path / 'pools.yaml'}: "
    assert str(error.value).startswith(place)
    return str(error.value).removeprefix(place)


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


def test_the_first_repeat_has_the_name_that_it_has_alone(tmp_path: Path) -> None:
    (once,) = read(tmp_path, BASE + "grid: {seed: [1]}")
    thrice = read(tmp_path, BASE + "grid: {seed: [1]}\nrepeats: 3")
    assert [cell.name for cell in thrice] == [once.name, "seed=1,repeat=2", "seed=1,repeat=3"]
    assert {cell.config.model_copy(update={"output": None}) for cell in thrice} == {
        once.config.model_copy(update={"output": None})
    }


def test_names_do_not_depend_on_the_rest_of_the_grid(tmp_path: Path) -> None:
    (one,) = read(tmp_path, BASE + "grid: {seed: [1], kv_blocks: [200]}")
    more = read(tmp_path, BASE + "grid: {kv_blocks: [100, 200], seed: [3, 1]}")
    assert one.name in {cell.name for cell in more}


def test_a_sweep_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(BASE + "grid: {seed: [1]}")
    assert read_sweep(path).name == "pools"
    path.write_text(BASE + "name: mine\ngrid: {seed: [1]}")
    assert read_sweep(path).name == "mine"


def test_on_and_off_are_words(tmp_path: Path) -> None:
    cells = read(tmp_path, BASE + "grid: {chat: [on, off, auto]}")
    assert [cell.config.chat for cell in cells] == ["on", "off", "auto"]
    cells = read(tmp_path, BASE + "grid: {shared_decode: [off, auto]}")
    assert [cell.config.shared_decode for cell in cells] == ["off", "auto"]
    cells = read(tmp_path, BASE + "grid: {eager: [on, off]}")
    assert [cell.config.eager for cell in cells] == [True, False]
    assert fault(tmp_path, BASE + "grid: {shared_decode: [on]}").startswith("grid.shared_decode[0]")


def test_offline_holds_for_all_cells(tmp_path: Path) -> None:
    cells = read(tmp_path, BASE + "grid: {seed: [1, 2]}", offline=True)
    assert all(cell.config.offline for cell in cells)


def test_passwords_are_in_no_name(tmp_path: Path) -> None:
    (cell,) = read(tmp_path, BASE + 'grid: {tiers: ["redis://me:s3cret@kv:6379/0"]}')
    assert cell.config.tiers == "redis://me:s3cret@kv:6379/0"
    assert "s3cret" not in f"{cell.name} {cell.settings}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            BASE + "grid: {kv_blok: [1]}",
            "grid.kv_blok: no such setting (did you mean 'kv_bl",
        ),
        (BASE + "gird: {seed: [1]}", "gird: no such field (did you mean 'grid'?)"),
        (BASE + "grid: {kv_blocks: [9, x]}", "grid.kv_blocks[1] 'x': input should be"),
        (BASE + "grid: {kv_blocks: 9}", "grid.kv_blocks: input should be a valid list"),
        (BASE + "grid: {seed: []}", "grid.seed: list should have at least 1 item"),
        (BASE + "grid: {algo: [mepic]}", "grid.algo: is in base, too"),
        (BASE + "grid: {seed: [1, 2, 1]}", "grid.seed[2]: is 1, as grid.seed[0] is"),
        (BASE + "grid: {output: [a]}", "grid.output: holds for all cells"),
        (BASE + "grid: {seed: [1]", "line 2: expected ',' or '}'"),
        (BASE + "base: {limit: 3}\ngrid: {seed: [1]}", "line 2: base is there twice"),
        (
            "base: {algo: full, limit: 0}\ngrid: {seed: [1]}",
            "base.limit 0: input should be",
        ),
        ("base: {dataset: musique}\ngrid: {seed: [1]}", "no algo in base or grid"),
        (
            "grid: {algo: [full, naive, 'mepic:k=1.5']}",
            "grid.algo[2]: 'mepic:k=1.5': unknown",
        ),
        (BASE + "grid: {tiers: ['hst:1GiB']}", "grid.tiers[0] hst:1GiB: unknown kind"),
        ("[1]", "no mapping"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    assert fault(tmp_path, text).startswith(said)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        read_sweep(tmp_path / "none.yaml")
