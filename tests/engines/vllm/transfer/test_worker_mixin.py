"""When a worker names the chunks that it stores anew: whenever its weights may be others."""

from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin


class Upstream:
    """A worker of vLLM that may fail to load weights."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def reload_weights(self, path: str) -> None:
        self._load()

    def finish_weight_update(self) -> None:
        self._load()

    def _load(self) -> None:
        if self.error is not None:
            raise self.error


class MixedWorker(ConnectorWorkerMixin, Upstream):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(error)
        self.names: list[bytes] = []

    def namespace(self) -> bytes:
        return b"new"

    def add_pool(self) -> None:
        tier_client = SimpleNamespace(set_namespace=self.names.append)
        self._connector_scope.connector = SimpleNamespace(tier_client=tier_client)


LOADS: dict[str, Any] = {
    "reload": lambda worker: worker.reload_weights("path"),
    "update": lambda worker: worker.finish_weight_update(),
}


@pytest.mark.parametrize("way", LOADS)
def test_other_weights_are_named_anew(way: str) -> None:
    worker = MixedWorker()
    LOADS[way](worker)  # before there is a pool
    worker.add_pool()
    LOADS[way](worker)
    assert worker.names == [b"new"]


@pytest.mark.parametrize("way", LOADS)
def test_weights_that_were_loaded_in_part_are_named_anew(way: str) -> None:
    worker = MixedWorker(OSError("gone"))
    worker.add_pool()
    with pytest.raises(OSError, match="gone"):
        LOADS[way](worker)
    assert worker.names == [b"new"]
