"""Position-independent KV caching inside an inference engine.

The names below are the public API. They are imported on first use, so that importing this package
loads neither torch nor vLLM. Errors are in `picbench.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from picbench.engines.config import EngineConfig
    from picbench.engines.engine import Engine
    from picbench.engines.request import Chunk, Request, Result, Text

__all__ = ["Chunk", "Engine", "EngineConfig", "Request", "Result", "Text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"Engine": "engine", "EngineConfig": "config"}.get(name, "request")
    return getattr(import_module(f"{__name__}.{module}"), name)
