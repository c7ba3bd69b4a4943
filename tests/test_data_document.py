"""docs/data.md: its fields, mappings and commands are those of the program."""

import re
import shlex
from pathlib import Path

import click
import pytest

from picbench.cli import main
from picbench.workloads import datasets
from picbench.workloads.sources.columns import FIELDS, NAMED, parse_columns
from picbench.workloads.sources.hub_split import is_split, parse_split

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
COMMANDS = re.findall(r"^ {4}picbench (.+)$", TEXT, re.M)
#: The commands; other lines show what a command prints.
TYPED = [command for command in COMMANDS if not command.startswith(":")]


def table(heading: str) -> dict[str, str]:
    rows = TEXT.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", rows, re.M))


def test_the_fields_are_those_there_are() -> None:
    said = table("field | what it is")
    assert {name: text.replace(" (`input=`)", "") for name, text in said.items()} == FIELDS


def test_the_named_mappings_are_those_there_are() -> None:
    assert list(table("name | rows of")) == list(NAMED)


def test_there_are_commands() -> None:
    assert len(TYPED) >= 10


@pytest.mark.parametrize("typed", TYPED)
def test_commands_have_flags_and_names_that_exist(typed: str) -> None:
    name, *arguments = shlex.split(typed)
    command = main.commands[name]
    if isinstance(command, click.Group):
        assert arguments[0] in command.commands
        return
    given = command.make_context(name, arguments, resilient_parsing=True).params
    flags = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= flags
    if given.get("dataset"):
        assert given["dataset"] in datasets.names()
    if given.get("columns"):
        parse_columns(given["columns"])
    if is_split(given.get("data") or ""):
        parse_split(given["data"])


def test_the_file_with_a_mapping_can_be_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.+?)```", TEXT, re.S)
    file = tmp_path / "mine.yaml"
    file.write_text(block)
    assert parse_columns(str(file)).of["input"] == "asked.0"
