"""Engines that are up at once, each in a process of its own, for as long as they are measured."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory

from picbench.arms.server import Server, launch
from picbench.engines.config import EngineConfig

#: Starts the process of an engine: its name, its settings, its log.
Launcher = Callable[[str, EngineConfig, Path], Server]


@contextmanager
def started_engines(
    configs: Mapping[str, EngineConfig], launcher: Launcher | None = None
) -> Iterator[tuple[Mapping[str, Server], Mapping[str, Mapping[str, object]]]]:
    """The engines and what each says of itself, by name; they end when the context does.

    Raises the error of an engine that cannot start.
    """
    engines: dict[str, Server] = {}
    end = "kill"
    with TemporaryDirectory(prefix="picbench-") as logs:
        try:
            for name, config in configs.items():
                engines[name] = (launcher or launch)(name, config, Path(logs) / f"{name}.log")
            yield engines, {name: engine.ready() for name, engine in engines.items()}
            end = "close"
        finally:
            # Each takes seconds to end.
            with ThreadPoolExecutor() as threads:
                list(threads.map(methodcaller(end), engines.values()))
