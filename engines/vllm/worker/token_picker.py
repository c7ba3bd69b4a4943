"""Picks the linked tokens of requests: those whose KV deviates most from the canonical KV.

This is CacheBlend's selection (arXiv 2405.16444, section 4.3), with the fine print of the paper's
code (YaoJiayi/CacheBlend, vllm_blend): the squared difference of the values of the second layer,
the check layer, summed over heads and dimensions, or of its keys, as in LMCache's blender. Keys and
values of the first two layers are replaced by those of the prompt for all tokens; both are known by
then. What both codes get wrong does not arise: positions are logical, tables of scaled RoPE are the
model's own, rows see what precedes them, and text before, between and after chunks is always
computed.

A request is picked for when it computes its first tokens, after its copies were made, and again if
it lost its blocks. Each is picked for alone, so that its batch makes no difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.kv_transfer import get_kv_transfer_group

from picbench.engines.planning.policy import Deviation
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.worker.arrangement import Arrangement, Pickable
from picbench.engines.vllm.worker.first_layers import FirstLayers, LayerKv
from picbench.engines.vllm.worker.slot_map import SlotMap
from picbench.kernels.paging import flat_slots
from picbench.kernels.rope import RopeTable, rotate

#: (KV cache of a layer, flat slots [n]) -> keys and values there, both [n, kv_heads, head_size].
ReadKv = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

#: Request id -> its token ids in compute order, and its blocks.
FindPrompt = Callable[[str], tuple[Sequence[int], Sequence[int]]]


class TokenPicker:
    """Picks for the requests of one model runner.

    `read` reads the cache on the runner's device. `bare` says that canonical keys are cached
    without RoPE, and computed so by `first_layers`; otherwise they are cached where they were
    compiled. `noted`, if it is not None, collects the logical positions of what was picked, by
    request.
    """

    def __init__(
        self, first_layers: FirstLayers, read: ReadKv, rope: RopeTable, *, bare: bool
    ) -> None:
        self._first_layers = first_layers
        self._read = read
        self._rope = rope
        self._bare = bare
        self.noted: dict[str, tuple[int, ...]] | None = None

    def pick(
        self, slot_maps: Mapping[str, SlotMap], find: FindPrompt
    ) -> Iterator[tuple[str, Arrangement]]:
        """Pick for the requests with these slot maps, which compute their first tokens now.

        A request for which that fails is ended by the scheduler; what it computes until then is of
        no use.
        """
        for request_id, slot_map in slot_maps.items():
            connector: Any = get_kv_transfer_group()
            faults: Faults = connector.tier_client.faults
            call = partial(self._arrange, request_id, slot_map, find)
            arrangement = faults.attempt("pick tokens", request_id, call, None)
            if arrangement is not None:
                yield request_id, arrangement

    def _arrange(self, request_id: str, slot_map: SlotMap, find: FindPrompt) -> Arrangement:
        tokens, blocks = find(request_id)
        pickable = Pickable.of(slot_map, tokens)
        picked = self._picked(pickable, blocks)
        if self.noted is not None:
            positions = pickable.positions[pickable.slots[picked]]
            self.noted[request_id] = tuple(positions.tolist())
        return pickable.arrange(picked)

    def _picked(self, pickable: Pickable, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Indices of the tokens to link, ascending; replaces the KV of the first layers."""
        count = pickable.picks.count
        if count == len(pickable.slots):
            return np.arange(count)  # Nothing else is visible: there is nothing to replace.
        attentions = self._first_layers.attentions
        device = attentions[0].kv_cache.device
        prompt = torch.from_numpy(pickable.prompt[: pickable.stop]).to(device)
        positions = torch.from_numpy(pickable.positions[pickable.slots]).to(device)
        cached_at = torch.from_numpy(pickable.cached_at[pickable.slots]).to(device)
        table = torch.tensor(blocks, device=device)
        slots = flat_slots(table, torch.from_numpy(pickable.slots).to(device))
        fresh = [
            self._as_cached(kv, positions.long(), cached_at.long())
            for kv in self._first_layers.run(prompt)
        ]
        before = LayerKv(*self._read(attentions[1].kv_cache, slots))
        deviation = _deviation(fresh[1], before, pickable.picks.deviation)
        for attention, kv in zip(attentions, fresh, strict=True):
            attention.impl.do_kv_cache_update(
                attention, kv.keys, kv.values, attention.kv_cache, slots
            )
        # Every rank has some of the heads. Of equal deviations the first counts as the largest.
        deviation = tensor_model_parallel_all_reduce(deviation)
        order = deviation.sort(descending=True, stable=True).indices
        found: NDArray[np.int64] = order[:count].sort().values.cpu().numpy()
        return found

    def _as_cached(self, kv: LayerKv, positions: Tensor, cached_at: Tensor) -> LayerKv:
        """The KV of the tokens at `positions` [n], with keys as they are cached for chunks."""
        keys, values = kv.keys[positions], kv.values[positions]
        if not self._bare:
            rows = self._rope.shift_rows(cached_at - positions)
            keys = rotate(keys, rows, is_neox=self._rope.is_neox)
        return LayerKv(keys, values)


def pickable(
    request_ids: Sequence[str], slot_maps: Mapping[str, SlotMap | None], computed: Sequence[int]
) -> dict[str, SlotMap]:
    """The requests of a step whose linked tokens have to be picked before it, and their slot maps.

    Request i computes tokens after its `computed[i]` slots. `slot_maps` may leave out requests
    without a plan.
    """
    found: dict[str, SlotMap] = {}
    for request_id, slots in zip(request_ids, computed, strict=True):
        slot_map = slot_maps.get(request_id)
        if slot_map is not None and slot_map.picks and slot_map.first_computed == slots:
            found[request_id] = slot_map
    return found


def _deviation(fresh: LayerKv, before: LayerKv, of: Deviation) -> Tensor:
    """Squared differences by token [n], in float32; keys are rotated alike in both."""
    pair = (fresh.keys, before.keys) if of is Deviation.KEYS else (fresh.values, before.values)
    return (pair[0].float() - pair[1].float()).square().sum(dim=(1, 2))


def note_picks(worker: Any) -> None:
    """Begin to note which tokens a worker picks, or begin again.

    A function for `collective_rpc`, which calls it with each worker, where that is.
    """
    worker.model_runner.token_picker.noted = {}


def noted_picks(worker: Any) -> list[tuple[int, ...]]:
    """Logical positions of the tokens picked since `note_picks`, request by request."""
    return list((worker.model_runner.token_picker.noted or {}).values())
