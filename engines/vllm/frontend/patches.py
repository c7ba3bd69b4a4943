"""What picbench extends in vLLM's frontend, from the first engine on that asks for `pic`.

An exception in the scheduler ends the engine, so requests are checked before they are sent to the
engine core. Prompts have marks of documents, and servers tell clients why a request failed.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache, partial
from typing import Any

from prometheus_client import Gauge
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError

from picbench.engines.algorithms import Registry
from picbench.engines.vllm.compat import extend
from picbench.engines.vllm.device import cpu_shares
from picbench.engines.vllm.frontend.cache_api import salted
from picbench.engines.vllm.frontend.limits import check_request
from picbench.engines.vllm.frontend.request_args import ARGS, add_marked
from picbench.engines.vllm.frontend.usage import keep_usage, note_usage
from picbench.engines.vllm.marks import DocumentMarks
from picbench.engines.vllm.settings import REJECTED, PicSettings
from picbench.errors import ConfigError, PicBenchError

#: Upstream `InputProcessor.process_inputs` (vllm/v1/engine/input_processor.py:373), which offline
#: and online requests share and which is the first to have a prompt's tokens.
_OF_INPUTS = (
    "self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, "
    "tokenization_kwargs, trace_headers, priority, data_parallel_rank, resumable, session_id, "
    "kv_hints"
)

#: Upstream `InputProcessor.__init__` (vllm/v1/engine/input_processor.py:42), which offline and
#: online engines call before they start an engine core.
_OF_PROCESSOR = "self, vllm_config, renderer, mm_registry"


def extend_frontend() -> None:
    """Have requests checked in this process; done again, it does nothing."""
    from vllm.v1.engine.input_processor import InputProcessor

    tell_reasons()
    keep_usage()
    extend(InputProcessor, "process_inputs", partial(_checked, Registry()), _OF_INPUTS)
    extend(InputProcessor, "__init__", _init, _OF_PROCESSOR)


def _init(upstream: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    upstream(self, vllm_config, *args, **kwargs)
    settings = PicSettings.given(vllm_config.additional_config)
    if settings is None:
        return
    for name, share in cpu_shares(vllm_config).items():
        if share is not None:
            _gauge(f"picbench:{name}").set(share)
    if (marks := DocumentMarks.of(settings.marks)) is not None:
        from picbench.engines.vllm.frontend.marked_prompts import read_marks

        read_marks(self.renderer, marks)


@cache
def _gauge(name: str) -> Gauge:
    return Gauge(name, "See cpu_shares in picbench.engines.vllm.device.", multiprocess_mode="max")


def _checked(
    registry: Registry, upstream: Any, self: Any, name: str, prompt: Any, *args: Any, **given: Any
) -> Any:
    request = upstream(self, name, prompt, *args, **given)
    request.cache_salt = salted(request.cache_salt)
    try:
        if isinstance(prompt, dict) and ARGS in prompt:
            add_marked(request, prompt[ARGS])
        check_request(self.vllm_config, request, registry, shorten=True)
    except PicBenchError as error:
        raise RequestError(error.message, hint=error.hint) from error
    return request


class RequestError(ConfigError, VLLMValidationError, ValueError):
    """A refused request, as the error that vLLM's callers handle.

    Its servers answer a `VLLMValidationError` with 400 and the message; of other errors, ValueError
    among them, `AsyncLLM.generate` (vllm/v1/engine/async_llm.py) makes a 500 without one. Callers
    of the offline engines expect a ValueError.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.parameter: str | None = None
        self.value: Any = None


#: Upstream `AsyncLLM.generate` (vllm/v1/engine/async_llm.py:698).
_OF_GENERATE = (
    "self, prompt, sampling_params, request_id, prompt_text, lora_request, tokenization_kwargs, "
    "trace_headers, priority, data_parallel_rank, session_id, kv_hints, reasoning_ended, "
    "reasoning_parser_kwargs"
)

#: Upstream `ParentRequest.get_outputs` (vllm/v1/engine/parallel_sampling.py:102).
_OF_SAMPLES = "self, child_request_id, completion_output"


def tell_reasons() -> None:
    """Have vLLM's server say why a request ended with an error; done again, it does nothing.

    A request that a fault ends has the reason as its stop reason (`PicScheduler`). Of the finish
    reason "error" vLLM's server makes a 500 without it (vllm/entrypoints/generate/base/serving.py,
    `_raise_if_error`). `AsyncLLM.generate`, which all of its endpoints call, is therefore extended:
    it raises the error that the server answers with. Of several samples that are not streamed,
    upstream keeps what ended until all have; one that failed is passed on at once, so that its
    siblings, which nothing will read, are aborted.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.parallel_sampling import ParentRequest

    extend(AsyncLLM, "generate", _told, _OF_GENERATE)
    extend(ParentRequest, "get_outputs", _early, _OF_SAMPLES)


async def _told(upstream: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    # Closed after an error, upstream aborts what else was sampled for the request.
    async with aclosing(upstream(*args, **kwargs)) as outputs:
        async for output in outputs:
            check_output(output)
            note_usage(output)
            yield output


def _early(upstream: Any, self: Any, child: str, completion: Any) -> tuple[list[Any], bool]:
    outputs, finished = upstream(self, child, completion)
    if not outputs and not finished and _failed(completion):
        outputs = [completion]
    return outputs, finished


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
