"""Errors at the edge: one line on stderr and an exit code."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click

from picbench.errors import PicBenchError

INTERNAL_ERROR = 70
INTERRUPTED = 130


class GuardedGroup(click.Group):
    """A click group that never shows a traceback by itself."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command and exit with the code of the error that it raised, 0 without one."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except click.Abort:
            sys.exit(_fail("interrupted", INTERRUPTED))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            sys.exit(_fail(_usage(error), error.exit_code))
        except PicBenchError as error:
            sys.exit(_fail(str(error), error.exit_code))
        except Exception as error:
            sys.exit(_fail(_internal(error), INTERNAL_ERROR))
        sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def traced(debug: bool) -> Iterator[None]:
    """Print the traceback of whatever passes through, if `debug`."""
    try:
        yield
    except Exception:
        if debug:
            traceback.print_exc()
        raise


def _fail(message: str, code: int) -> int:
    click.echo(f"picbench: {' '.join(message.split())}", err=True)
    return code


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "picbench"
    return f"{error.format_message()} (see {command} --help)"


def _internal(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)"
