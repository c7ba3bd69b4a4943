"""Requests as vLLM's engine core gets them."""

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def core_request(name: str, params: SamplingParams) -> EngineCoreRequest:
    """A plain request of two tokens."""
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=[5, 6],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
