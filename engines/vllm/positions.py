"""Logical positions of the requests in a batch: what RoPE and causality see.

vLLM's runner counts physical positions (slots in compute order). These objects say, for the same
slots, where each token stands in the user's prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from picbench.engines.plan import GAP
from picbench.engines.vllm.wire import POSITIONS


@dataclass(frozen=True, slots=True)
class StepPositions:
    """One engine step, in batch order.

    `kpos[i]` [>= valid slots] int32 holds the logical position of each slot of request i (GAP:
    never visible); `affine[i]` says that these are 0, 1, 2, ...; `qpos` [tokens] int32 holds the
    logical position of each scheduled token.
    """

    kpos: tuple[Tensor, ...]
    affine: tuple[bool, ...]
    qpos: Tensor


class PositionTable:
    """Positions of all requests that a runner knows; one belongs to each model runner.

    `slots` is the most slots that a request can have.
    """

    def __init__(self, slots: int) -> None:
        self._plain = torch.arange(slots, dtype=torch.int32)
        self._planned: dict[str, Tensor] = {}

    def step(
        self,
        request_ids: Sequence[str],
        extra_args: Mapping[str, Any],
        computed: Sequence[int],
        scheduled: Sequence[int],
    ) -> StepPositions:
        """Positions of a step: request i computes slots [computed[i], computed[i] + scheduled[i]).

        `extra_args` are the sampling arguments of all requests alive, by id; those of planned
        requests carry their slots' positions.
        """
        self._planned = {k: v for k, v in self._planned.items() if k in extra_args}
        rows = [self._row(request_id, extra_args[request_id]) for request_id in request_ids]
        parts = [
            row[begin : begin + count]
            for row, begin, count in zip(rows, computed, scheduled, strict=True)
        ]
        affine = tuple(row is self._plain for row in rows)
        return StepPositions(tuple(rows), affine, torch.cat(parts))

    def _row(self, request_id: str, extra_args: Mapping[str, Any] | None) -> Tensor:
        if not extra_args or POSITIONS not in extra_args:
            return self._plain
        if request_id not in self._planned:
            self._planned[request_id] = self._fill(*extra_args[POSITIONS])
        return self._planned[request_id]

    def _fill(self, prompt: Sequence[int], end: int) -> Tensor:
        row = np.empty(len(self._plain), dtype=np.int32)
        row[: len(prompt)] = prompt
        row[len(prompt) :] = np.arange(end, end + len(row) - len(prompt))
        return torch.from_numpy(row)


def rotary_positions(qpos: Tensor) -> Tensor:
    """Positions for the model's RoPE: `qpos`, and 0 for pads, whose outputs nobody reads."""
    return qpos.long().where(qpos < GAP, 0)
