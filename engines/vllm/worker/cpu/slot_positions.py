"""Logical positions of the requests in a batch: what RoPE and causality see.

vLLM's runner counts physical positions (slots in compute order). These objects say, for the same
slots, where each token stands in the user's prompt, and by how much its key is rotated at rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.slot_map import SlotMap


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The slots of one request, in compute order.

    `positions` int32 holds logical positions (GAP: never visible); `affine` says that they are
    0, 1, 2, .... `rotated` says which keys rest rotated: all of them, none, or slot by slot.
    """

    positions: Tensor
    affine: bool
    rotated: bool | Tensor


@dataclass(frozen=True, slots=True)
class StepPositions:
    """One engine step: the requests' slots in batch order, and the scheduled tokens [tokens].

    `queries` int32 are the tokens' logical positions; `keys` those that their keys are rotated to
    before they are stored, 0 for keys that stay as they are.
    """

    rows: tuple[SlotRow, ...]
    queries: Tensor
    keys: Tensor

    @property
    def rotary(self) -> Tensor:
        """Positions for the model's RoPE: `queries`, and 0 for pads, whose outputs nobody reads."""
        return _visible(self.queries)

    @property
    def alike(self) -> bool:
        """Whether keys are rotated as queries are: no canonical KV is computed in this step."""
        return bool(torch.equal(self.keys, self.rotary))


class PositionTable:
    """Positions of all requests that a runner knows; one belongs to each model runner.

    `slots` is the most slots that a request can have. With `unrotated`, no key is ever rotated at
    rest; otherwise only those of canonical blocks stay unrotated, the others have one position.
    """

    def __init__(self, slots: int, *, unrotated: bool = False) -> None:
        self._unrotated = unrotated
        every = torch.arange(slots, dtype=torch.int32)
        self._plain = SlotRow(every, affine=True, rotated=not unrotated)
        self._planned: dict[str, SlotRow] = {}

    def step(
        self,
        request_ids: Sequence[str],
        slot_maps: Mapping[str, SlotMap | None],
        computed: Sequence[int],
        scheduled: Sequence[int],
    ) -> StepPositions:
        """Positions of a step: request i computes slots [computed[i], computed[i] + scheduled[i]).

        `slot_maps` are those of all requests alive, by id; None for requests without a plan.
        """
        self._planned = {k: v for k, v in self._planned.items() if k in slot_maps}
        rows = [self._row(request_id, slot_maps[request_id]) for request_id in request_ids]
        spans = [slice(b, b + n) for b, n in zip(computed, scheduled, strict=True)]
        pairs = list(zip(rows, spans, strict=True))
        queries = torch.cat([row.positions[span] for row, span in pairs])
        keys = torch.cat([_key_positions(row, span) for row, span in pairs])
        return StepPositions(tuple(rows), queries, keys)

    def _row(self, request_id: str, slot_map: SlotMap | None) -> SlotRow:
        if slot_map is None:
            return self._plain
        if request_id not in self._planned:
            self._planned[request_id] = self._fill(slot_map)
        return self._planned[request_id]

    def _fill(self, slot_map: SlotMap) -> SlotRow:
        planned, slots, end = slot_map.positions(), len(self._plain.positions), slot_map.end
        generated = np.arange(end, end + slots - len(planned), dtype=np.int32)
        rotated = np.full(slots, not self._unrotated)
        rotated[: len(planned)] &= ~slot_map.canonical()
        return SlotRow(
            torch.from_numpy(np.concatenate([planned, generated])),
            affine=False,
            rotated=torch.from_numpy(rotated),
        )


def _key_positions(row: SlotRow, span: slice) -> Tensor:
    visible = _visible(row.positions[span])
    if isinstance(row.rotated, Tensor):
        return visible.where(row.rotated[span], 0)
    return visible if row.rotated else torch.zeros_like(visible)


def _visible(positions: Tensor) -> Tensor:
    return positions.long().where(positions < GAP, 0)
