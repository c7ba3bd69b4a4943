"""`picbench measure`: flags on their way to the measurements, and exit codes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from picbench.cli import main
from picbench.errors import IncomparableRuns
from picbench.experiments import engine_speed as comparison
from picbench.experiments import engine_speed as decode_cost
from picbench.experiments import engine_speed as small_steps
from picbench.experiments import oracle as architecture_check
from picbench.experiments import oracle as oracle_check
from picbench.experiments import rope_pad as rope_pad_ablation
from picbench.experiments import scaling, steps, storm
from picbench.experiments import serve_arms as accuracy
from picbench.experiments.steps import CheckStep
from picbench.measure import load
from picbench.measure.engine import context
from picbench.store import provenance

STEPS = (
    "kernels",
    "shared-decode",
    "decode",
    "tiers",
    "oracle",
    "architectures",
    "storm",
    "engine-comparison",
    "accuracy",
    "host-tier",
    "small-steps",
    "decode-load",
    "load-report",
    "rope-pad-ablation",
    "scaling",
    "algorithms",
    "all",
)

Note = Callable[[Any, str], list[tuple[Any, ...]]]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["measure", *arguments])


def verdict(result: Result) -> str:
    """The only line on stderr."""
    [line] = result.stderr.splitlines()
    return line


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps instead of the real ones; the second one fails. Each adds a word to this file."""
    file = tmp_path / "log"

    def say(word: str, code: int) -> CheckStep:
        script = f"open({str(file)!r}, 'a').write({word + ' '!r}); raise SystemExit({code})"
        return CheckStep(word, f"says {word}", ((sys.executable, "-c", script),))

    monkeypatch.setattr(steps, "steps", lambda *_: [say("good", 0), say("bad", 1)])
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "G"}])
    return file


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Note:
    """(module, name) -> the arguments of all calls of a function that now only writes pages."""

    def replace(module: Any, name: str) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def called(*arguments: Any) -> None:
            calls.append(arguments)
            for page in ("context", "load"):
                (arguments[-1] / f"{page}.md").write_text(f"page {page}\n")

        monkeypatch.setattr(module, name, called)
        return calls

    return replace


def test_the_list_names_every_step_and_runs_none(log: Path) -> None:
    result = invoke("all", "--list")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["good         says good", "bad          says bad"]
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


def test_results_and_runs_go_where_they_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(steps, "steps", lambda *given: seen.append(given) or [])
    assert invoke("all", "--output", "o", "--runs", "r", "--commit", "c").exit_code == 0
    assert invoke("all").exit_code == 0
    assert seen == [
        (Path("o"), Path("r"), "c"),
        (Path("results/gpu"), Path("runs/gpu"), None),
    ]


def test_accuracy_gets_its_flags(note: Note, tmp_path: Path) -> None:
    calls = note(accuracy, "measure")
    output = ("--output", str(tmp_path))
    assert invoke("accuracy", *output).exit_code == 0
    flags = ("--device", "cpu", "--dtype", "float32", "--rows", "7", "--eager", "--commit", "c")
    assert invoke("accuracy", *flags, *output).exit_code == 0
    assert calls == [
        ("cuda", "bfloat16", 200, False, None, tmp_path),
        ("cpu", "float32", 7, True, "c", tmp_path),
    ]


def test_context_gets_its_flags_and_shows_its_page(note: Note, tmp_path: Path) -> None:
    calls = note(context, "measure")
    flags = ("--device", "cpu", "--model", "m", "--repeats", "5", "--longest", "8")
    result = invoke("context", *flags, "--output", str(tmp_path))
    assert result.stdout == "page context\n\n"
    assert calls == [("m", "cpu", 5, 8, None, tmp_path)]


def test_small_steps_gets_its_flags_and_shows_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def measured(**settings: Any) -> str:
        asked.append(settings)
        return "the page"

    monkeypatch.setattr(small_steps, "measure", measured)
    flags = ("--graph-tokens", "128", "--graph-tokens", "2048", "--repeats", "5")
    result = invoke("small-steps", *flags, "--model", "m", "--output", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "the page\n")
    assert invoke("small-steps", "--device", "cpu", "--commit", "c").exit_code == 0
    shape, output = "shape:llama-3.1-8b", Path("results/gpu")
    assert asked == [
        {
            "model": "m",
            "device": "cuda",
            "repeats": 5,
            "graph_tokens": (128, 2048),
            "commit": None,
            "output": tmp_path,
        },
        {
            "model": shape,
            "device": "cpu",
            "repeats": 3,
            "graph_tokens": (512, 1024),
            "commit": "c",
            "output": output,
        },
    ]


def test_scaling_gets_its_flags_and_shows_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(run: scaling.ScalingRun, say: Callable[[str], None]) -> tuple[str, bool]:
        assert (run.model, run.device, run.workers, run.rounds) == ("m", "cpu", 4, 9)
        assert (run.dtype, run.commit, run.path) == ("float32", "c", tmp_path / "scaling-4.json")
        return "the page", run.seconds == 0

    monkeypatch.setattr(scaling, "measure", measured)
    flags = ("--workers", "4", "--rounds", "9", "--model", "m", "--commit", "c", "--device", "cpu")
    result = invoke("scaling", *flags, "--output", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "the page\n")
    result = invoke("scaling", *flags, "--output", str(tmp_path), "--seconds", "5")
    assert result.exit_code == 4


def test_the_ablation_gets_its_flags_and_shows_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        rope_pad_ablation, "measure", lambda *given: calls.append(given) or "the page"
    )
    flags = ["--device", "cpu", "--dtype", "float32", "--chunks", "8", "--repeats", "5"]
    flags += ["--rows", "6", "--model", "m", "--eager", "--commit", "c", "--output", str(tmp_path)]
    assert invoke("rope-pad-ablation", *flags).stdout == "the page\n"
    settings = rope_pad_ablation.AblationSettings("m", "cpu", "float32", 8, 5, 6, eager=True)
    assert calls == [(settings, "c", tmp_path)]


def test_the_comparison_gets_its_flags(note: Note, tmp_path: Path) -> None:
    calls = note(comparison, "measure")
    flags = ("--model", "m", "--repeats", "2", "--commit", "c", "--output", str(tmp_path))
    assert invoke("engine-comparison", *flags).exit_code == 0
    assert calls == [("m", 2, "c", tmp_path)]


@pytest.mark.parametrize("agrees", [True, False])
def test_an_engine_that_differs_from_the_oracle_ends_in_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(oracle_check, "measure", lambda **given: asked.append(given) or agrees)
    result = invoke("oracle", "--model", "m", "--eager", "--tensor-parallel", "2")
    assert result.exit_code == (0 if agrees else 1)
    assert asked == [
        {
            "model": "m",
            "device": "cuda",
            "dtype": "float32",
            "eager": True,
            "synchronous": False,
            "keys_without_rope": False,
            "shared_decode": "off",
            "tensor_parallel": 2,
        }
    ]


@pytest.mark.parametrize("agrees", [True, False])
def test_architectures_get_their_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        architecture_check, "measure", lambda **given: asked.append(given) or agrees
    )
    flags = ("--device", "cpu", "--only", "glm-4", "--only", "qwen3", "--jobs", "3")
    result = invoke("architectures", *flags, "--output", str(tmp_path))
    assert result.exit_code == (0 if agrees else 1)
    assert asked == [
        {
            "output": tmp_path,
            "commit": None,
            "device": "cpu",
            "dtype": "float32",
            "eager": False,
            "only": ("glm-4", "qwen3"),
            "jobs": 3,
        }
    ]


@pytest.mark.parametrize("wrong", [[], ["the pool did not drain"]])
def test_a_storm_with_faults_ends_in_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: list[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(storm, "measure", lambda *given: asked.append(given) or (wrong, "page"))
    flags = ["--dtype", "bfloat16", "--eager", "--pool", "900", "--tensor-parallel", "2"]
    result = invoke("storm", *flags, "--commit", "abc", "--output", str(tmp_path))
    assert (result.exit_code, result.stdout) == (1 if wrong else 0, "page\n")
    settings = storm.StormSettings(dtype="bfloat16", eager=True, pool=900, tensor_parallel=2)
    assert asked == [(settings, "abc", tmp_path)]
    assert settings.name == "storm-bfloat16-tp2-eager"


@pytest.mark.parametrize("allowed", [True, False])
def test_decoding_that_costs_too_much_ends_in_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        decode_cost, "measure", lambda *given: asked.append(given) or (allowed, "page")
    )
    flags = ("--model", "m", "--rounds", "5", "--commit", "abc", "--output", str(tmp_path))
    result = invoke("decode", *flags)
    assert (result.exit_code, result.stdout) == (0 if allowed else 1, "page\n")
    assert asked == [("m", 5, "abc", tmp_path)]


def test_load_takes_one_run_or_two_and_shows_its_page(note: Note, tmp_path: Path) -> None:
    calls = note(load, "write")
    output = ("--output", str(tmp_path))
    assert invoke("load", "--throughput", "a", "--memory", "b", *output).exit_code == 0
    assert invoke("load", "--memory", "b", *output).stdout == "page load\n\n"
    assert calls == [(Path("a"), Path("b"), None, tmp_path), (None, Path("b"), None, tmp_path)]


def test_a_load_that_says_nothing_ends_in_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise IncomparableRuns("it was not saturated", hint="raise --rate")

    monkeypatch.setattr(load, "write", refuse)
    result = invoke("load", "--memory", "b")
    assert (result.exit_code, verdict(result)) == (
        3,
        "picbench: it was not saturated (raise --rate)",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["accuracy", "--rows", "0"], "'--rows': 0 is not in the range x>=1"),
        (["decode", "--rounds", "1"], "'--rounds': 1 is not in the range x>=2"),
        (["accuracy", "--dtype", "float16"], "'float16' is not one of"),
        (["context", "--longest", "1"], "'--longest': 1 is not in the range x>=2"),
        (["scaling", "--workers", "1"], "'--workers': 1 is not in the range x>=2"),
        (["scaling", "--requests", "1"], "No such option"),
        (["load"], "no run is given (name one by --throughput or --memory)"),
        (["load", "--memory", "nowhere"], "nowhere: not a run directory"),
        (["al"], "No such command 'al'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in verdict(result)
    assert list(tmp_path.iterdir()) == []


def test_the_module_runs_and_its_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "picbench", "measure", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in STEPS:
        assert f"\n  {name} " in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    heavy = {"torch", "vllm", "numpy", "pydantic", "transformers", "pyarrow", "matplotlib"}
    assert not imported & heavy
