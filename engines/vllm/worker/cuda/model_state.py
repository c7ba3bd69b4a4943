"""The state that picbench adds to vLLM's model runner V2: planned requests and their positions.

Upstream: model_states/default.py, and penalties.py, logit_bias.py and sampler.py of sample, all in
vllm/v1/worker/gpu of vLLM 0.32.0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from picbench.engines.vllm.worker.cuda.attention import RunnerAttention
from picbench.engines.vllm.worker.cuda.backend import SplittingBuilder
from picbench.engines.vllm.worker.cuda.metadata import PlannedStep, Planner
from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch
from picbench.engines.vllm.worker.slot_map import SlotMap
from picbench.engines.vllm.worker.token_picker import pickable
from picbench.errors import EngineError
from picbench.kernels.cuda.device import overwrite


class PicModelState(DefaultModelState):
    """Gives the model and the attention backend logical instead of physical positions.

    Upstream gathers tokens and slots by physical positions, as it must. Later readers of positions
    (RoPE, the sampler's seeds) need logical ones, which are written to the same address, so that
    CUDA graphs read them too.
    """

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.attention = RunnerAttention.of(vllm_config, model, device)
        self._batch: PlannedBatch | None = None
        self._prompts: dict[str, tuple[list[int], list[int]]] = {}
        # Whether graphs are captured, and if so, for steps that share what they read.
        self._capturing: bool | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Add a new or resumed request."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        if params is not None:
            prompt, blocks = len(new_req_data.prefill_token_ids), new_req_data.block_ids[0]
            self.attention.requests.add(new_req_data.req_id, params, prompt, blocks)
            if new_req_data.req_id in self.attention.requests.slot_maps:
                # The blocks of its prompt's copied slots are among the first that it has.
                found = new_req_data.prefill_token_ids, blocks
                self._prompts[new_req_data.req_id] = found

    def remove_request(self, req_id: str) -> None:
        """Remove a finished or preempted request."""
        super().remove_request(req_id)
        self.attention.requests.remove(req_id)
        self._prompts.pop(req_id, None)

    def pickable(self, request_ids: Sequence[str], computed: Sequence[int]) -> dict[str, SlotMap]:
        """The requests of the next step whose linked tokens have to be picked before it."""
        return pickable(request_ids, self.attention.requests.slot_maps, computed)

    def pick(self, slot_maps: Mapping[str, SlotMap]) -> None:
        """Pick their linked tokens; the blocks that they copy must be filled."""
        self.attention.pick(slot_maps, self._prompts.__getitem__)

    def begin_step(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> PlannedBatch | None:
        """Set the requests of the next step, none for a dummy one; None if none of them is planned.

        Request i computes `scheduled[i]` tokens after its `computed[i]` slots.
        """
        self._batch = self.attention.requests.batch(request_ids, computed, scheduled)
        return self._batch

    @contextmanager
    def capturing_planned(self, *, shares: bool = False) -> Iterator[None]:
        """Capture graphs for steps in which all requests are planned (`PlannedBatch.shares`)."""
        self._capturing = shares
        try:
            yield
        finally:
            self._capturing, self._batch = None, None

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
        """Build attention metadata for the planned requests and the others."""
        if self._capturing is not None:
            self._batch = PlannedBatch.dummy(input_batch.num_reqs, shares=self._capturing)
        set_step(self._batch, self.attention.planner, attn_groups)
        return super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Tensor | None]:
        """Write the logical positions of a step with planned requests, and tokens that it knows."""
        if self._batch is not None:
            write_step(self._batch, input_batch.positions, input_batch.input_ids)
        return super().prepare_inputs(input_batch, req_states)


def set_step(
    batch: PlannedBatch | None, planner: Planner, attn_groups: Iterable[Iterable[Any]]
) -> None:
    """Give metadata builders the next step's requests. Raises EngineError for others' builders."""
    step = None if batch is None else PlannedStep(batch, planner)
    for builder in (
        b for groups in attn_groups for group in groups for b in group.metadata_builders
    ):
        if not isinstance(builder, SplittingBuilder):
            raise EngineError("an attention layer does not use picbench's backend")
        builder.step = step


def write_step(batch: PlannedBatch, positions: Tensor, input_ids: Tensor) -> None:
    """Write a step's logical positions and picked tokens over the first of both [>= tokens]."""
    logical = batch.positions()
    overwrite(positions[: len(logical)], logical)
    for start, tokens in batch.tokens():
        overwrite(input_ids[start : start + len(tokens)], tokens)


class PlannedSampling(LogitsProcessor):
    """Corrects the states of vLLM's own logits processors; changes no logits itself.

    It comes after them, so that its corrections of a request do, too. Upstream compares the
    position of a token, which is logical for planned requests, with the length of the prompt, of
    which it knows the slots: `min_tokens` would hold back the end of a reply for too long.
    """

    def __init__(self, penalties: PenaltiesState, biases: LogitBiasState) -> None:
        self._penalties = penalties
        self._biases = biases
        self._dropped: list[tuple[int, int]] = []

    @classmethod
    def of(cls, processors: Sequence[Any]) -> Self:
        """For the processors of vLLM's sampler. Raises EngineError if one is missing."""
        penalties = [p for p in processors if isinstance(p, PenaltiesState)]
        biases = [p for p in processors if isinstance(p, LogitBiasState)]
        if len(penalties) != 1 or len(biases) != 1:
            raise EngineError("vLLM's sampler has other logits processors than expected")
        return cls(penalties[0], biases[0])

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Correct a new or resumed request's state; False, as its logits stay as they are."""
        slot_map = SlotMap.sent(sampling_params)
        if slot_map is not None:
            self._biases.min_lens.np[req_idx] = slot_map.end + sampling_params.min_tokens
            if self._penalties.use_penalty[req_idx]:
                self._dropped += [(req_idx, token) for token in slot_map.foreign]
        return False

    def apply_staged_writes(self) -> None:
        """Drop foreign tokens from the prompts that upstream has just counted."""
        for row, token in self._dropped:
            drop_bit(self._penalties.prompt_bin_mask[row], token)
        self._dropped.clear()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Change nothing."""
        return logits


def drop_bit(words: Tensor, bit: int) -> None:
    """Clear one bit of a mask [words] int32, 32 bits a word."""
    word, place = divmod(bit, 32)
    keep = torch.iinfo(torch.int32).max if place == 31 else ~(1 << place)
    words[word].bitwise_and_(keep)
