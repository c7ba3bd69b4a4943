"""What picbench keeps beside vLLM's model runner V2: planned requests and their positions.

Upstream: vllm/v1/worker/gpu/model_states/default.py of vLLM 0.32.0.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from picbench.engines.vllm.worker.cuda.attention import Attention
from picbench.engines.vllm.worker.cuda.backend import SplittingBuilder
from picbench.engines.vllm.worker.cuda.metadata import PlannedStep, Planner
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedBatch
from picbench.engines.vllm.worker.cuda.upload import upload
from picbench.errors import EngineError


class PicModelState(DefaultModelState):
    """Gives the model and the attention backend logical instead of physical positions.

    Upstream gathers tokens and slots by physical positions, as it must. What reads positions after
    that (RoPE, the sampler's seeds) gets logical ones, written over the physical ones at the same
    address, so that CUDA graphs see them.
    """

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._attention = Attention.of(vllm_config, model, device)
        self._batch: PlannedBatch | None = None
        self._capturing = False

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Take a new or resumed request on."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        if params is not None:
            prompt = len(new_req_data.prefill_token_ids)
            self._attention.requests.add(new_req_data.req_id, params, prompt)

    def remove_request(self, req_id: str) -> None:
        """Forget a finished or preempted request."""
        super().remove_request(req_id)
        self._attention.requests.remove(req_id)

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs may hold the attention of planned requests."""
        return self._attention.planner.graphs

    def expect(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> PlannedBatch | None:
        """Take note of the step that comes; None if nobody in it follows a plan.

        Request i computes `scheduled[i]` tokens behind its `computed[i]` slots. A dummy step has no
        requests.
        """
        self._batch = self._attention.requests.batch(request_ids, computed, scheduled)
        return self._batch

    @contextmanager
    def planned_decoding(self) -> Iterator[None]:
        """Graphs captured inside are for steps in which requests follow plans."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing, self._batch = False, None

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Tell the metadata builders who follows a plan, and have them build."""
        if self._capturing:
            self._batch = PlannedBatch.dummy(input_batch.num_reqs)
        announce(self._batch, self._attention.planner, attn_groups)
        return super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Tensor | None]:
        """Write the logical positions of a step with planned requests."""
        if self._batch is not None:
            overwrite(input_batch.positions, self._batch.positions())
        return super().prepare_inputs(input_batch, req_states)


def announce(
    batch: PlannedBatch | None, planner: Planner, attn_groups: Iterable[Iterable[Any]]
) -> None:
    """Tell the metadata builders of all layers who follows a plan in the step that comes.

    Raises EngineError if a builder is not picbench's.
    """
    step = None if batch is None else PlannedStep(batch, planner)
    for builder in (
        b for groups in attn_groups for group in groups for b in group.metadata_builders
    ):
        if not isinstance(builder, SplittingBuilder):
            raise EngineError("an attention layer does not use picbench's backend")
        builder.step = step


def overwrite(positions: Tensor, logical: np.ndarray[Any, Any]) -> None:
    """Put `logical` [tokens] in place of `positions` [>= tokens], padding stays."""
    positions[: len(logical)] = upload(torch.from_numpy(logical), positions.device)
