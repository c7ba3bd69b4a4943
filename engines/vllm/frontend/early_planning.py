"""Planning where an engine core receives requests.

Upstream: `EngineCore.preprocess_add_request` (vllm/v1/engine/core.py:1089 of vLLM 0.32.0), which
makes a `Request` of what was received. It is there so that requests are prepared in the thread that
receives them while steps run in another (`EngineCoreProc.process_input_sockets`). An engine core in
the caller's process calls it right before it adds the request. The schedulers of picbench then have
the request's plan made; nothing else changes.
"""

from functools import wraps
from typing import Any

from picbench.engines.vllm.compat import check_signature


def plan_on_receipt() -> None:
    """Patch the engine cores of this process. Raises ConfigError if the upstream method differs."""
    from vllm.v1.engine.core import EngineCore

    upstream = EngineCore.preprocess_add_request
    if getattr(upstream, "plans", False):
        return
    check_signature(upstream, ("self", "request"))

    @wraps(upstream)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        received = upstream(self, request)
        plan_early = getattr(self.scheduler, "plan_early", None)
        if plan_early is not None:
            plan_early(received[0])
        return received

    preprocess_add_request.plans = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess_add_request  # type: ignore[method-assign]
