"""Devices, and what engines on them are started with. vLLM's CPU build is installed here."""

import pytest

from picbench.engines.vllm.device import CPU, CUDA, find
from picbench.engines.vllm.settings import WORKERS, PicSettings, engine_arguments
from picbench.errors import ConfigError


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
