"""Options that several commands have."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from picbench.cli import main


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_margin_is_a_number(command: str, tmp_path: Path) -> None:
    """NaN is not outside of any range, and ended these commands as a bug."""
    found = CliRunner().invoke(main, (command, str(tmp_path), "--margin", "nan"))
    assert found.exit_code == 2
    [line] = found.stderr.splitlines()
    assert "--margin" in line
    assert "'nan' is not a number" in line


@pytest.mark.parametrize("command", [("explain", "mepic"), ("report", "no-run"), ("traffic",)])
@pytest.mark.parametrize("place", ["file/out", "folder"])
def test_a_file_that_cannot_be_is_refused_at_once(
    command: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    found = CliRunner().invoke(main, (*command, "--output", str(tmp_path / place)))
    assert found.exit_code == 2
    [line] = found.stderr.splitlines()
    assert "--output" in line
    assert str(tmp_path / place) in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_an_option_means_the_same_in_every_command() -> None:
    """One type and one default; what it is for may be said in other words."""
    kinds: dict[str, set[tuple[str, str]]] = {}
    for name in ("run", "doctor", "selftest", "warm", "sweep", "compare", "gate", "table", "show"):
        command = main.commands[name]
        for parameter in command.params:
            if parameter.name in ("debug", "device", "dtype", "offline", "quiet"):
                kind = (str(parameter.type), str(parameter.default))
                kinds.setdefault(parameter.name, set()).add(kind)
    assert {name: len(found) for name, found in kinds.items()} == dict.fromkeys(kinds, 1)
    assert len(kinds) == 5


def leaves(group: click.Group = main) -> Iterator[click.Command]:
    """The commands that do something."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from leaves(command)
        else:
            yield command


def test_no_command_and_no_flag_is_lost() -> None:
    """They are made of settings: whoever adds or drops one says so here."""
    found = list(leaves())
    flags = [flag for command in found for p in command.params for flag in p.opts if flag[0] == "-"]
    assert (len(found), len(flags)) == (48, 362)
