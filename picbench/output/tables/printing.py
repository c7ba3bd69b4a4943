"""Printing tables with rich, to readers that may go away."""

import errno
import os

from rich.console import Console


class PipedConsole(Console):
    """A console that raises BrokenPipeError where its reader went away.

    rich itself then exits with 1, which for picbench is a regression.
    """

    def on_broken_pipe(self) -> None:
        """See `Console`."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
