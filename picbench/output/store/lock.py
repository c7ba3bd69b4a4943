"""A lock on a run directory, which ends with the process that holds it, however that ends."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from picbench.errors import ConfigError


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder; ConfigError where another process, or this one already, does.

    File systems without locks hold nothing.
    """
    descriptor = _lock(folder)
    if descriptor is None:
        raise ConfigError(
            f"`output` {folder}: another process is writing this run",
            hint="wait until it has ended, or name another folder",
        )
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process holds a folder."""
    descriptor = _lock(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _lock(folder: Path) -> int | None:
    """A descriptor that locks the folder until it is closed; None where it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            return None
    return descriptor
