"""The documents: every path, module and command that they name exists."""

import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("engines", "kernels", "picbench", "workloads")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/serving.md")

#: A path from the repository's root; upstream paths (vllm/...) start elsewhere.
PATH = re.compile(
    r"(?<![\w./-])((?:engines|kernels|picbench|workloads|tests|docs|results)/[\w./*-]*)"
)
LINK = re.compile(r"\]\(([^)#:]+)\)")
MODULE = re.compile(r"(?<![\w.\"'/-])picbench(?:\.\w+)+")
#: `file` (`name`): the file defines the name.
NAMED = re.compile(r"`([\w./]+\.(?:py|toml))` \(((?:`\w+`(?:, )?)+)\)")
TARGET = re.compile(r"(?:`| {4})make ([\w-]+)")


def read(document: str) -> str:
    return (ROOT / document).read_text()


def entry_points() -> set[str]:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    return set(project["entry-points"])


def file_of(module: str) -> Path | None:
    """The file of a module, or of the module that a dotted name is defined in."""
    parts = module.split(".")[1:]
    top = ROOT if parts[0] in SOURCES else ROOT / "picbench"
    for count in range(len(parts), 0, -1):
        for path in (
            top.joinpath(*parts[:count]).with_suffix(".py"),
            top.joinpath(*parts[:count], "__init__.py"),
        ):
            if path.is_file():
                text = path.read_text()
                known = all(re.search(rf"\b{name}\b", text) for name in parts[count:])
                return path if known else None
    return None


def folders() -> Iterator[str]:
    for top in SOURCES:
        for file in (ROOT / top).rglob("__init__.py"):
            yield file.parent.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document: str) -> None:
    text = read(document)
    links = ((ROOT / document).parent / link for link in LINK.findall(text))
    paths = (ROOT / path.rstrip(".") for path in PATH.findall(text))
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in chain(links, paths)
        if not any(path.parent.glob(path.name))
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_exist(document: str) -> None:
    found = set(MODULE.findall(read(document))) - entry_points()
    assert [module for module in sorted(found) if file_of(module) is None] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_are_where_the_documents_say(document: str) -> None:
    stale = [
        (path, name)
        for path, names in NAMED.findall(read(document))
        for name in re.findall(r"\w+", names)
        if not re.search(rf"\b{name}\b", read(path))
    ]
    assert stale == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = read("Makefile")
    wanted = set(TARGET.findall(read(document)))
    assert [name for name in sorted(wanted) if f"\n{name}:" not in makefile] == []


def test_the_tree_names_every_folder() -> None:
    text = read("docs/architecture.md")
    assert [name for name in sorted(folders()) if f"{name}/ " not in text] == []
