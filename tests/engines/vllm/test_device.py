"""Devices, and what engines on them are started with. vLLM's CPU build is installed here."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from picbench.engines.config import DEFAULT_TIERS, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm.device import CPU, CUDA, Device, find, slow_short_types
from picbench.engines.vllm.launch import _choose, _common_arguments
from picbench.engines.vllm.settings import WORKERS, PicSettings, engine_arguments
from picbench.errors import ConfigError

LAPTOP = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}
NEITHER = "this CPU has neither AVX512_BF16 nor AMX"


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_device_that_vllm_serves(name: str) -> None:
    assert find(name) is CPU


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs on cpu here, not on cuda"):
        find("cuda")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        find("tpu")


def test_pages_of_stock_engines() -> None:
    assert (CPU.stock_ratio, CUDA.stock_ratio) == (2, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_arguments_of_a_gpu_engine(asynchronous: bool) -> None:
    arguments = engine_arguments(PicSettings(), "cuda", asynchronous=asynchronous)
    assert arguments["async_scheduling"] is asynchronous
    assert ("Async" in arguments["scheduler_cls"]) is asynchronous
    assert arguments["attention_backend"] == "CUSTOM"
    assert arguments["worker_cls"] in WORKERS


def test_arguments_of_a_cpu_engine() -> None:
    arguments = engine_arguments(PicSettings())
    assert arguments["worker_cls"] in WORKERS
    assert not arguments["async_scheduling"]


@pytest.mark.parametrize(
    ("capabilities", "limit", "reason"),
    [
        (LAPTOP, "", NEITHER),
        ({"architecture": "x86_64"}, "", NEITHER),
        (LAPTOP | {"avx512_f": True}, "ALL", NEITHER),
        (LAPTOP | {"avx512_bf16": True}, "", None),
        (LAPTOP | {"amx_bf16": True}, "AVX512_CORE_AMX", None),
        (
            LAPTOP | {"avx512_bf16": True},
            "AVX2",
            "ONEDNN_MAX_CPU_ISA=AVX2 leaves neither AVX512_BF16 nor AMX",
        ),
        ({"architecture": "arm64"}, "", None),
    ],
)
def test_cpus_that_are_slow_in_16_bits(
    capabilities: dict[str, Any], limit: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert slow_short_types() == reason


def test_what_a_laptop_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LAPTOP)
    auto = EngineConfig("m")
    chosen, notes = _choose(auto, CPU, {})
    assert (chosen.dtype, chosen.tiers) == ("float32", "host:1GiB")
    assert notes == (f"the model is served in float32: {NEITHER}",)
    assert _choose(auto, CPU, {"quantization_config": {"bits": 4}})[0].dtype == "auto"
    given = EngineConfig("m", dtype="bfloat16", tiers="")
    assert _choose(given, CPU, {}) == (given, ())


def test_what_a_gpu_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LAPTOP)
    chosen, notes = _choose(EngineConfig("m"), CUDA, {})
    assert (chosen.dtype, chosen.tiers, notes) == ("auto", "", ())
    given = EngineConfig("m", tiers="host:4GiB")
    assert _choose(given, CUDA, {}) == (given, ())


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_tiers_that_settings_stand_for(device: Any) -> None:
    assert PicSettings().on(device.name).tiers == DEFAULT_TIERS[device.name]
    assert PicSettings(tiers="host:2MiB").on(device.name).tiers == "host:2MiB"
    sent = engine_arguments(PicSettings(), device.name)["additional_config"]["pic"]
    assert sent["tiers"] == DEFAULT_TIERS[device.name]


@pytest.mark.engine
def test_a_laptop_serves_in_float32_and_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LAPTOP)
    with Engine(EngineConfig(str(llama), kv_blocks=64, context=256)) as engine:
        found = engine.describe()
    line = f"the model is served in float32: {NEITHER}"
    assert (found["dtype"], found["notes"], found["tiers"]) == ("float32", [line], "host:1GiB")
    assert found["graph_tokens"] == 0
    assert line in caplog.messages


@pytest.mark.parametrize(
    ("device", "config", "passed"),
    [
        (CUDA, EngineConfig("m", graph_tokens=768), {"max_cudagraph_capture_size": 768}),
        (CUDA, EngineConfig("m"), {"max_cudagraph_capture_size": 1024}),
        (CUDA, EngineConfig("m", stock=True), {"max_cudagraph_capture_size": 512}),
        (CUDA, EngineConfig("m", eager=True), None),
        (CPU, EngineConfig("m"), None),
    ],
)
def test_graphs_serve_steps_of_so_many_tokens(
    device: Device, config: EngineConfig, passed: dict[str, int] | None
) -> None:
    assert _common_arguments(config, device).get("compilation_config") == passed


@pytest.mark.parametrize("most", [1025, 2048, 3000, 4096])
def test_graphs_of_large_steps_are_further_apart(most: int) -> None:
    config = _common_arguments(EngineConfig("m", graph_tokens=most), CUDA)["compilation_config"]
    sizes = config["cudagraph_capture_sizes"]
    assert config.keys() == {"cudagraph_capture_sizes"}
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert [size for size in sizes if 256 <= size <= 1024] == list(range(256, 1025, 16))
    gaps = [(one, other - one) for one, other in pairwise(sizes) if one >= 1024]
    assert all(gap <= one / 16 for one, gap in gaps)
    assert len(sizes) <= 120


def test_graphs_of_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="`graph_tokens` is 0"):
        _common_arguments(EngineConfig("m", graph_tokens=0), CUDA)
