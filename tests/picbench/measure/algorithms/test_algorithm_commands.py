"""`picbench measure algorithms`: flags on their way to the measurements, and exit codes."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from picbench.cli import main
from picbench.experiments import algorithms_page, serve_arms, warm_chunks
from picbench.experiments.serve_arms import ServeSettings
from picbench.workloads.testbed import DATASETS


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["measure", "algorithms", *arguments])


@pytest.mark.parametrize(("complete", "code"), [(True, 0), (False, 4)])
def test_serve_gets_its_flags_and_says_whether_rows_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, complete: bool, code: int
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(serve_arms, "measure", lambda *given: asked.append(given) or complete)
    flags = ["--model", "testbed:link", "--dataset", "needle", "--dataset", "samsum", "--eager"]
    flags += ["--algo", "mepic", "--kv-blocks", "3000", "--rows", "5", "--seconds", "60", "--drop"]
    result = invoke("serve", *flags, "--commit", "C", "--output", str(tmp_path))
    assert result.exit_code == code
    settings = ServeSettings(
        "testbed:link",
        ("needle", "samsum"),
        rows=5,
        drop=True,
        algo=("mepic",),
        eager=True,
        kv_blocks=3000,
        seconds=60.0,
    )
    assert asked == [(settings, "C", tmp_path)]


def test_all_data_sets_are_served_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(serve_arms, "measure_alone", lambda *given: asked.append(given))
    assert invoke("alone", "--requests", "9", "--output", str(tmp_path)).exit_code == 0
    settings = ServeSettings("testbed", tuple(DATASETS), dtype="float32")
    assert asked == [(settings, 9, None, tmp_path)]


def test_parts_and_other_files_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file in the folder of the parts is read as one."""
    written: list[Path] = []
    for name in ("measure", "measure_alone"):
        monkeypatch.setattr(serve_arms, name, lambda *given: written.append(given[-1]) or True)
    assert [invoke(name).exit_code for name in ("serve", "alone")] == [0, 0]
    assert written == [Path("results/testbed/algorithms"), Path("results/gpu")]


def test_the_page_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(algorithms_page, "write", lambda *given: f"{given[0]} {given[1]}")
    result = invoke("page", "--parts", str(tmp_path / "a"), "--output", str(tmp_path / "b"))
    assert result.stdout == f"{tmp_path / 'a'} {tmp_path / 'b'}\n"


def test_a_folder_without_scores_is_one_line(tmp_path: Path) -> None:
    result = invoke("page", "--parts", str(tmp_path))
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line == f"picbench: {tmp_path}: no scores of algorithms (measure them first)"


def test_warm_chunks_get_their_flags_and_show_their_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def called(*given: Any) -> None:
        asked.append(given)
        (tmp_path / "warm-chunks.md").write_text("page")

    monkeypatch.setattr(warm_chunks, "measure", called)
    flags = ["--model", "m", "--device", "cpu", "--repeats", "7", "--chunks", "4"]
    flags += ["--busy-cores", "3"]
    result = invoke("warm-chunks", *flags, "--output", str(tmp_path))
    assert result.stdout == "page\n"
    assert asked == [(warm_chunks.WarmSettings("m", "cpu", 7, 4, 3), None, tmp_path)]
