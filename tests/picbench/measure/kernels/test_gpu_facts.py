"""Where a measurement was taken."""

import subprocess
from types import SimpleNamespace

import pytest

from picbench.measure.kernels import gpu_facts


@pytest.mark.parametrize(
    ("said", "driver"), [("580.1\n", "580.1"), ("580.1\n580.1\n", "580.1"), ("", "unknown")]
)
def test_a_host_has_one_driver_for_all_of_its_gpus(
    monkeypatch: pytest.MonkeyPatch, said: str, driver: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    monkeypatch.setattr(gpu_facts.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_facts.importlib.metadata, "version", lambda _: "1")
    assert gpu_facts.provenance("abc", 3, 0)["driver"] == driver
