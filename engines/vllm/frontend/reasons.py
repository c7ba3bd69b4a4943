"""Why a request ended with an error, for clients of vLLM's server.

A request that a fault ends has the reason as its stop reason (`PicScheduler`). Of the finish reason
"error" vLLM's server makes a 500 that says "Internal server error", whatever the stop reason
(vllm/entrypoints/generate/base/serving.py, `_raise_if_error`). `AsyncLLM.generate`, which all of
its endpoints call, is therefore extended: it raises the error that the server answers with.

Of several samples that are not streamed, upstream keeps what ended until all have. A sample that
failed is passed on at once, so that its siblings are aborted: none of them is going to be read.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any

from vllm.exceptions import GenerationError, RetryableRequestError

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.settings import REJECTED

#: Upstream `AsyncLLM.generate` (vllm/v1/engine/async_llm.py:698).
_PARAMETERS = (
    "self, prompt, sampling_params, request_id, prompt_text, lora_request, tokenization_kwargs, "
    "trace_headers, priority, data_parallel_rank, session_id, kv_hints, reasoning_ended, "
    "reasoning_parser_kwargs"
)

#: Upstream `ParentRequest.get_outputs` (vllm/v1/engine/parallel_sampling.py:102).
_OF_SAMPLES = "self, child_request_id, completion_output"


def tell_reasons() -> None:
    """Install the extensions; done again, it does nothing."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.parallel_sampling import ParentRequest

    if not getattr(AsyncLLM.generate, "tells_reasons", False):
        check_signature(AsyncLLM.generate, _PARAMETERS)
        check_signature(ParentRequest.get_outputs, _OF_SAMPLES)
        AsyncLLM.generate = _telling(AsyncLLM.generate)  # type: ignore[method-assign]
        early = _early(ParentRequest.get_outputs)
        ParentRequest.get_outputs = early  # type: ignore[method-assign]


def _telling(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(upstream)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        # Closed after an error, upstream aborts what else was sampled for the request.
        async with aclosing(upstream(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                check_output(output)
                yield output

    generate.tells_reasons = True  # type: ignore[attr-defined]
    return generate


def _early(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(upstream)
    def get_outputs(
        self: Any, child_request_id: str, completion_output: Any
    ) -> tuple[list[Any], bool]:
        outputs, finished = upstream(self, child_request_id, completion_output)
        if not outputs and not finished and _failed(completion_output):
            outputs = [completion_output]
        return outputs, finished

    return get_outputs


def check_output(output: Any) -> None:
    """Raise vLLM's error of a failed generation if a `RequestOutput` ended with a reason.

    It is one that may be sent again (503) if the pool was short of blocks, and a 500 otherwise.
    """
    for one in output.outputs:
        if _failed(one):
            kind = RetryableRequestError if one.stop_reason == REJECTED else GenerationError
            raise kind(one.stop_reason)


def _failed(completion: Any) -> bool:
    """Whether a `CompletionOutput` ended with an error and a reason."""
    return completion.finish_reason == "error" and isinstance(completion.stop_reason, str)
