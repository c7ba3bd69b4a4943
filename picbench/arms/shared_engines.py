"""Engines that arms take turns on: one start serves every arm that needs an engine like it.

A GPU has room for one pool of the papers' size and another one of stock vLLM, and starting an
engine takes a minute. An arm that comes after another finds empty caches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from picbench.arms.arm_server import ArmServer
from picbench.arms.messages import GroupResult
from picbench.engines.algorithms import Reuse, parse
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request

#: What starts an engine: a name, its settings, the file for its output.
Starter = Callable[[str, EngineConfig, Path], ArmServer]

#: The default algorithm of engines in which each request names its own, and of stock ones.
_OURS, _STOCK = "mepic", "prefix"


def shareable(config: EngineConfig) -> EngineConfig:
    """The settings of the engine that serves an arm among others.

    Stock vLLM caches prefixes, and has no chunks that could be compiled in some order.
    """
    if config.stock:
        return replace(config, algorithm=_STOCK, compile_order="head")
    return replace(config, algorithm=_OURS)


@dataclass
class _Engine:
    """An engine, what it said of itself, and the arm whose KV is in its caches."""

    server: ArmServer
    description: Mapping[str, object] | None = None
    warm: set[str] = field(default_factory=set)
    user: "BorrowedServer | None" = None


class SharedEngines:
    """Lends engines to arms, and starts those that are not there yet; a context manager."""

    def __init__(self, start: Starter) -> None:
        self._start = start
        self._engines: dict[EngineConfig, _Engine] = {}

    def __enter__(self) -> "SharedEngines":
        return self

    def __exit__(self, *_: object) -> None:
        self.retain(())

    def launch(self, name: str, config: EngineConfig, log: Path) -> "BorrowedServer":
        """An arm's server; see `Starter`."""
        wanted = shareable(config)
        if wanted not in self._engines:
            kind = "stock" if wanted.stock else "picbench"
            log = log.with_name(f"{kind}{log.suffix}")
            self._engines[wanted] = _Engine(self._start(kind, wanted, log))
        ended = lambda: self._engines.pop(wanted, None)  # noqa: E731
        return BorrowedServer(config, self._engines[wanted], ended)

    def retain(self, configs: Iterable[EngineConfig]) -> None:
        """Close engines that no arm with these settings needs."""
        wanted = {shareable(config) for config in configs}
        for config in [config for config in self._engines if config not in wanted]:
            self._engines.pop(config).server.close()


class BorrowedServer:
    """An arm's turn on an engine: see ArmServer."""

    def __init__(self, config: EngineConfig, engine: _Engine, ended: Callable[[], object]) -> None:
        self._config = config
        self._engine = engine
        self._ended = ended
        self._sent = 0
        self._salted = config.stock and parse(config.algorithm).reuse is Reuse.NOTHING

    def ready(self) -> Mapping[str, object]:
        """See ArmServer; what the arm's algorithm needs first is computed now."""
        engine, algorithm = self._engine, self._config.algorithm
        if engine.description is None:
            engine.description = engine.server.ready()
        if algorithm not in engine.warm and not self._config.stock:
            engine.server.call(methodcaller("warm_up", algorithm))
        engine.warm.add(algorithm)
        return {**engine.description, "shared": True}

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """See ArmServer; in stock vLLM, requests that reuse nothing are a tenant each."""
        self._take()
        return self._engine.server.run([*map(self._own, requests)], concurrency, arrivals)

    def reset(self) -> None:
        """See ArmServer."""
        self._engine.server.reset()
        self._engine.user = self

    def call(self, function: Callable[[Any], Any]) -> Any:
        """See ArmServer."""
        return self._engine.server.call(function)

    def close(self) -> None:
        """Give the engine back; it goes on."""

    def kill(self) -> None:
        """End the engine for all arms at once."""
        self._engine.server.kill()
        self._ended()

    def _take(self) -> None:
        if self._engine.user is not self:
            self.reset()

    def _own(self, request: Request) -> Request:
        self._sent += 1
        if self._salted:
            return replace(request, salt=f"request {self._sent}")
        return request if self._config.stock else replace(request, algorithm=self._config.algorithm)
