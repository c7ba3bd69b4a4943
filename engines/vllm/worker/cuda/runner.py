"""vLLM's model runner V2 with planned requests.

Upstream: vllm/v1/worker/gpu/model_runner.py and cudagraph_utils.py of vLLM 0.32.0.
"""

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from picbench.engines.planning.pages import TokenIds
from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.worker.attention_layers import check_layers
from picbench.engines.vllm.worker.cuda.attention import RunnerAttention
from picbench.engines.vllm.worker.cuda.backend import SplitAttention, select_backend
from picbench.engines.vllm.worker.cuda.model_state import PicModelState, PlannedSampling
from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch
from picbench.errors import ConfigError


class PlannedGraphs(ModelCudaGraphManager):
    """CUDA graphs of decoding steps with planned requests.

    A graph holds the kernels of one kind of attention. vLLM's own graphs serve steps without
    planned requests; these hold both kinds of attention, once for steps in which each request reads
    its own blocks and once for those that read some together: kernels of groups without any group
    made a step 3 % longer (64 requests of 5k tokens, one H200). Graphs of what is between attention
    layers are vLLM's and serve all steps.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode, decode_query_len: int
    ) -> None:
        super().__init__(vllm_config, device, mode, decode_query_len)
        self._capture_descs.pop(CUDAGraphMode.PIECEWISE, None)


class PicModelRunner(GPUModelRunner):
    """Runs planned requests; steps without any are vLLM's own."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        for owner, name, parameters in UPSTREAM:
            check_signature(getattr(owner, name), parameters)
        super().__init__(vllm_config, device)
        # Planned prompts come as arrays; in a list each token would become an object, only to be
        # written into an array again (StagedWriteTensor in vllm/v1/worker/gpu/buffer_utils.py).
        staged: Any = self.req_states.all_token_ids
        staged._staged_write_contents = TokenIds()
        self._stock_graphs: ModelCudaGraphManager | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with picbench's attention and model state."""
        select_backend(self.vllm_config)
        super().load_model(*args, **kwargs)
        check_layers(self.compilation_config.static_forward_context, SplitAttention)
        if type(self.model_state) is not DefaultModelState:
            raise ConfigError(
                f"{type(self.model).__name__} keeps a state of its own",
                hint="picbench serves Llama-like models, with RoPE in every layer",
            )
        self.model_state = PicModelState(
            self.vllm_config, self.model, self.encoder_cache, self.device
        )
        assert self.sampler is not None
        processors = self.sampler.logits_processors
        processors.append(PlannedSampling.of(processors))

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Compile kernels, and set up a second set of graphs, for steps with planned requests."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if is_profiling:
            # Upstream lets go of these graphs to free what they hold before the pool is allocated.
            return
        self.attention.warm_up(self.model)
        # vLLM zeroes blocks of few caches; here it is those that chunks end inside of.
        self._init_kv_zero_meta()
        stock = self.cudagraph_manager
        assert stock is not None
        self._stock_graphs = stock
        self._planned_graphs, self._sharing_graphs = (
            PlannedGraphs(
                self.vllm_config, self.device, stock.cudagraph_mode, self.decode_query_len
            )
            for _ in range(2)
        )

    @property
    def attention(self) -> RunnerAttention:
        """What planned requests need."""
        return self._state.attention

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture all sets of graphs; returns their size in bytes."""
        # Where all keys are cached without RoPE, every request of upstream's warm-up is a planned
        # one, and its last step is still set.
        self._state.begin_step([], [], [])
        if profile_only:
            return int(super().capture_model(profile_only=True))
        self.cudagraph_manager = self._stock_graphs
        size = int(super().capture_model())
        if not self.attention.planner.graphs:
            return size
        sets = [(self._planned_graphs, False), (self._sharing_graphs, True)]
        try:
            for graphs, shares in sets[: 1 + self.attention.planner.shares]:
                self.cudagraph_manager = graphs
                with self._state.capturing_planned(shares=shares):
                    size += int(super().capture_model())
            return size
        finally:
            self.cudagraph_manager = self._stock_graphs

    def update_requests(self, scheduler_output: Any) -> None:
        """Start transfers before blocks are zeroed: they read what these held until now.

        Upstream zeroes blocks here, and has its connector start transfers right before the model
        runs. Of a block in which a chunk ends, what it held is often just being stored or copied.
        """
        if scheduler_output.new_block_ids_to_zero:
            _start_transfers(scheduler_output)
        super().update_requests(scheduler_output)

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Choose the set of graphs for a step.

        Upstream finds full graphs of decoding steps by the number of tokens that all requests have
        in common. A request that computes one token in the middle of its prompt must not see all
        keys and does not decode; without a common number upstream uses piecewise graphs.
        """
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        batch = self._begin_step(scheduler_output, state)
        graphs = self._stock_graphs
        if batch is not None:
            planned = self._sharing_graphs if batch.shares else self._planned_graphs
            # Upstream finds no graph at all in a set without full ones: it captures nothing of it.
            graphs = planned if planned.graphs else graphs
        self.cudagraph_manager = graphs
        if batch is not None and (graphs is self._stock_graphs or not batch.decodes):
            uniform = None
        return state, uniform

    def _begin_step(self, scheduler_output: Any, state: Any) -> PlannedBatch | None:
        if state is None:
            return self._state.begin_step([], [], [])
        computed = self.req_states.num_computed_tokens_np[state.idx_mapping_np].tolist()
        if unpicked := self._state.pickable(state.req_ids, computed):
            _start_transfers(scheduler_output)
            self._state.pick(unpicked)
        return self._state.begin_step(state.req_ids, computed, state.num_scheduled_tokens)

    @property
    def _state(self) -> PicModelState:
        state = self.model_state
        assert isinstance(state, PicModelState)
        return state


def _start_transfers(scheduler_output: Any) -> None:
    """Have the connector start a step's transfers now; upstream's own call then starts none."""
    get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)


#: What is extended here, and with which parameters.
UPSTREAM: tuple[tuple[type, str, str], ...] = (
    (GPUModelRunner, "update_requests", "self, scheduler_output"),
    (GPUModelRunner, "gather_batch_req_state", "self, scheduler_output, dummy_run"),
    (GPUModelRunner, "capture_model", "self, profile_only"),
    (GPUModelRunner, "_init_kv_zero_meta", "self"),
    (
        GPUModelRunner,
        "initialize_kv_cache",
        "self, kv_cache_config, is_profiling, kv_cache_allocation_context",
    ),
    (Sampler, "add_request", "self, req_idx, sampling_params"),
    (Sampler, "apply_staged_writes", "self"),
    (PenaltiesState, "apply_staged_writes", "self"),
    (LogitBiasState, "add_request", "self, req_idx, sampling_params"),
    (DefaultModelState, "add_request", "self, req_index, new_req_data"),
    (DefaultModelState, "remove_request", "self, req_id"),
    (DefaultModelState, "prepare_inputs", "self, input_batch, req_states"),
    (
        DefaultModelState,
        "prepare_attn",
        "self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, "
        "kv_cache_config, for_capture, ubatch_idx, model_specific_attn_metadata",
    ),
)
