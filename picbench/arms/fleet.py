"""The engines of all arms: started a few at a time, ended together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from picbench.arms.arm import Arm
from picbench.arms.arm_server import ArmServer
from picbench.arms.environment import cores

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
