"""The `vllm.general_plugins` entry point, which does nothing until an engine asks for `pic`.

vLLM loads it in all of its processes, of any release and of servers that have nothing to do with
picbench. So nothing is imported here but of Python, and nothing is checked. Two methods of
`EngineArgs`, which every engine is started with, pass on what they are called with, and arguments
that ask for `pic` are first completed (`picbench.engines.vllm.frontend.engine_args`).
"""

import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

#: The module of `EngineArgs`. Engine cores and workers never import it.
_MODULE = "vllm.engine.arg_utils"


def register() -> None:
    """Have arguments of engines read; vLLM calls this in each of its processes."""
    if _MODULE in sys.modules:
        _extend(sys.modules[_MODULE])
    elif not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    """Extends `EngineArgs` once its module is imported: that takes a second, and few need it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec; None for other modules, as other finders find them."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _extend(module)

            spec.loader.exec_module = exec_module
        return spec


def _extend(module: Any) -> None:
    kind: Any = getattr(module, "EngineArgs", None)
    create = getattr(kind, "create_engine_config", None)
    read = getattr(getattr(kind, "from_cli_args", None), "__func__", None)
    if create is None or read is None or hasattr(create, "reads_pic"):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _asks(self):
            return create(self, *args, **kwargs)
        from picbench.engines.vllm.frontend import engine_args

        return engine_args.create(create, self, *args, **kwargs)

    @wraps(read)
    def from_cli_args(cls: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        found = read(cls, args, *more, **kwargs)
        if _asks(found):
            from picbench.engines.vllm.frontend import engine_args

            engine_args.complete_command(found, args)
        return found

    create_engine_config.reads_pic = True  # type: ignore[attr-defined]
    kind.create_engine_config = create_engine_config
    kind.from_cli_args = classmethod(from_cli_args)


def _asks(args: Any) -> bool:
    """Whether `EngineArgs` have settings of picbench, or one of its classes without any."""
    additional = getattr(args, "additional_config", None)
    if isinstance(additional, dict) and "pic" in additional:
        return True
    classes = (getattr(args, name, None) for name in ("scheduler_cls", "worker_cls"))
    return any("picbench." in str(each) for each in classes)
