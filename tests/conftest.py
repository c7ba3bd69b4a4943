"""Settings that hold before any library is imported."""

import os

import pytest

# Test processes share the cores; OpenMP threads that spin for each other slow all of them down
# (measured on two cores with five processes: 20 times).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the eviction storm is; `--storm 10000` takes minutes."""
    parser.addoption("--storm", type=int, default=600, help="requests of the eviction storm")


def pytest_configure(config: pytest.Config) -> None:
    """Let libraries warn about their own code, also at import; picbench's warnings are errors."""
    for library in ("torch", "transformers", "vllm"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")
