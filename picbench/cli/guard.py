"""Errors of commands: one line on stderr, which names flags, and an exit code."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FrameType, MappingProxyType
from typing import Any, TypeGuard

import click

from picbench.errors import ConfigError, EngineError, PicBenchError, check_range
from picbench.files import FULL_DISK

INTERNAL_ERROR = 70
INTERRUPTED = 130

#: What a shell says of a program whose reader went away; click's own 1 would be a regression.
PIPE_CLOSED = 141

#: What a file system refuses; any other `OSError` is a bug.
_REFUSED = FULL_DISK | {
    errno.EACCES,
    errno.EBUSY,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}

#: What a terminal that is closed, a batch system and a container's end send.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)

#: The extra with which a package comes that the core does without.
_EXTRAS = dict.fromkeys(("pandas", "matplotlib", "adjustText"), "figures")
_EXTRAS |= dict.fromkeys(("datasets", "pyarrow"), "rows")
_EXTRAS |= {name: name for name in ("mlflow", "wandb", "ray")}

#: A field in backticks, with or without a value: `kv_blocks`, `data=hub`.
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


@dataclass(frozen=True, slots=True)
class LazyOptions:
    """Options among the parameters of a command that are made when they are needed."""

    make: Callable[[], Sequence[click.Parameter]]


class GuardedCommand(click.Command):
    """A command with --debug, whose errors name its own flags."""

    _given: list[Any]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        shown = "Show tracebacks and the logs of engines that failed."
        self._given.append(click.Option(["--debug"], is_flag=True, help=shown))

    @property
    def params(self) -> list[click.Parameter]:
        """See `click.Command`."""
        if any(isinstance(given, LazyOptions) for given in self._given):
            made = [g.make() if isinstance(g, LazyOptions) else (g,) for g in self._given]
            self._given = list(chain.from_iterable(made))
        return self._given

    @params.setter
    def params(self, given: list[click.Parameter]) -> None:
        self._given = given

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        with _traced(context.params.pop("debug")):
            for name, value in context.params.items():
                check_range(name, value)
            return super().invoke(context)


class ListedGroup(click.Group):
    """A group whose help has commands in `sections`, with summaries that are not cut.

    Those that are marked are for rare occasions, and listed without theirs.
    """

    sections: Mapping[str, Sequence[tuple[str, bool]]] = MappingProxyType({})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group`."""
        every = {"Commands": [(name, False) for name in sorted(self.commands)]}
        for title, names in (self.sections or every).items():
            rows = [
                (name, self.commands[name].get_short_help_str(300))
                for name, rare in names
                if not rare
            ]
            if others := ", ".join(name for name, rare in names if rare):
                rows.append(("also", others))
            with formatter.section(title):
                formatter.write_dl(rows)


class CommandGroup(ListedGroup):
    """A group of such commands."""

    command_class = GuardedCommand
    group_class = type


class GuardedGroup(ListedGroup):
    """A click group that never shows a traceback by itself."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command and exit with the code of the error that it raised, 0 without one."""
        extra["standalone_mode"] = False
        _print_what_can_be()
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
            sys.exit(_fail(str(error), exit_code(error)))
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                sys.exit(_fail(_unexpected(error), exit_code(error)))
            hint = f"pip install 'picbench[{_EXTRAS[error.name]}]'"
            sys.exit(_fail(f"this needs {error.name} ({hint})", ConfigError.exit_code))
        except Exception as error:
            sys.exit(_fail(_unexpected(error), exit_code(error)))
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; `PIPE_CLOSED` where its output is no longer read."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # What is still buffered must not fail when Python ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED


def exit_code(error: BaseException) -> int:
    """The code with which a command ends that raises `error`."""
    if isinstance(error, PicBenchError):
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in FULL_DISK
        return EngineError.exit_code if full else error.exit_code
    if _is_refused(error):
        full = error.errno in FULL_DISK
        return EngineError.exit_code if full else ConfigError.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else INTERNAL_ERROR


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for `SIGNALS`, as Ctrl-C does; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_flags(text: str, context: click.Context) -> str:
    """Replace fields in backticks by the flags of the running command.

    `kv_blocks` becomes --kv-blocks and `data=hub` becomes --data hub. What is no option of the
    command only loses its backticks.
    """
    flags = {
        option.removeprefix("--").replace("-", "_"): option
        for parameter in context.command.get_params(context)
        for option in parameter.opts
        if option.startswith("--")
    }

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in flags:
            return found[0].strip("`")
        return flags[name] if value is None else f"{flags[name]} {value}"

    return _FIELD.sub(flag, text)


@contextlib.contextmanager
def _traced(debug: bool) -> Iterator[None]:
    """Put flags into the errors of a command, and print their tracebacks if `debug`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PicBenchError):
            context = click.get_current_context()
            error.message = with_flags(error.message, context)
            error.hint = with_flags(error.hint, context)
        if debug:
            traceback.print_exc()
        raise


def _print_what_can_be() -> None:
    """Print a question mark for what the terminal's encoding lacks; strict streams raise.

    Locales other than UTF-8 lack signs of pictures, and none has bytes of file names that are no
    text.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _fail(message: str, code: int) -> int:
    click.echo(f"picbench: {' '.join(message.split())}", err=True)
    return code


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "picbench"
    return f"{error.format_message()} (see {command} --help)"


def _unexpected(error: Exception) -> str:
    if not _is_refused(error):
        return f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)"
    where = f"{error.filename}: " if error.filename else ""
    hint = "make room" if error.errno in FULL_DISK else "name a place that can be read and written"
    return f"{where}{error.strerror} ({hint}; --debug shows the traceback)"


def _is_refused(error: BaseException) -> TypeGuard[OSError]:
    """Whether a file system refused it; EINVAL is its word only where a file is named."""
    if not isinstance(error, OSError):
        return False
    no_such_use = error.errno == errno.EINVAL and error.filename is not None
    return no_such_use or error.errno in _REFUSED


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
