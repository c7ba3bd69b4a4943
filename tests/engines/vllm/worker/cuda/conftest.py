"""Sampling parameters as the scheduler sends them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import Picks
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, SlotMap

Send = Callable[..., Any]


@pytest.fixture
def send() -> Send:
    """(positions, end, shifts, max_tokens, picks) -> parameters of a planned request.

    `shifts` are slots [start, end) that are canonical, and how far their keys are re-rotated.
    """

    def params(
        positions: Sequence[int] | None,
        end: int = 0,
        shifts: Sequence[tuple[int, int, int]] = (),
        max_tokens: int = 8,
        picks: Picks | None = None,
    ) -> Any:
        extra_args: dict[str, Any] | None = None
        if positions is not None:
            cached_at = [GAP] * len(positions)
            for start, stop, shift in shifts:
                cached_at[start:stop] = [p - shift for p in positions[start:stop]]
            runs = [tuple((at, 1) for at in slots) for slots in (positions, cached_at)]
            extra_args = {SLOT_MAP: SlotMap(runs[0], runs[1], end, picks=picks)}
        return SimpleNamespace(extra_args=extra_args, max_tokens=max_tokens)

    return params
