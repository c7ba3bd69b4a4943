"""vLLM's model runner V1 with planned requests: for engines that cannot run V2.

Upstream: vllm/v1/worker/gpu_model_runner.py of vLLM 0.32.0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.worker.attention_layers import check_layers
from picbench.engines.vllm.worker.cuda.attention import RunnerAttention
from picbench.engines.vllm.worker.cuda.backend import SplitAttention, select_backend
from picbench.engines.vllm.worker.cuda.model_state import set_step, write_step
from picbench.engines.vllm.worker.slot_map import drop_foreign_tokens
from picbench.engines.vllm.worker.token_picker import pickable


class PicModelRunnerV1(GPUModelRunner):
    """Gives the model and the attention backend logical instead of physical positions."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_signature(
            GPUModelRunner._prepare_inputs, "self, scheduler_output, num_scheduled_tokens"
        )
        check_signature(
            GPUModelRunner.initialize_kv_cache,
            "self, kv_cache_config, is_profiling, kv_cache_allocation_context",
        )
        check_signature(GPUModelRunner._update_states, "self, scheduler_output")
        check_signature(GPUModelRunner._init_kv_zero_meta, "self")
        check_signature(GPUModelRunner.load_model, "self, load_dummy_weights, model")
        check_signature(GPUModelRunner._sample, "self, logits, spec_decode_metadata")
        super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with picbench's attention."""
        select_backend(self.vllm_config)
        super().load_model(*args, **kwargs)
        check_layers(self.compilation_config.static_forward_context, SplitAttention)
        self.attention = RunnerAttention.of(self.vllm_config, self.model, self.device)
        self._seen: set[str] = set()

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Compile what steps with planned requests need, for the layout of the cache."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if not is_profiling:
            self.attention.warm_up(self.get_model())
            self._init_kv_zero_meta()
            self._zero_block_ids([0])

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        count = self.input_batch.num_reqs
        request_ids = self.input_batch.req_ids[:count]
        self._update_requests(request_ids)
        computed = self.input_batch.num_computed_tokens_cpu[:count].tolist()
        planned = self.attention.requests
        self.attention.pick(pickable(request_ids, planned.slot_maps, computed), self._prompt)
        batch = planned.batch(request_ids, computed, num_scheduled_tokens[:count].tolist())
        set_step(batch, self.attention.planner, self.attn_groups)
        if batch is not None:
            write_step(batch, self.positions, self.input_ids.gpu)
        return inputs

    def _prompt(self, request_id: str) -> tuple[list[int], list[int]]:
        request = self.requests[request_id]
        return request.prompt_token_ids or [], request.block_ids[0]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        drop_foreign_tokens(self.input_batch, self.requests)
        return super()._sample(logits, spec_decode_metadata)

    def _update_states(self, scheduler_output: Any) -> Any:
        # Upstream goes on to know preempted requests. With those that run in their place they may
        # be more than the request table has rows.
        for request_id in scheduler_output.preempted_req_ids or ():
            self.attention.requests.remove(request_id)
            self._seen.discard(request_id)
        return super()._update_states(scheduler_output)

    def _update_requests(self, scheduled: Sequence[str]) -> None:
        """Add new and resumed requests, and remove finished ones."""
        planned = self.attention.requests
        for request_id in self._seen - self.requests.keys():
            planned.remove(request_id)
        self._seen &= self.requests.keys()
        for request_id in scheduled:
            if request_id in self._seen:
                continue
            self._seen.add(request_id)
            request = self.requests[request_id]
            if request.sampling_params is not None:
                # Its blocks are not told: requests read blocks together in V2 only.
                planned.add(request_id, request.sampling_params, request.num_prompt_tokens)
