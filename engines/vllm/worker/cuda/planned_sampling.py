"""What the sampler of vLLM's model runner V2 knows of planned requests.

Upstream: penalties.py, logit_bias.py and sampler.py of vllm/v1/worker/gpu/sample, vLLM 0.32.0.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from picbench.engines.vllm.worker.slot_map import SlotMap
from picbench.errors import EngineError


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
