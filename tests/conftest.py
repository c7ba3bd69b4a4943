"""Settings that hold before any library is imported."""

import gc
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Test processes share the cores; OpenMP threads that spin for each other slow all of them down
# (measured on two cores with five processes: 20 times).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
# A hub that cannot be reached is asked again and again, for 20 s.
os.environ["HF_HUB_OFFLINE"] = "1"
# No timing decides a test.
settings.register_profile("picbench", deadline=None)
settings.load_profile("picbench")
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze
#: Files that take longest. They run first, so that all workers end together.
LONGEST = (
    "kernels/cuda/test_interpreter.py",
    "engines/vllm/test_http.py",
    "engines/vllm/test_storm.py",
    "engines/vllm/test_serve.py",
    "engines/vllm/test_oracle_algorithms.py",
    "engines/vllm/test_route.py",
    "picbench/experiments/test_oracle.py",
    "engines/vllm/test_cache_api.py",
    "engines/vllm/test_faults.py",
    "picbench/cli/test_demo.py",
    "engines/vllm/test_auto.py",
    "picbench/papers/test_accuracy.py",
    "engines/vllm/test_http_arm.py",
    "workloads/sources/test_hub.py",
    "picbench/papers/test_reproduce.py",
    "picbench/run/test_remote_arms.py",
    "engines/vllm/test_tensor_parallel.py",
    "picbench/statistics/test_coverage.py",
    "picbench/run/test_kill.py",
    "picbench/compare/test_gate.py",
    "picbench/papers/test_serve_arms.py",
    "picbench/statistics/test_intervals.py",
    "picbench/profile/test_reuse_against_engine.py",
    "engines/vllm/transfer/test_bounded_memory.py",
    "picbench/run/test_warm.py",
    "picbench/report/test_html_report.py",
    "workloads/datasets/test_ruler.py",
    "engines/vllm/test_pressure.py",
    "engines/vllm/test_oracle_preemption.py",
    "engines/vllm/test_oracle_llama3.py",
)
# What tests of several packages share.
sys.path.insert(0, str(Path(__file__).parent))
# This folder holds one of the package's name. Where `pytest` runs without its own directory in the
# path, that folder would be imported instead of an editable install.
if (_found := find_spec("picbench")) is None or _found.origin is None:
    sys.path.append(str(Path(__file__).parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the eviction storm is and whom it meets, and how often a real run is killed.

    `--storm 10000` takes minutes, and so does each kill. With `--ahead` storms and faults meet
    engines that schedule a step before the previous one has ended, as on a GPU.
    """
    parser.addoption("--storm", type=int, default=600, help="requests of the eviction storm")
    parser.addoption("--ahead", action="store_true", help="engines schedule ahead of the model")
    parser.addoption("--kills", type=int, default=0, help="kills of a run of real engines")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, and give a storm of many requests a second for each."""
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    seconds = max(float(config.getini("timeout")), config.getoption("--storm"))
    for item in items:
        if "storm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="module", autouse=True)
def libraries_are_no_garbage() -> None:
    """Leave what outlives a file of tests out of garbage collections, if it has loaded vLLM.

    An engine collects five times when it starts and twice when it ends, each time among a million
    objects of its libraries. Those of an engine are collected as ever: nothing else is frozen.
    """
    if "vllm" in sys.modules:
        gc.collect()
        FREEZE()


def pytest_configure(config: pytest.Config) -> None:
    """Let libraries warn about their own code, also at import; picbench's warnings are errors.

    Engines, which let go of all that is frozen when they end, freeze nothing.
    """
    gc.freeze = gc.unfreeze = lambda: None
    for library in ("torch", "transformers", "vllm"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")


def pytest_unconfigure() -> None:
    """Let pytest's last collection find everything again."""
    gc.freeze, gc.unfreeze = FREEZE, UNFREEZE
    gc.unfreeze()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with four heads of 64, two of them for keys, and plain rotary embeddings."""
    from tiny_llama import write_llama

    return write_llama(tmp_path_factory.mktemp("llama"), head_dim=64, theta=10_000.0)


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """(group, name, value) -> the package `stranger` has that entry point."""
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(group: str, name: str, value: str) -> None:
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")

    return write
