"""The `vllm.general_plugins` entry point: no PIC request is served as an ordinary one.

vLLM ignores `extra_args` that it does not know. In a process where picbench is installed, a
request that describes chunks is therefore checked on arrival: an engine that was not started with
picbench's scheduler and workers refuses it, and a PIC engine refuses malformed spans before they
reach the scheduler.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from picbench.engines.vllm.support import check_signature, check_version

#: Upstream `InputProcessor._validate_params` (vllm/v1/engine/input_processor.py:138): the first
#: line of `process_inputs`, the one gate that offline and online requests share.
_PARAMETERS = ("self", "params", "supported_tasks")


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    from vllm.v1.engine.input_processor import InputProcessor

    check_version()
    upstream = InputProcessor._validate_params
    if getattr(upstream, "guards_pic", False):
        return
    check_signature(upstream, _PARAMETERS)
    InputProcessor._validate_params = _guarded(upstream)


def _guarded(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from picbench.engines.algorithms import Registry

    registry = Registry()

    @wraps(upstream)
    def validate(self: Any, params: Any, supported_tasks: Any) -> Any:
        _check_request(self.vllm_config, getattr(params, "extra_args", None), registry)
        return upstream(self, params, supported_tasks)

    validate.guards_pic = True  # type: ignore[attr-defined]
    return validate


def _check_request(config: Any, extra_args: Any, registry: Any) -> None:
    from picbench.engines.vllm.settings import PicSettings
    from picbench.engines.vllm.wire import read_args
    from picbench.errors import PicBenchError

    if not extra_args:
        return
    try:
        args = read_args(extra_args, config.model_config.max_model_len, registry)
    except PicBenchError as error:
        raise ValueError(str(error)) from error
    if args is not None and PicSettings.read(config.additional_config) is None:
        raise ValueError(
            "the request describes chunks, but this engine was started without picbench: it would "
            "be served without reuse (see scheduler_cls, worker_cls in picbench's README)"
        )
