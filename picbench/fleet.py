"""The engines of all arms: started two at a time, ended together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from picbench.arm import Arm
from picbench.server import Server

#: Engines that start up at the same time; more would only slow each other down.
STARTING = 2


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running servers and what their engines said of themselves, by arm."""

    servers: Mapping[str, Server]
    engines: Mapping[str, Mapping[str, object]]


@contextmanager
def running(
    arms: Sequence[Arm], launch: Callable[[Arm], Server], ready: Callable[[str], None]
) -> Iterator[Fleet]:
    """Launch every arm's server and wait for all; `ready` hears the name of each that is up.

    Leaving normally lets the engines end by themselves, leaving by an exception kills them.
    """
    servers: dict[str, Server] = {}
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
    launch: Callable[[Arm], Server],
    ready: Callable[[str], None],
    servers: dict[str, Server],
) -> dict[str, Mapping[str, object]]:
    engines: dict[str, Mapping[str, object]] = {}
    for position, arm in enumerate(arms):
        for starting in arms[len(servers) : position + STARTING]:
            servers[starting.name] = launch(starting)
        engines[arm.name] = servers[arm.name].ready()
        ready(arm.name)
    return engines
