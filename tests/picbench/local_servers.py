"""Servers of engines that are this process: for measures without a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig


class LocalServer:
    """Calls measures with itself in place of an engine; they note what they are asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked
        self.compilations = [f"kernel of {name}"]
        self.ended = ""

    def ready(self) -> dict[str, object]:
        return {"device": "none"}

    def watch_compilations(self) -> None: ...

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def close(self) -> None:
        self.ended = "closed"

    def kill(self) -> None:
        self.ended = self.ended or "killed"


class LocalLauncher:
    """Starts them, in `servers`; `asked` is what any of them was asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.servers: list[LocalServer] = []

    def __call__(self, name: str, config: EngineConfig, log: Path) -> Any:
        self.servers.append(LocalServer(name, self.asked))
        return self.servers[-1]


def note(engine: Any, name: str, *, arm: str = "") -> dict[str, float]:
    """Note who was asked what; the figure is how many measures there were."""
    engine.asked.append(f"{arm or engine.name} {name}")
    return {"value": float(len(engine.asked))}
