"""Arms, the things that a run compares, and the engines that serve them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any

from picbench.engines.algorithms import Registry, Reuse, parse
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request
from picbench.errors import ConfigError
from picbench.run.remote import Endpoint, RemoteServer, parse_endpoints
from picbench.run.server import Arrivals, Server
from picbench.settings import RunConfig
from picbench.store.provenance import cores
from picbench.store.records import GroupResult
from picbench.store.summary import BASELINE, NO_CONTEXT


@dataclass(frozen=True, slots=True)
class Arm:
    """An algorithm and the engine that it runs on.

    `name` is the algorithm's label, `algorithm` its canonical spec (``"epic:k=16"``), `served` the
    spec that the engine serves, `stock` says whether vLLM runs without any part of picbench in it,
    `reuse` what of earlier requests may be reused, `documents` whether chunks are compiled after
    the text of their documents, `reorders` whether prompts are sent with their chunks in another
    order, each once, and `bare` whether without them.

    An arm with an `endpoint` is a remote server: its `algorithm` is where that is, and what it has
    in its cache is not known, so that no reuse is expected of it.
    """

    name: str
    algorithm: str
    served: str = ""
    stock: bool = False
    reuse: Reuse = Reuse.NOTHING
    documents: bool = False
    reorders: bool = False
    bare: bool = False
    endpoint: Endpoint | None = None

    @property
    def engine(self) -> str:
        """The name of its engine: prompts without their chunks are served by that of `full`."""
        return self.algorithm if self.bare else self.name


def parse_arms(specs: Iterable[str], *, same_engine: bool = False) -> tuple[Arm, ...]:
    """Arms from values of `algo`, each one spec or several with commas between them.

    Algorithms that compile no chunks run on stock vLLM unless `same_engine`. Raises ConfigError
    for unknown names and options, for an arm given twice and for none at all.
    """
    wanted = [spec.strip() for value in specs for spec in value.split(",")]
    if not any(wanted):
        raise ConfigError("`algo`: no algorithm given", hint="see picbench list algorithms")
    registry = Registry()
    arms: dict[str, Arm] = {}
    for spec in wanted:
        if not spec:
            raise ConfigError("`algo`: an empty name between commas", hint="write full,prefix")
        try:
            found = registry.parse(BASELINE if spec == NO_CONTEXT else spec)
        except ConfigError as error:
            raise ConfigError(f"`algo`: {error.message}", hint=error.hint) from error
        name = spec if spec == NO_CONTEXT else found.label
        if name in arms:
            raise ConfigError(f"`algo`: {name} is given twice", hint="name each arm once")
        arms[name] = Arm(
            name=name,
            algorithm=found.spec,
            served=found.served,
            stock=found.reuse is not Reuse.CHUNKS and not same_engine,
            reuse=found.reuse,
            documents=found.documents,
            reorders=found.reorders,
            bare=spec == NO_CONTEXT,
        )
    return tuple(arms.values())


def all_arms(config: RunConfig) -> tuple[Arm, ...]:
    """The arms of `algo`, and those of `arm`, remote servers, which may be all there are.

    Raises ConfigError as `parse_arms` and `parse_endpoints` do.
    """
    alone = config.arm and not any(config.algo)
    arms = [] if alone else [*parse_arms(config.algo, same_engine=config.same_engine)]
    for name, found in parse_endpoints(config.arm, [arm.name for arm in arms]).items():
        asked = parse(found.algo or "prefix")
        arm = Arm(name, found.spec, documents=asked.documents, endpoint=found)
        arms.append(replace(arm, reorders=asked.reorders))
    return tuple(arms)


def shareable(config: EngineConfig) -> EngineConfig:
    """The settings of the engine that serves an arm among others.

    Stock vLLM caches prefixes, and has no chunks that could be compiled in some order; in other
    engines each request names its algorithm.
    """
    if config.stock:
        return replace(config, algorithm="prefix", compile_order="head")
    return replace(config, algorithm="mepic")


class _Engine:
    """An engine that does once what several arms ask for, and the arm that used it last."""

    def __init__(self, server: "ArmServer") -> None:
        self.server = server
        self.ready = cache(server.ready)
        self.warm_up = cache(lambda algorithm: server.call(methodcaller("warm_up", algorithm)))
        self.user: _BorrowedServer | None = None


class SharedEngines(AbstractContextManager["SharedEngines"]):
    """Lends engines to arms, and starts those that are not there yet; leaving it closes them.

    `start` starts an engine, given a name, its settings and the file for its output.
    """

    def __init__(self, start: Callable[[str, EngineConfig, Path], "ArmServer"]) -> None:
        self._start = start
        self._engines: dict[EngineConfig, _Engine] = {}

    def __exit__(self, *_: object) -> None:
        self.retain(())

    def launch(self, name: str, config: EngineConfig, log: Path) -> "_BorrowedServer":
        """An arm's server."""
        wanted = shareable(config)
        if wanted not in self._engines:
            kind = "stock" if wanted.stock else "picbench"
            started = self._start(kind, wanted, log.with_name(f"{kind}{log.suffix}"))
            self._engines[wanted] = _Engine(started)
        ended = partial(self._engines.pop, wanted, None)
        return _BorrowedServer(config, self._engines[wanted], ended)

    def retain(self, configs: Iterable[EngineConfig]) -> None:
        """Close engines that no arm with these settings needs."""
        for config in self._engines.keys() - set(map(shareable, configs)):
            self._engines.pop(config).server.close()


class _BorrowedServer:
    """An arm's turn on an engine, as a Server; the KV is dropped when another arm has used it.

    In stock vLLM, requests that reuse nothing are a tenant each. `close` leaves the engine running,
    `kill` ends it for all arms at once.
    """

    def __init__(self, config: EngineConfig, engine: _Engine, ended: Callable[[], object]) -> None:
        self._config, self._engine, self._ended = config, engine, ended
        self._alone = config.stock and parse(config.algorithm).reuse is Reuse.NOTHING
        self._numbers = count(1)

    def ready(self) -> Mapping[str, object]:
        description = self._engine.ready()
        if not self._config.stock:
            self._engine.warm_up(self._config.algorithm)
        return {**description, "shared": True}

    def run(
        self, requests: Sequence[Request], concurrency: int | None, arrivals: Arrivals = None
    ) -> GroupResult:
        if self._engine.user is not self:
            self.reset()
        if not self._config.stock:
            own = self._config.algorithm
            requests = [replace(r, algorithm=r.algorithm or own) for r in requests]
        elif self._alone:
            requests = [replace(r, salt=f"request {next(self._numbers)}") for r in requests]
        return self._engine.server.run(requests, concurrency, arrivals)

    def call(self, function: Callable[[Any], Any]) -> Any:
        return self._engine.server.call(function)

    def reset(self) -> None:
        self._engine.server.reset()
        self._engine.user = self

    def close(self) -> None: ...

    def kill(self) -> None:
        self._engine.server.kill()
        self._ended()


#: Serves the requests of one arm.
ArmServer = Server | RemoteServer | _BorrowedServer


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running servers and the descriptions of their engines, by arm."""

    servers: Mapping[str, ArmServer]
    engines: Mapping[str, Mapping[str, object]]


@contextmanager
def open_fleet(
    starts: Mapping[str, Callable[[], ArmServer]], ready: Callable[[str], object]
) -> Iterator[Fleet]:
    """Start every server and wait for all; call `ready` with the name of each that is up.

    Leaving normally lets the engines end by themselves, leaving by an exception kills them.
    """
    servers: dict[str, ArmServer] = {}
    engines: dict[str, Mapping[str, object]] = {}
    at_once = max(2, cores() // 4)  # With fewer cores each, engines would slow each other down.
    try:
        for position, name in enumerate(starts):
            for starting in list(starts)[len(servers) : position + at_once]:
                servers[starting] = starts[starting]()
            engines[name] = servers[name].ready()
            ready(name)
        yield Fleet(servers, engines)
    except BaseException:
        for server in servers.values():
            server.kill()
        raise
    with ThreadPoolExecutor() as pool:
        list(pool.map(methodcaller("close"), servers.values()))
