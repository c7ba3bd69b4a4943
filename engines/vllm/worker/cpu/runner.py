"""vLLM's CPU model runner (V1) with logical positions.

Upstream: vllm/v1/worker/gpu_model_runner.py and cpu_model_runner.py of vLLM 0.32.0.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.transfer.worker_mixin import ConnectorScope
from picbench.engines.vllm.worker.attention_layers import check_layers, head_shape
from picbench.engines.vllm.worker.cpu.backend import (
    PicAttention,
    PicMetadataBuilder,
    backend_selected,
)
from picbench.engines.vllm.worker.cpu.slot_positions import PositionTable, StepPositions
from picbench.engines.vllm.worker.key_check import TOLERANCE as ROTARY
from picbench.engines.vllm.worker.key_check import check_keys, rotary_error
from picbench.engines.vllm.worker.model_pass import ModelPass
from picbench.engines.vllm.worker.rotary import (
    KeyPositions,
    SplitRotary,
    replace_rotary,
    rope_table,
)
from picbench.engines.vllm.worker.slot_map import SlotMap, drop_foreign_tokens
from picbench.engines.vllm.worker.token_picker import TokenPicker, pickable
from picbench.errors import EngineError
from picbench.kernels.cpu.attention_check import TOLERANCE as ATTENTION
from picbench.kernels.cpu.attention_check import attention_error
from picbench.kernels.cpu.copies import KvCopies
from picbench.kernels.cpu.vllm_ops import covers_shape
from picbench.kernels.paging import BLOCK_SIZE, split

#: Copies of decoding requests' KV have at most one block to so many of the pool.
COPIES = 2


class PicModelRunner(CPUModelRunner):
    """Gives the model and the attention backend logical instead of physical positions."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_signature(
            GPUModelRunner._prepare_inputs, "self, scheduler_output, num_scheduled_tokens"
        )
        check_signature(CPUModelRunner.load_model, "self, load_dummy_weights")
        check_signature(GPUModelRunner._sample, "self, logits, spec_decode_metadata")
        check_signature(GPUModelRunner._bookkeeping_sync, _BOOKKEEPING)
        super().__init__(vllm_config, device)
        settings = PicSettings.read(vllm_config.additional_config) or PicSettings()
        slots = self.max_model_len + 1
        self._table = PositionTable(
            slots,
            keys_without_rope=settings.keys_without_rope,
            plain_steps=covers_shape(head_shape(vllm_config)),
        )
        self._temperatures = settings.temperatures_served
        self._keys = KeyPositions()
        self._kept: dict[int, torch.Generator] = {}

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model with picbench's attention, and key positions of their own."""
        with backend_selected():
            super().load_model(load_dummy_weights)
        check_layers(self.compilation_config.static_forward_context, PicAttention)
        config: Any = self.model_config
        exact = rope_table(self.model, exact=True)
        check_keys(self.model, exact, config.get_hidden_size(), config.dtype)
        rope = replace_rotary(self.model, partial(SplitRotary, keys=self._keys))
        size = head_shape(self.vllm_config).head_size
        self._rope = rope.tempered(self._temperatures, size)
        model_pass = ModelPass(
            self.model, self.vllm_config, self._rope, bare=True, key_positions=self._keys
        )
        self.picker = TokenPicker.of(model_pass, _read)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        # Upstream gathers token ids and slots by physical positions, as it must. Later readers of
        # positions (RoPE, attention) need logical ones.
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        step = self._step(num_scheduled_tokens)
        if step is not None:
            self.positions[: len(step.queries)] = step.rotary
            for start, tokens in step.tokens:
                self.input_ids.gpu[start : start + len(tokens)] = tokens
        self._keys.step = None if step is None or step.keys_like_queries else step.keys
        for builder in self._builders():
            builder.step, builder.rope = step, self._rope
            if builder.copies is None:
                builder.copies = KvCopies(self.kv_cache_config.num_blocks // COPIES)
        return inputs

    def _step(self, num_scheduled_tokens: np.ndarray) -> StepPositions | None:
        batch = self.input_batch
        count = batch.num_reqs
        request_ids = batch.req_ids[:count]
        slot_maps = {key: SlotMap.sent(r.sampling_params) for key, r in self.requests.items()}
        computed = batch.num_computed_tokens_cpu[:count].tolist()
        unpicked = pickable(request_ids, slot_maps, computed)
        for request_id, arrangement in self.picker.pick(unpicked, self._prompt):
            self._table.arrange(request_id, unpicked[request_id], arrangement)
        return self._table.step(
            request_ids, slot_maps, computed, num_scheduled_tokens[:count].tolist()
        )

    def _prompt(self, request_id: str) -> tuple[list[int], list[int]]:
        request = self.requests[request_id]
        return request.prompt_token_ids or [], request.block_ids[0]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        # Layers have nothing to transfer: 6 us of each to ask is 0.5 % of a small model's token.
        with ConnectorScope().active():
            return super()._model_forward(*args, **kwargs)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        # What is sampled in the middle of a prompt is thrown away. Upstream then winds the
        # request's generator back by its offset, which generators on a CPU do not have
        # (RuntimeError in `_bookkeeping_sync`), so these requests sample without theirs.
        generators = self.input_batch.generators
        middle = self.discard_request_mask.np
        self._kept = {row: generators.pop(row) for row in list(generators) if middle[row]}
        drop_foreign_tokens(self.input_batch, self.requests)
        return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        results = super()._bookkeeping_sync(*args, **kwargs)
        self.input_batch.generators.update(self._kept)
        return results

    def self_check(self) -> list[tuple[str, float, float]]:
        """Errors of rotations and attention: name, relative error, largest that passes."""
        config: Any = self.model_config
        impl, dtype = self._attention(), config.dtype
        shape = head_shape(self.vllm_config)
        rotary = rotary_error(self.model, self._rope, impl.head_size, dtype)
        attention = attention_error(impl.attend, shape, self._rope, impl.scale)
        return [
            ("rotary table", rotary, ROTARY[dtype]),
            ("attention kernels", attention, ATTENTION[dtype]),
        ]

    @property
    def workspace_bytes(self) -> int:
        """Memory that attention holds beside the KV cache."""
        return sum(builder.nbytes for builder in self._builders())

    def _attention(self) -> PicAttention:
        """Attention of the first layer."""
        layers = self.compilation_config.static_forward_context.values()
        return next(i for layer in layers if isinstance(i := layer.impl, PicAttention))

    def _builders(self) -> list[PicMetadataBuilder]:
        found = [b for group in self._attn_group_iterator() for b in group.metadata_builders]
        ours = [builder for builder in found if isinstance(builder, PicMetadataBuilder)]
        if len(ours) != len(found):
            raise EngineError("an attention layer does not use picbench's backend")
        return ours


def _read(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = split(kv_cache)
    where = slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE
    return keys[where], values[where]


_BOOKKEEPING = "self, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens"
