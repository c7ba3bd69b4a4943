"""Logical positions of the requests in a batch, for RoPE and causality.

vLLM's runner counts physical positions (slots in compute order). `PositionTable` maps the same
slots to positions in the user's prompt, and to the positions that keys are cached at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.slot_map import Arrangement, Positions, SlotMap, arranged_tokens


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """The slots of one request, in compute order.

    `positions` [slots] int32 are logical positions (GAP: never visible); `affine` says that they
    are 0, 1, 2, .... `with_rope` says which keys are cached with RoPE: all, none, or a bool a slot.
    `arrangement` has the tokens of computed slots that the scheduler does not know.
    """

    positions: Tensor
    affine: bool
    with_rope: bool | Tensor
    arrangement: Arrangement | None = None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class StepPositions:
    """One engine step: the requests' slots in batch order, and the scheduled tokens.

    `queries` [tokens] int32 are the tokens' logical positions, `keys` [tokens] int64 the positions
    that their keys are rotated to before they are cached, 0 for keys cached without RoPE. Where the
    workers know better than the scheduler which tokens are computed, `tokens` has token ids and the
    place in the step of the first of them.
    """

    requests: tuple[RequestSlots, ...]
    queries: Tensor
    keys: Tensor
    tokens: tuple[tuple[int, Tensor], ...] = ()

    @property
    def rotary(self) -> Tensor:
        """Positions for the model's RoPE: `queries`, and 0 for pads, whose output is not used."""
        return _visible(self.queries)

    @property
    def keys_like_queries(self) -> bool:
        """Whether all keys are rotated like queries: the step computes no canonical KV."""
        return bool(torch.equal(self.keys, self.rotary))


class PositionTable:
    """Positions of all requests of one model runner.

    `slots` is the largest number of slots of a request. Canonical keys are cached without RoPE,
    the others with RoPE, as each of them has one position; or all without (`keys_without_rope`).
    With `plain_steps` a step of plain requests has no positions of its own, unless their keys are
    cached without RoPE.
    """

    def __init__(
        self, slots: int, *, keys_without_rope: bool = False, plain_steps: bool = False
    ) -> None:
        self._with_rope = not keys_without_rope
        self._plain_steps = plain_steps and self._with_rope
        every = torch.arange(slots, dtype=torch.int32)
        self._plain = RequestSlots(every, affine=True, with_rope=self._with_rope)
        self._planned: dict[str, RequestSlots] = {}

    def step(
        self,
        request_ids: Sequence[str],
        slot_maps: Mapping[str, SlotMap | None],
        computed: Sequence[int],
        scheduled: Sequence[int],
    ) -> StepPositions | None:
        """Positions of a step: request i computes slots [computed[i], computed[i] + scheduled[i]).

        `slot_maps` are those of all requests alive, by id; None for requests without a plan. None
        for one of `plain_steps`.
        """
        self._planned = {k: v for k, v in self._planned.items() if k in slot_maps}
        if self._plain_steps and not any(map(slot_maps.get, request_ids)):
            return None
        requests = [self._slots(request_id, slot_maps[request_id]) for request_id in request_ids]
        spans = [slice(b, b + n) for b, n in zip(computed, scheduled, strict=True)]
        pairs = list(zip(requests, spans, strict=True))
        queries = torch.cat([slots.positions[span] for slots, span in pairs])
        keys = torch.cat([_key_positions(slots, span) for slots, span in pairs])
        arranged = arranged_tokens((slots.arrangement for slots in requests), computed, scheduled)
        tokens = tuple((place, torch.from_numpy(ids)) for place, ids in arranged)
        return StepPositions(tuple(requests), queries, keys, tokens)

    def arrange(self, request_id: str, slot_map: SlotMap, arrangement: Arrangement) -> None:
        """Arrange a request anew, whose linked tokens were picked."""
        slots = self._expand(slot_map, arrangement.positions)
        self._planned[request_id] = replace(slots, arrangement=arrangement)

    def _slots(self, request_id: str, slot_map: SlotMap | None) -> RequestSlots:
        if slot_map is None:
            return self._plain
        if request_id not in self._planned:
            self._planned[request_id] = self._expand(slot_map, slot_map.positions())
        return self._planned[request_id]

    def _expand(self, slot_map: SlotMap, planned: Positions) -> RequestSlots:
        slots, end = len(self._plain.positions), slot_map.end
        generated = np.arange(end, end + slots - len(planned), dtype=np.int32)
        with_rope = np.full(slots, self._with_rope)
        with_rope[: len(planned)] &= ~slot_map.canonical()
        return RequestSlots(
            torch.from_numpy(np.concatenate([planned, generated])),
            affine=False,
            with_rope=torch.from_numpy(with_rope),
            temperature=slot_map.temperature,
        )


def _key_positions(slots: RequestSlots, span: slice) -> Tensor:
    visible = _visible(slots.positions[span])
    if isinstance(slots.with_rope, Tensor):
        return visible.where(slots.with_rope[span], 0)
    return visible if slots.with_rope else torch.zeros_like(visible)


def _visible(positions: Tensor) -> Tensor:
    return positions.long().where(positions < GAP, 0)
