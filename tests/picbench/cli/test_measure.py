"""`picbench measure`: flags on their way to the measurements, pages and exit codes."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
from click.testing import CliRunner, Result

from picbench.cli import main
from picbench.errors import InvalidRun
from picbench.experiments import cpu_kernels, steps
from picbench.experiments.steps import CheckStep
from picbench.run import measurements
from picbench.run.measurements import MEASUREMENTS, Outcome
from picbench.settings import SettingsModel
from picbench.store import provenance

#: The package has the group under the same name.
COMMAND = importlib.import_module("picbench.cli.measure")

Asked = list[tuple[str, SettingsModel]]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["measure", *arguments])


def verdict(result: Result) -> str:
    """The only line on stderr."""
    [line] = result.stderr.splitlines()
    return line


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Functions that were called instead of measurements, and with what; each ends with 4."""
    calls: Asked = []

    def resolve(name: str) -> Callable[[SettingsModel], Outcome]:
        return lambda settings: calls.append((name, settings)) or Outcome("the page", 4)  # type: ignore[func-returns-value]

    monkeypatch.setattr(COMMAND, "resolve_name", resolve)
    return calls


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps instead of the real ones; the second one fails. Each adds a word to this file."""
    file = tmp_path / "log"

    def say(word: str, code: int) -> CheckStep:
        script = f"open({str(file)!r}, 'a').write({word + ' '!r}); raise SystemExit({code})"
        return CheckStep(word, f"says {word}", (sys.executable, "-c", script))

    monkeypatch.setattr(steps, "steps", lambda *_: [say("good", 0), say("bad", 1)])
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "G"}])
    return file


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("accuracy", measurements.Accuracy()),
        (
            "accuracy --device cpu --dtype float32 --rows 7 --eager --commit c --output o",
            measurements.Accuracy(
                device="cpu", dtype="float32", rows=7, eager=True, commit="c", output=Path("o")
            ),
        ),
        (
            "small-steps --graph-tokens 128 --graph-tokens 2048 --model m",
            measurements.SmallSteps(graph_tokens=(128, 2048), model="m"),
        ),
        (
            "algorithms serve --dataset needle --dataset samsum --algo mepic --seconds 60 --drop",
            measurements.ServeScores(
                dataset=("needle", "samsum"), algo=("mepic",), seconds=60.0, drop=True
            ),
        ),
        ("break-even --part 2/3 --dry-run", measurements.BreakEven(part=(2, 3), dry_run=True)),
        (
            "profile --grid g --seed 5",
            measurements.ProfileCheck(grid="g", seed=5),
        ),
        ("kernels --work link --work decode", measurements.Kernels(work=("link", "decode"))),
        ("tiers --tiers host:1GiB", measurements.Tiers(tiers="host:1GiB")),
        ("all --list --runs r", measurements.AllSteps(list=True, runs=Path("r"))),
    ],
)
def test_flags_are_settings_of_the_measurement(
    asked: Asked, flags: str, settings: SettingsModel
) -> None:
    result = invoke(*flags.split())
    assert (result.exit_code, result.stdout) == (4, "the page\n")
    [(_, found)] = asked
    assert found == settings


def test_every_measurement_has_a_function() -> None:
    for found in MEASUREMENTS:
        assert callable(resolve_name(f"picbench.{found.function}"))


def test_scores_and_other_files_have_folders_of_their_own(asked: Asked) -> None:
    """Every file in the folder of the scores is read as some."""
    for name in ("serve", "alone"):
        invoke("algorithms", name)
    outputs = [getattr(settings, "output") for _, settings in asked]  # noqa: B009
    assert outputs == [Path("results/testbed/algorithms"), Path("results/gpu")]


def test_the_model_is_the_devices_own_where_none_is_named() -> None:
    served = [measurements.Scaling(device=device).served for device in ("cuda", "cpu")]
    assert served == ["shape:llama-3.1-8b", "shape:tiny"]
    grid = measurements.BreakEven(device="cpu")
    assert (grid.served, grid.served_dtype) == ("testbed", "float32")


def test_the_list_names_every_step_and_runs_none(log: Path) -> None:
    result = invoke("all", "--list")
    assert result.exit_code == 0
    assert result.stdout.split() == ["good", "says", "good", "bad", "says", "bad"]
    assert not log.exists()


def test_a_check_that_fails_ends_in_exit_code_3(log: Path, tmp_path: Path) -> None:
    result = invoke("all", "--runs", str(tmp_path / "runs"))
    assert result.exit_code == 3
    assert verdict(result).startswith("picbench: step bad failed: ")
    assert verdict(result).endswith("(nothing after it was run)")
    assert log.read_text() == "good bad "


def test_steps_are_chosen_and_repeated_by_flags(log: Path, tmp_path: Path) -> None:
    flags = ("all", "--runs", str(tmp_path / "runs"), "--only", "good")
    assert [invoke(*flags).exit_code for _ in range(2)] == [0, 0]
    assert log.read_text() == "good "
    assert invoke(*flags, "--redo").exit_code == 0
    assert log.read_text() == "good good "


def test_an_unknown_step_is_a_usage_error(log: Path, tmp_path: Path) -> None:
    result = invoke("all", "--runs", str(tmp_path / "runs"), "--only", "goods")
    assert result.exit_code == 2
    assert verdict(result) == "picbench: --only goods: no such step (did you mean 'good'?)"


def test_a_wrong_kernel_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> str:
        raise InvalidRun("unrotated is wrong")

    monkeypatch.setattr(cpu_kernels, "bench", wrong)
    result = invoke("kernels")
    assert (result.exit_code, verdict(result)) == (3, "picbench: unrotated is wrong")


def test_a_device_that_is_not_here_is_refused() -> None:
    result = invoke("kernels", "--device", "cuda")
    assert result.exit_code == 2
    assert "vLLM runs on cpu here, not on cuda" in verdict(result)
    assert "--device auto" in verdict(result)


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    result = invoke("kernels")
    assert result.exit_code == 2
    assert "pip install 'picbench[cpu]'" in verdict(result)


@pytest.mark.parametrize("command", [("reproduce", "mepic", "--dry-run"), ("measure", "kernels")])
def test_a_place_below_a_file_is_refused_before_measuring(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "out"
    result = CliRunner().invoke(main, [*command, "--output", str(place)])
    assert result.exit_code == 2
    assert f"'--output': {place}: Not a directory" in verdict(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("accuracy --rows 0", "'--rows': 0 is not in the range x>=1"),
        ("decode --rounds 1", "'--rounds': 1 is not in the range x>=2"),
        ("accuracy --dtype float16", "'float16' is not one of"),
        ("scaling --workers 1", "'--workers': 1 is not in the range x>=2"),
        ("scaling --requests 1", "No such option"),
        ("break-even --part 3/2", "'3/2': not like 1/2"),
        ("break-even --part half", "'half': not like 1/2"),
        ("profile", "Missing option '--grid'"),
        ("al", "No such command 'al'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert said in verdict(result)
    assert list(tmp_path.iterdir()) == []


def test_the_module_runs_and_its_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "picbench", "measure", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for found in MEASUREMENTS:
        assert f"\n  {found.name.split()[0]} " in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "vllm", "numpy", "transformers", "pyarrow", "matplotlib"}
