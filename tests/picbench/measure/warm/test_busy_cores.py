"""Processes that keep cores busy, for as long as they are wanted."""

import os
from pathlib import Path

import pytest

from picbench.experiments.warm_chunks import busy_cores


def children() -> list[str]:
    """What this process has started and not waited for."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8")
    return [Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8") for child in own.split()]


def spinning() -> int:
    return sum("busy_cores" in command for command in children())


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
