"""`picbench measure kernels`: which benchmark it runs, and where its tables go."""

import sys
from pathlib import Path

import pytest

from picbench.cli import main
from picbench.errors import InvalidRun
from picbench.experiments import cpu_kernels as cpu_attention


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["measure", "kernels", *flags])
    captured = capsys.readouterr()
    return int(str(ended.value.code)), captured.out, captured.err


def test_on_cpu_vllms_own_attention_is_the_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def measured(output: Path, **options: object) -> str:
        asked.extend((output, options))
        return "the table"

    monkeypatch.setattr(cpu_attention, "bench", measured)
    flags = ("--output", str(tmp_path), "--rounds", "7", "--seed", "3")
    assert bench(capsys, *flags)[:2] == (0, "the table\n")
    options = {"rounds": 7, "seconds": 20.0, "seed": 3, "work": (), "commit": None}
    assert asked == [tmp_path, options]


def test_a_wrong_kernel_ends_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object, **__: object) -> str:
        raise InvalidRun("unrotated is wrong")

    monkeypatch.setattr(cpu_attention, "bench", wrong)
    code, _, told = bench(capsys)
    assert (code, told) == (3, "picbench: unrotated is wrong\n")


def test_a_device_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = bench(capsys, "--device", "cuda")
    assert code == 2
    assert "vLLM runs on cpu here, not on cuda" in told
    assert "--device auto" in told


def test_without_vllm_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    code, _, told = bench(capsys)
    assert code == 2
    assert "pip install 'picbench[cpu]'" in told


@pytest.mark.parametrize("command", [("reproduce", "mepic", "--dry-run"), ("measure", "kernels")])
def test_a_place_below_a_file_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "out"
    with pytest.raises(SystemExit) as ended:
        main([*command, "--output", str(place)])
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n")) == (2, 1)
    assert f"'--output': {place}: Not a directory" in told
