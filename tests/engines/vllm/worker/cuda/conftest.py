"""Sampling parameters as the scheduler of a GPU engine sends them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.frontend.request_args import POSITIONS
from picbench.engines.vllm.worker.slot_map import TURNS

Send = Callable[..., Any]


@pytest.fixture
def send() -> Send:
    """(positions, end, turns, max_tokens) -> parameters of a planned request."""

    def params(
        positions: Sequence[int] | None,
        end: int = 0,
        turns: Sequence[tuple[int, int, int]] = (),
        max_tokens: int = 8,
    ) -> Any:
        extra_args: dict[str, Any] | None = None
        if positions is not None:
            extra_args = {POSITIONS: (positions, end, (0, 0)), TURNS: turns}
        return SimpleNamespace(extra_args=extra_args, max_tokens=max_tokens)

    return params
