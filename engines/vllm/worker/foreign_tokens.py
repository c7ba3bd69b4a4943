"""Penalties of planned requests count the tokens that the user sent, not those of visible pads.

vLLM penalizes each token of a prompt once, so that linked tokens, which have two slots, and hidden
pads, which repeat a token of the prompt, make no difference.

Upstream: vllm/v1/worker/gpu_input_batch.py of vLLM 0.32.0, for model runner V1.
"""

from collections.abc import Mapping
from typing import Any

from picbench.engines.vllm.worker.slot_map import SlotMap


def drop_foreign_tokens(batch: Any, requests: Mapping[str, Any]) -> None:
    """Take the tokens that users did not send out of the prompts that penalties count.

    `batch` is the runner's `InputBatch`, whose prompts [requests, longest] are filled up with
    `vocab_size`; None if no request of the batch has a penalty. `requests` are the runner's, by id.
    """
    prompts = batch.sampling_metadata.prompt_token_ids
    if prompts is None:
        return
    for prompt, request_id in zip(prompts, batch.req_ids, strict=True):
        slot_map = SlotMap.sent(requests[request_id].sampling_params)
        for token in slot_map.foreign if slot_map is not None else ():
            prompt.masked_fill_(prompt == token, batch.vocab_size)
