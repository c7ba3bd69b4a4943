"""Help: commands in groups, an example for each, summaries that are not cut, columns that fit."""

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from picbench.cli import main

EXAMPLE = re.compile(r"Example: (picbench .*)", re.S)


def text(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.stdout


def test_commands_are_in_groups_of_which_sixteen_are_told() -> None:
    shown = text("--help")
    titles = re.findall(r"^(\w+):$", shown, re.M)
    assert titles[-5:] == ["Decide", "Measure", "Judge", "Serve", "Develop"]
    _, *commands = re.split(r"^Decide:$", shown, flags=re.M)
    told = set(re.findall(r"^  (\w+) ", commands[0], re.M)) - {"also"}
    others = re.findall(r"^  also +(.*)$", commands[0], re.M)
    assert len(told) <= 16
    assert told | set(", ".join(others).split(", ")) == set(main.commands)
    assert "..." not in commands[0]
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_an_example_that_it_takes(name: str) -> None:
    found = EXAMPLE.search(text(name, "--help"))
    assert found
    words = shlex.split(" ".join(found[1].split()))
    assert words[:2] == ["picbench", name]
    command: click.Command = main
    for word in words[1:]:
        if isinstance(command, click.Group):
            command = command.commands[word]
    flags = {flag for option in command.params for flag in option.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "columns", "models", "tiers"])
def test_lists_are_columns_of_a_hundred_characters(kind: str) -> None:
    lines = text("list", kind).splitlines()
    assert max(map(len, lines)) <= 100
    if kind == "algorithms":
        assert lines[0].split(maxsplit=1)[0] == "algorithm"
