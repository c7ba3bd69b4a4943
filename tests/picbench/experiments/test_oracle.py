"""Every row of the table of architectures: what it says holds in the engine."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, epic, full, mepic, naive
from picbench.errors import ConfigError
from picbench.experiments import oracle as checking
from picbench.experiments.oracle import cases, check, check_quantised
from picbench.run.measurements import Architectures
from picbench.workloads.models.architectures import Architecture, architectures, coverage, write
from picbench.workloads.yaml_data import read_data

RESULTS = Path(__file__).parents[3] / "results" / "gpu"
TOLERANCE = 1e-3
APART = 0.05  # fifty times the tolerance

#: How tokens are routed to their experts, which vLLM has for GPUs only.
NO_ROUTING = {"minimax-m2-experts"}

#: Chunks at two places, twice in one prompt, on both sides of another.
ORDERS = ("BAB",)


def rows(said: str, *, quantised: bool = False) -> Any:
    found = [
        pytest.param(row, id=row.name)
        for row in architectures()
        if row.cpu == said and bool(row.weights) == quantised
    ]
    return pytest.mark.parametrize("row", found)


def config(model: Path, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype=dtype,
        kv_blocks=512,
        context=1024,
        batch_tokens=256,
        max_requests=8,
    )


@pytest.mark.engine
@rows("checked")
def test_checked_rows_agree_with_the_oracle(
    row: Architecture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(row, tmp_path)
    agrees = check(config(model), TOLERANCE, ORDERS)
    said = capsys.readouterr().out
    assert agrees, said
    for algorithm in ("naive", "epic:k=16", "mepic", "full"):
        for name in ("cold", "after", "warm"):
            assert re.search(rf"^ok +{algorithm} BAB +{name} ", said, re.MULTILINE)


@pytest.mark.engine
@rows("checked", quantised=True)
def test_checked_weights_agree_with_stock_vllm(
    row: Architecture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(row, tmp_path)
    agrees = check_quantised(config(model, row.dtypes["cpu"]))
    said = capsys.readouterr().out
    assert agrees, said
    for way in ("full recompute", "all tokens linked", "one chunk at the start"):
        assert re.search(rf"^ok +{way} ", said, re.MULTILINE)


@pytest.mark.engine
@rows("refused")
def test_refused_rows_are_refused_in_their_words(row: Architecture, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(row.why)):
        Engine(config(write(row, tmp_path))).close()


def test_every_row_has_been_tried_on_a_cpu() -> None:
    """But for what vLLM's build for CPUs has no kernels for, and what torchvision reads."""
    without = {row.name for row in architectures() if row.cpu == "not checked"}
    tried = [row for row in architectures() if row.name not in NO_ROUTING]
    assert all(row.weights or row.wrapper for row in tried if row.name in without)
    assert all(row.why for row in architectures() if "refused" in (row.cpu, row.gpu))


@pytest.mark.engine
@rows("checked")
def test_tiny_models_tell_algorithms_apart(row: Architecture, tmp_path: Path) -> None:
    """An engine that used another algorithm, or the wrong positions, would be noticed."""
    oracle = Oracle(write(row, tmp_path), context=1024)
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == [
        row.architecture
    ]
    case = next(iter(cases(oracle.model.config.get_text_config().vocab_size, ORDERS)))
    kinds = ("text", "chunk", "chunk", "chunk", "text")
    tokens = [segment.tokens or () for segment in case.request.segments]
    found = [
        oracle.logprobs(list(zip(kinds, tokens, strict=True)), rule, (7,))
        for rule in (naive(), epic(16), mepic(), full())
    ]
    for place, one in enumerate(found):
        assert all(float((one - other).abs().max()) > APART for other in found[:place])


def test_what_the_table_says_of_gpus_is_what_was_measured() -> None:
    """Without a measurement it says so, or refuses what no device serves."""
    files = sorted(RESULTS.glob("architectures*.json"))
    found = [row for file in files for row in json.loads(file.read_bytes())["found"]]
    measured = {row["name"]: row["verdict"] for row in found}
    for row in architectures():
        verdict = measured.get(row.name)
        if row.gpu == "not checked":
            assert verdict != "checked", row.name
            assert verdict is None or row.why, row.name
        else:
            assert verdict == row.gpu or (verdict is None and row.gpu == row.cpu == "refused")


def test_recipes_are_counted_by_the_rows_that_stand_for_them() -> None:
    data, rows = read_data("models", "recipes"), {row.name: row for row in architectures()}
    names = [name for group in data["groups"] for name in group["recipes"]]
    assert len(names) == len(set(names)) == 113
    for group in data["groups"]:
        assert ("row" in group) != bool(group.get("why"))
        assert {group[name] for name in ("row", "weights") if name in group} <= set(rows)
        assert not rows[group["row"]].weights if "row" in group else True
        assert rows[group["weights"]].weights if "weights" in group else True
    counts = dict(coverage())
    assert re.fullmatch(r"\d+ of 113 on CPU, \d+ on GPU", counts["all recipes of 2026-08-21"])
    assert counts["sparse attention"] == "0 of 10 on CPU, 0 on GPU"


@pytest.mark.parametrize(
    ("name", "verdict", "line", "good"),
    [
        ("llama-3", "checked", "all agree with the oracle", True),
        ("llama-3", "wrong", "NOT all agree with the oracle", False),
        ("llama-3", "failed", "ended with exit code 139", False),
        (
            "phi-3",
            "refused",
            "picbench does not support a sliding window (2 of 2 layers) (hint)",
            True,
        ),
        ("phi-3", "refused", "out of memory", False),
    ],
)
def test_a_check_stands_by_the_table(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    verdict: Any,
    line: str,
    good: bool,
) -> None:
    answer = {"name": name, "verdict": verdict, "line": line}
    monkeypatch.setattr(checking, "_check", lambda *_, **__: answer)
    monkeypatch.setattr(
        checking, "find", lambda name: SimpleNamespace(name="cuda")
    )  # A GPU that is not here.
    settings = Architectures(only=(name,), eager=True, jobs=2, output=tmp_path)
    outcome = checking.check_architectures(settings)
    assert (outcome.code == 0) is good
    [found] = json.loads((tmp_path / "architectures.json").read_bytes())["found"]
    assert found == answer
    assert (tmp_path / "architectures.md").read_text() == outcome.page


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "verdict", "line"),
    [
        (
            0,
            "ok naive\nall agree with the oracle\nINFO bye",
            "W",
            "checked",
            "all agree with the oracle",
        ),
        (1, "ok    a\nWRONG b 1.0\nWRONG c\nNOT all agree", "", "wrong", "WRONG b 1.0"),
        (2, "INFO", "W1\npicbench: no such heads (hint)\nbye", "refused", "no such heads (hint)"),
        (2, "picbench: slow", "picbench: no ALiBi (hint)\nbye", "refused", "no ALiBi (hint)"),
        (4, "INFO", "picbench: the engine failed", "failed", "the engine failed"),
        (-11, "", "", "failed", "ended with exit code -11"),
    ],
)
def test_what_a_process_said_is_found_in_its_logs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: int,
    stdout: str,
    stderr: str,
    verdict: str,
    line: str,
) -> None:
    done = subprocess.CompletedProcess("", code, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = checking._check("a", tmp_path, Architectures())
    assert found == {"name": "a", "verdict": verdict, "line": line}


@pytest.mark.engine
def test_models_are_checked_in_processes_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is refused, because its process ends soonest."""
    settings = Architectures(device="cpu", only=("phi-3",), eager=True, output=tmp_path)
    assert checking.check_architectures(settings).code == 0, capfd.readouterr().out
    [found] = json.loads((tmp_path / "architectures.json").read_bytes())["found"]
    assert found["verdict"] == "refused"
    assert found["line"].startswith("picbench does not support a sliding window (2 of 2 layers)")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`only` qwen4: no such architecture"):
        checking.check_architectures(Architectures(only=("qwen4",), output=tmp_path))


def test_a_device_that_vllm_does_not_serve_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        checking.check_architectures(Architectures(device="tpu", output=tmp_path))
    assert not any(tmp_path.iterdir())
