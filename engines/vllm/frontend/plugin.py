"""The `vllm.general_plugins` entry point, which checks engines at start and requests on arrival.

vLLM ignores unknown `extra_args`, so an engine without picbench would serve a PIC request as an
ordinary one, and an exception in the scheduler ends the engine. Requests are therefore checked
before they are sent to the engine core. In engine cores prompts with chunks are planned where
requests are received, and hashed by the scheduler; servers tell their clients why a request failed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError

from picbench.engines.vllm.compat import (
    check_frontend,
    check_plug_in,
    check_signature,
    check_version,
)
from picbench.engines.vllm.frontend.engine_core import defer_hashing, plan_on_receipt
from picbench.engines.vllm.frontend.reasons import tell_reasons
from picbench.errors import ConfigError, PicBenchError
from picbench.kernels.first_calls import settle_first_calls

#: Upstream `InputProcessor.process_inputs` (vllm/v1/engine/input_processor.py:373), which offline
#: and online requests share and which is the first to have a prompt's tokens.
_PARAMETERS = (
    "self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, "
    "tokenization_kwargs, trace_headers, priority, data_parallel_rank, resumable, session_id, "
    "kv_hints"
)

#: Upstream `InputProcessor.__init__` (vllm/v1/engine/input_processor.py:42), which offline and
#: online engines call before they start an engine core.
_OF_PROCESSOR = "self, vllm_config, renderer, mm_registry"


def register() -> None:
    """Install the checks; vLLM calls this in each of its processes, possibly more than once."""
    from vllm.v1.engine.input_processor import InputProcessor

    check_version()
    # Each process makes its model's table of RoPE later, with many threads.
    settle_first_calls()
    defer_hashing()
    plan_on_receipt()
    tell_reasons()
    if not _registered():
        check_signature(InputProcessor.process_inputs, _PARAMETERS)
        guarded = _guarded(InputProcessor.process_inputs)
        InputProcessor.process_inputs = guarded  # type: ignore[method-assign]
        check_signature(InputProcessor.__init__, _OF_PROCESSOR)
        InputProcessor.__init__ = _checked(InputProcessor.__init__)  # type: ignore[method-assign]


def check_registered() -> None:
    """Raise ConfigError in a process in which vLLM has not loaded the plug-in."""
    if not _registered():
        check_plug_in()
        raise ConfigError(
            "picbench's plug-in is not loaded", hint="start the engine in a process of its own"
        )


def _registered() -> bool:
    from vllm.v1.engine.input_processor import InputProcessor

    return getattr(InputProcessor.process_inputs, "guards_pic", False)


def _checked(upstream: Callable[..., None]) -> Callable[..., None]:
    @wraps(upstream)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_frontend(vllm_config)
        upstream(self, vllm_config, *args, **kwargs)

    return init


def _guarded(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from picbench.engines.algorithms import Registry
    from picbench.engines.vllm.frontend import limits

    registry = Registry()

    @wraps(upstream)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = upstream(self, *args, **kwargs)
        try:
            limits.check_request(self.vllm_config, request, registry, shorten=True)
        except PicBenchError as error:
            raise RequestError(error.message, hint=error.hint) from error
        return request

    process_inputs.guards_pic = True  # type: ignore[attr-defined]
    return process_inputs


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
