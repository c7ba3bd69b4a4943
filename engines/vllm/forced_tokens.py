"""Replies that requests bring with them, where vLLM does not replay traces itself.

Model runner V2 does (vllm/v1/worker/gpu/sample/trace_replay.py). V1, which serves CPUs, takes
log-probabilities before logits processors change anything (vllm/v1/sample/sampler.py, `forward`),
so that those of forced tokens are the model's own.
"""

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from picbench.engines.vllm.settings import REPLY


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves one token to be sampled at each step: the next one of the request's reply."""

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], Tensor], Tensor] | None:
        """What changes a request's logits, given the tokens so far; None without a reply."""
        reply: list[int] | None = (params.extra_args or {}).get(REPLY)
        if reply is None:
            return None

        def force(output: list[int], logits: Tensor) -> Tensor:
            token = reply[len(output)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force
