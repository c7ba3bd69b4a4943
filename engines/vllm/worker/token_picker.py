"""Picks the linked tokens of requests: by deviation, or by what the question attends to.

By deviation is CacheBlend's selection (arXiv 2405.16444, section 4.3), with the fine print of the
paper's code (YaoJiayi/CacheBlend, vllm_blend): the squared difference of the values of the second
layer, the check layer, summed over heads and dimensions, or of its keys, as in LMCache's blender.
Keys and values of the first two layers are replaced by those of the prompt for all tokens; both are
known by then. What both codes get wrong does not arise: positions are logical, tables of scaled
RoPE are the model's own, rows see what precedes them, and text before, between and after chunks is
always computed.

By the question, tokens of chunks are ranked by their share of its attention (`QuestionAttention`),
or their blocks by its mean, and tokens are linked in that order; nothing in the cache is changed.
Chunks' attention sinks do not count for blocks: any question attends to them.

A request is picked for when it computes its first tokens, after its copies were made, and again if
it lost its blocks. Each is picked for alone, so that its batch makes no difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.kv_transfer import get_kv_transfer_group

from picbench.engines.planning.policy import Deviation
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.worker.model_pass import (
    CachedTokens,
    FirstLayers,
    LayerKv,
    ModelPass,
    QuestionAttention,
    ReadKv,
)
from picbench.engines.vllm.worker.slot_map import Arrangement, Pickable, SlotMap
from picbench.kernels.paging import BLOCK_SIZE, flat_slots
from picbench.kernels.rope import RopeTable, rotate

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
        self,
        first_layers: FirstLayers,
        question: QuestionAttention,
        read: ReadKv,
        rope: RopeTable,
        *,
        bare: bool,
    ) -> None:
        self._first_layers = first_layers
        self._question = question
        self._read = read
        self._rope = rope
        self._bare = bare
        self.noted: dict[str, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, model_pass: ModelPass, read: ReadKv) -> Self:
        """A picker that runs `model_pass`."""
        question = QuestionAttention(model_pass, read)
        rope, bare = model_pass.rope, model_pass.bare
        return cls(FirstLayers(model_pass), question, read, rope, bare=bare)

    def pick(
        self, slot_maps: Mapping[str, SlotMap], find: FindPrompt
    ) -> Iterator[tuple[str, Arrangement]]:
        """Pick for the requests with these slot maps, which compute their first tokens now.

        One for which that fails is ended by the scheduler.
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
        """Indices of the tokens to link, ascending."""
        count = pickable.picks.count
        if count == len(pickable.slots):
            return np.arange(count)  # Nothing else is visible: there is nothing to choose.
        device = self._first_layers.attentions[0].kv_cache.device

        def send(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device).long()

        table = torch.tensor(blocks, device=device)
        cached = CachedTokens(
            flat_slots(table, send(pickable.slots)),
            send(pickable.positions[pickable.slots]),
            send(pickable.cached_at[pickable.slots]),
        )
        deviation = pickable.picks.deviation
        if deviation is None:
            computed = pickable.computed
            tokens = send(pickable.prompt[computed])
            attended = self._question.run(tokens, send(computed), cached, pickable.stop)
            # Every rank has some of the heads.
            scores = tensor_model_parallel_all_reduce(attended)
            if not pickable.picks.single:
                # A chunk that was compiled alone has its attention sink at its start.
                counted = (cached.cached_at > 0).float()
                scores = _block_means(scores, counted, send(pickable.slots // BLOCK_SIZE))
        else:
            prompt = send(pickable.prompt[: pickable.stop])
            found = self._replace_first_layers(prompt, cached, deviation)
            scores = tensor_model_parallel_all_reduce(found)
        # Of equal scores the first counts as the largest.
        order = scores.sort(descending=True, stable=True).indices
        picked: NDArray[np.int64] = order[:count].sort().values.cpu().numpy()
        return picked

    def _replace_first_layers(
        self, prompt: Tensor, cached: CachedTokens, deviation: Deviation
    ) -> Tensor:
        """Write the first layers' KV of `prompt` [tokens] for cached ones; deviations [cached]."""
        attentions = self._first_layers.attentions
        fresh = [self._as_cached(kv, cached) for kv in self._first_layers.run(prompt)]
        before = LayerKv(*self._read(attentions[1].kv_cache, cached.slots))
        # Keys are rotated alike in both.
        kind = "keys" if deviation is Deviation.KEYS else "values"
        pair = (getattr(kv, kind).float() for kv in (fresh[1], before))
        found = torch.sub(*pair).square().sum(dim=(1, 2))
        for attention, kv in zip(attentions, fresh, strict=True):
            attention.impl.do_kv_cache_update(
                attention, kv.keys, kv.values, attention.kv_cache, cached.slots
            )
        return found

    def _as_cached(self, kv: LayerKv, cached: CachedTokens) -> LayerKv:
        """The KV of cached tokens in that of a prompt, with keys as they are cached for chunks."""
        keys, values = kv.keys[cached.positions], kv.values[cached.positions]
        if not self._bare:
            rows = self._rope.shift_rows(cached.cached_at - cached.positions)
            keys = rotate(keys, rows, is_neox=self._rope.is_neox)
        return LayerKv(keys, values)


def pickable(
    request_ids: Sequence[str], slot_maps: Mapping[str, SlotMap | None], computed: Sequence[int]
) -> dict[str, SlotMap]:
    """Slot maps of a step's requests whose linked tokens have to be picked before it.

    Request i has `computed[i]` slots. `slot_maps` may leave out requests without a plan.
    """
    found: dict[str, SlotMap] = {}
    for request_id, slots in zip(request_ids, computed, strict=True):
        slot_map = slot_maps.get(request_id)
        if slot_map is not None and slot_map.picks and slot_map.first_computed == slots:
            found[request_id] = slot_map
    return found


def _block_means(attended: Tensor, counted: Tensor, blocks: Tensor) -> Tensor:
    """For each token [n] the mean of what those of its block have that are `counted` (0 or 1).

    `blocks` [n] are numbers.
    """
    size = int(blocks.max()) + 1
    sums = attended.new_zeros(size).index_add(0, blocks, attended * counted)
    return (sums / blocks.bincount(counted, minlength=size).clamp(min=1))[blocks]


def note_picks(worker: Any) -> None:
    """Begin to note which tokens a worker picks, or begin again. For `collective_rpc`."""
    _picker_of(worker).noted = {}


def noted_picks(worker: Any) -> list[tuple[int, ...]]:
    """Logical positions of the tokens picked since `note_picks`, request by request."""
    return list((_picker_of(worker).noted or {}).values())


def _picker_of(worker: Any) -> TokenPicker:
    runner = worker.model_runner
    picker: TokenPicker = getattr(runner, "attention", runner).picker
    return picker
