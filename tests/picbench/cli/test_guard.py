"""How errors are printed: one line that names the flags of the running command."""

import errno
import os

import click
import pytest
from click.testing import CliRunner

from picbench.cli.guard import PIPE_CLOSED, GuardedCommand, GuardedGroup, with_flags
from picbench.errors import ConfigError


@click.command()
@click.option("--kv-blocks", "-k", type=int)
@click.option("--figure", "figures", multiple=True)
@click.option("--data")
@click.argument("paper", required=False)
def command(**_: object) -> None:
    """A command with options of several kinds."""


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("raise `kv_blocks`, or wait", "raise --kv-blocks, or wait"),
        ("`kv_blocks` 2: too few", "--kv-blocks 2: too few"),
        ("`data=hub` or `data=DIR`", "--data hub or --data DIR"),
        ("`data=hub:O/N[@R]`", "--data hub:O/N[@R]"),
        ("`figure=all`", "--figure all"),
        ("see picbench run `help`", "see picbench run --help"),
        ("`context` is too long, `chat=on`", "context is too long, chat=on"),
        ("`paper` is an argument", "paper is an argument"),
        ("kv_blocks, data=hub and --data stay", "kv_blocks, data=hub and --data stay"),
        ("`not a field` and `Neither`", "`not a field` and `Neither`"),
        ("a lone ` stays", "a lone ` stays"),
    ],
)
def test_options_of_the_command_are_printed_as_flags(text: str, printed: str) -> None:
    context = click.Context(command, help_option_names=["-h", "--help"])
    assert with_flags(text, context) == printed


@click.group(cls=GuardedGroup)
def main() -> None:
    """Commands that fail."""


@main.command(cls=GuardedCommand)
@click.option("--kv-blocks", type=int)
def fail(*, kv_blocks: int) -> None:
    """Fail with an error that names fields."""
    raise ConfigError(f"`kv_blocks` {kv_blocks}: too few", hint="or lower `context`")


def test_an_error_is_one_line_with_flags() -> None:
    result = CliRunner().invoke(main, ["fail", "--kv-blocks", "1"])
    assert result.exit_code == 2
    assert result.stderr == "picbench: --kv-blocks 1: too few (or lower context)\n"


def test_a_traceback_names_the_same_flags() -> None:
    result = CliRunner().invoke(main, ["fail", "--kv-blocks", "1", "--debug"])
    *traceback, line = result.stderr.splitlines()
    assert traceback[0].startswith("Traceback")
    assert traceback[-1].endswith(line.removeprefix("picbench: "))


@main.command()
@click.argument("number", type=int)
def refuse(number: int) -> None:
    """Fail as a file system does."""
    raise OSError(number, os.strerror(number), "some/file")


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.ENOSPC, 4, "some/file: No space left on device (make room"),
        (errno.EROFS, 2, "some/file: Read-only file system (name a place"),
        (errno.EEXIST, 2, "some/file: File exists (name a place"),
        (errno.EINVAL, 2, "some/file: Invalid argument (name a place"),
        (errno.ECONNRESET, 70, "internal error: ConnectionResetError"),
    ],
)
def test_what_a_file_system_refuses_is_no_bug(number: int, code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["refuse", str(number)])
    assert result.exit_code == code
    assert result.stderr.startswith(f"picbench: {said}")
    assert result.stderr.count("\n") == 1


@main.command()
def misuse() -> None:
    """Fail as a system call does that is given what it does not take."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_wrong_argument_is_a_bug_where_no_file_is_named() -> None:
    result = CliRunner().invoke(main, ["misuse"])
    assert (result.exit_code, result.stderr.count("internal error")) == (70, 1)


@main.command()
def fill() -> None:
    """Fail as a writer does that says which file it was."""
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigError(f"`data` x: {error.strerror}", hint="name another") from error


def test_a_full_disk_is_exit_4_whoever_notices() -> None:
    result = CliRunner().invoke(main, ["fill"])
    assert (result.exit_code, result.stderr.count("\n")) == (4, 1)


def test_a_reader_that_goes_away_is_no_regression() -> None:
    result = CliRunner().invoke(main, ["refuse", str(errno.EPIPE)])
    assert (result.exit_code, result.stderr) == (PIPE_CLOSED, "")


@main.command()
def draw() -> None:
    """Print what no EUC-JP has, and a name of a file that is no text."""
    click.echo("a ◣ b")
    click.echo("c \udcff d")


def test_what_a_terminal_cannot_show_is_no_bug() -> None:
    result = CliRunner(charset="euc_jp").invoke(main, ["draw"])
    assert (result.exit_code, result.stdout) == (0, "a ? b\nc ? d\n")
