"""Hooks that fail once more while a request is cleaned up."""

from types import SimpleNamespace
from typing import Any

from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.isolation import IsolatedLinker


class _Broken:
    """A linker that can neither finish nor abandon requests."""

    def is_own(self, request: Any) -> bool:
        return False

    def on_finished(self, request: Any, block_ids: tuple[int, ...], *, success: bool) -> None:
        raise RuntimeError("finish")

    def abandon(self, request: Any) -> None:
        raise RuntimeError("abandon")


def test_a_request_that_cannot_be_cleaned_up_is_answered() -> None:
    faults = Faults()
    hooks = IsolatedLinker(_Broken(), faults)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(request_id="0", client_index=3)
    hooks.on_finished(request, (), success=True)
    assert hooks.ended == {"0": 3}
    assert "RuntimeError: finish" in faults.take()["0"]
