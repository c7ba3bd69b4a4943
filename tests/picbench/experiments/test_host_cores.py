"""Cores that are kept busy, and looking for one that nothing else uses."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.experiments.host_cores import QuietCores, busy_cores, time_loop


class Host:
    """A thread on the first of a host's cores; loops take `speeds` seconds, each on its core."""

    def __init__(self, speeds: list[float]) -> None:
        self.speeds, self.core, self.moves = speeds, 0, 0

    def move(self, core: int) -> None:
        self.core = core
        self.moves += 1

    def probe(self) -> float:
        return self.speeds[self.core]

    def cores(self, shortest: float = float("inf")) -> QuietCores:
        return QuietCores(shortest, range(len(self.speeds)), self.move, self.probe)


def test_a_thread_stays_on_a_quiet_core() -> None:
    host = Host([1.0, 1.1, 1.0])
    cores = host.cores()
    assert cores.settle()
    moves = host.moves
    host.speeds[0] = host.speeds[1] = 1.7
    assert cores.settle()
    assert (host.core, host.moves) == (2, moves)


def test_a_thread_leaves_a_busy_core() -> None:
    host = Host([1.0, 1.0, 1.7, 1.0])
    cores = host.cores()
    host.core, host.speeds[0] = 2, 1.7
    assert cores.settle()
    assert host.core == 1
    host.speeds = [1.7, 1.7, 1.7, 1.1]
    assert cores.settle()
    assert host.core == 3


def test_a_host_that_is_busy_everywhere_is_known_by_what_others_met() -> None:
    host = Host([1.7, 1.8, 1.7])
    assert host.cores().settle()
    assert host.cores().shortest == 1.7
    cores = host.cores(shortest=1.0)
    assert not cores.settle()
    host.speeds[1] = 0.9
    assert cores.settle()
    assert cores.shortest == 0.9


@given(
    st.lists(st.floats(0.5, 3.0), min_size=1, max_size=8),
    st.lists(st.lists(st.floats(0.5, 3.0), min_size=8, max_size=8), max_size=5),
)
def test_a_quiet_core_is_found_if_there_is_one(
    first: list[float], later: list[list[float]]
) -> None:
    host = Host(first)
    cores = host.cores()
    assert cores.shortest == min(first)
    for speeds in later:
        host.speeds = speeds[: len(first)]
        found = cores.settle()
        assert found == any(speed <= 1.35 * cores.shortest for speed in host.speeds)
        assert not found or host.speeds[host.core] <= 1.35 * cores.shortest


def test_without_cores_to_choose_from_a_thread_stays() -> None:
    times: Iterator[float] = iter((1.0, 1.0, 2.0))
    cores = QuietCores(cores=(), probe=lambda: next(times))
    assert cores.settle()
    assert not cores.settle()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved here")
def test_a_thread_may_use_all_of_its_cores_afterwards() -> None:
    allowed = os.sched_getaffinity(0)
    QuietCores().settle()
    assert os.sched_getaffinity(0) == allowed
    assert 0 < time_loop() < 1


def children() -> list[str]:
    """What this process has started and not waited for."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8")
    return [Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8") for child in own.split()]


def spinning() -> int:
    return sum("host_cores" in command for command in children())


def test_cores_are_busy_in_the_context_alone() -> None:
    with busy_cores(2):
        assert spinning() == 2
    assert not spinning()


def test_an_error_ends_them_too() -> None:
    with pytest.raises(KeyError), busy_cores(1):
        raise KeyError
    assert not spinning()


def test_none_are_started_for_none() -> None:
    with busy_cores(0):
        assert not spinning()
