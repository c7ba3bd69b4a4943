"""An arm: one of the things that a run compares."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

from picbench.engines.algorithms import Registry, Reuse, parse
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request
from picbench.errors import ConfigError
from picbench.run.remote import Endpoint
from picbench.store.provenance import cores
from picbench.store.records import GroupResult


@dataclass(frozen=True, slots=True)
class Arm:
    """An algorithm and the engine that it runs on.

    `name` is the algorithm's label, `algorithm` its canonical spec (``"epic:k=16"``), `served` the
    spec that the engine serves, `stock` says whether vLLM runs without any part of picbench in it,
    `reuse` what of earlier requests may be reused, `documents` whether chunks are compiled after
    the text of their documents, `reorders` whether prompts are sent with their chunks in another
    order, each once.

    An arm with an `endpoint` is a remote server: its `algorithm` is where that is, and nothing is
    known of what it reuses, so that nothing is asked of it.
    """

    name: str
    algorithm: str
    served: str
    stock: bool
    reuse: Reuse
    documents: bool = False
    reorders: bool = False
    endpoint: Endpoint | None = None


def parse_arms(specs: Iterable[str], *, same_engine: bool = False) -> tuple[Arm, ...]:
    """Arms from values of `algo`, each one spec or several with commas between them.

    Algorithms that compile no chunks run on stock vLLM unless `same_engine`. Raises ConfigError
    for unknown names and options, for an arm given twice and for none at all.
    """
    wanted = [spec.strip() for value in specs for spec in value.split(",")]
    if not any(wanted):
        raise ConfigError("`algo`: no algorithm given", hint="see picbench list algorithms")
    registry = Registry()
    arms = [_arm(spec, same_engine, registry) for spec in wanted]
    _refuse_duplicates(arms)
    return tuple(arms)


def remote_arms(endpoints: Mapping[str, Endpoint]) -> tuple[Arm, ...]:
    """The arms that are remote servers, by their names."""
    return tuple(
        Arm(name, endpoint.spec, "", stock=False, reuse=Reuse.NOTHING, endpoint=endpoint)
        for name, endpoint in endpoints.items()
    )


def _arm(spec: str, same_engine: bool, registry: Registry) -> Arm:
    if not spec:
        raise ConfigError("`algo`: an empty name between commas", hint="write full,prefix,mepic")
    try:
        algorithm = registry.parse(spec)
    except ConfigError as error:
        raise ConfigError(f"`algo`: {error.message}", hint=error.hint) from error
    stock = algorithm.reuse is not Reuse.CHUNKS and not same_engine
    return Arm(
        name=algorithm.label,
        algorithm=algorithm.spec,
        served=algorithm.served,
        stock=stock,
        reuse=algorithm.reuse,
        documents=algorithm.documents,
        reorders=algorithm.reorders,
    )


def _refuse_duplicates(arms: Iterable[Arm]) -> None:
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise ConfigError(f"`algo`: {arm.name} is given twice", hint="name each arm once")
        seen.add(arm.name)


class ArmServer(Protocol):
    """Serves the requests of one arm. Raises EngineError when its engine is gone."""

    def ready(self) -> Mapping[str, object]:
        """Wait until it is up and return what it is."""

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time, or at `arrivals` (seconds)."""

    def reset(self) -> None:
        """Drop all cached KV."""

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the engine; EngineError also where there is no way to it."""

    def close(self) -> None:
        """Let what runs finish, and end."""

    def kill(self) -> None:
        """End at once."""


#: Cores for each engine that starts up; with fewer they would only slow each other down.
CORES = 4


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running servers and the descriptions of their engines, by arm."""

    servers: Mapping[str, ArmServer]
    engines: Mapping[str, Mapping[str, object]]


@contextmanager
def open_fleet(
    arms: Sequence[Arm], launch: Callable[[Arm], ArmServer], ready: Callable[[str], None]
) -> Iterator[Fleet]:
    """Launch every arm's server and wait for all; call `ready` with the name of each that is up.

    Leaving normally lets the engines end by themselves, leaving by an exception kills them.
    """
    servers: dict[str, ArmServer] = {}
    try:
        yield Fleet(servers, _start(arms, launch, ready, servers))
    except BaseException:
        for server in servers.values():
            server.kill()
        raise
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.close(), servers.values()))


def _start(
    arms: Sequence[Arm],
    launch: Callable[[Arm], ArmServer],
    ready: Callable[[str], None],
    servers: dict[str, ArmServer],
) -> dict[str, Mapping[str, object]]:
    engines: dict[str, Mapping[str, object]] = {}
    at_once = max(2, cores() // CORES)
    for position, arm in enumerate(arms):
        for starting in arms[len(servers) : position + at_once]:
            servers[starting.name] = launch(starting)
        engines[arm.name] = servers[arm.name].ready()
        ready(arm.name)
    return engines


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
    """An engine, its description, and the arm whose KV is in its caches."""

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
        """Give the engine back; it keeps running."""

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
