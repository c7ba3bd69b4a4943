"""Packages that come with an engine, not with picbench's core."""

from collections.abc import Iterator
from contextlib import contextmanager

from picbench.errors import ConfigError


@contextmanager
def engine_packages() -> Iterator[None]:
    """Turn a missing package inside the block into a ConfigError that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name!r} is not installed",
            hint="pip install 'picbench[cpu]' or 'picbench[cuda]'",
        ) from error
