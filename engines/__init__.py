"""Position-independent KV caching inside an inference engine.

The names below are the public API. They are imported on first use, so that importing this package
loads neither torch nor vLLM. Errors are in `picbench.errors`.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from picbench.engines.config import EngineConfig
    from picbench.engines.engine import Engine
    from picbench.engines.planning.schema import Alternatives, Module, Parameter, Schema
    from picbench.engines.request import Chunk, Request, Result, Text

__all__ = [
    "Alternatives",
    "Chunk",
    "Engine",
    "EngineConfig",
    "Module",
    "Parameter",
    "Request",
    "Result",
    "Schema",
    "Text",
]

#: Where the names are that are not in `request`.
_MODULES = MappingProxyType(
    {
        "Engine": "engine",
        "EngineConfig": "config",
        **dict.fromkeys(("Alternatives", "Module", "Parameter", "Schema"), "planning.schema"),
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "request")
    return getattr(import_module(f"{__name__}.{module}"), name)
