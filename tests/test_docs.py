"""The documents: every path, module and command that they name exists."""

import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from picbench.cli import main
from picbench.engines.algorithms import parse
from picbench.figures.picture import PlanPicture, TokenRole
from picbench.figures.plan import example_picture, fingerprint

ROOT = Path(__file__).parents[1]
SOURCES = ("engines", "kernels", "picbench", "workloads")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "results/README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")),
)
ADDING = "docs/adding-an-algorithm.md"
ALGORITHMS = "docs/algorithms.md"
THIRD_PARTY = "tests/engines/algorithms/third_party"

#: A path from the repository's root; upstream paths (vllm/...) start elsewhere.
PATH = re.compile(
    r"(?<![\w./-])((?:engines|kernels|picbench|workloads|tests|docs|results)/[\w./*-]*)"
)
LINK = re.compile(r"\]\(([^)#:]+)\)")
#: A section of a page, or of the page itself.
ANCHOR = re.compile(r"\]\(([^)#:]*\.md|)#([^)]+)\)")
MODULE = re.compile(r"(?<![\w.\"'/-])picbench(?:\.\w+)+")
#: `file` (`name`): the file defines the name.
NAMED = re.compile(r"`([\w./]+\.(?:py|toml))` \(((?:`\w+`(?:, )?)+)\)")
#: ![algorithm](file of its picture)
PICTURE = re.compile(r"^!\[(.+)\]\((.+\.png)\)$", re.M)
SECTION = re.compile(r"^## (\S+)$", re.M)
#: A command, as long as nothing in it stands for something else.
COMMAND = re.compile(r"^ {4}picbench (explain [^#\n]*?) *(?:#.*)?$", re.M)
#: A command with its flags, on a line of its own.
COMMAND_LINE = re.compile(r"^ {4}picbench (.*)$", re.M)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
#: A flag in running text, alone or in a command of picbench.
SPAN = re.compile(r"`((?:picbench [^`\n]*)?--[^`\n]*)`")
#: Flags of other programs that the documents name.
FOREIGN = {
    "--additional-config",
    "--api-key",
    "--api-server-count",
    "--block-size",
    "--chat-template",
    "--data-parallel-size",
    "--enable-log-requests",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--kv-transfer-config",
    "--max-log-len",
    "--load-format",
    "--max-cudagraph-capture-size",
    "--max-model-len",
    "--otlp-traces-endpoint",
    "--middleware",
    "--no-async-scheduling",
    "--no-enable-prefix-caching",
    "--no-enforce-eager",
    "--port",
    "--scheduler-cls",
    "--served-model-name",
    "--shutdown-timeout",
    "--worker-cls",
}
#: A test by its file and its name.
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
TARGET = re.compile(r"(?:`| {4})make ([\w-]+)")


def read(document: str) -> str:
    return (ROOT / document).read_text()


def entry_points() -> set[str]:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    return set(project["entry-points"])


def algorithms() -> list[str]:
    """picbench's own algorithms."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    return list(project["entry-points"]["picbench.algorithms"])


def picture(spec: str) -> PlanPicture:
    """What `make pictures` draws."""
    return example_picture(parse(spec), chunks=4, tokens=40)


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


def flags_of(words: list[str]) -> set[str]:
    """The flags of the command that begins with these words."""
    command: click.Command = main
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.commands[word]
    return {"--help", *(flag for option in command.params for flag in option.opts)}


def commands(group: click.Command = main) -> Iterator[click.Command]:
    """A command and all below it."""
    yield group
    if isinstance(group, click.Group):
        for command in group.commands.values():
            yield from commands(command)


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
def test_sections_that_are_linked_exist(document: str) -> None:
    missing = []
    for page, section in ANCHOR.findall(read(document)):
        file = (ROOT / document).parent / page if page else ROOT / document
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        if section not in slugs:
            missing.append(f"{page}#{section}")
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
def test_tests_are_where_the_documents_say(document: str) -> None:
    found = TEST.findall(read(document))
    assert [test for test in found if f"\ndef {test[1]}(" not in read(test[0])] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = read("Makefile")
    wanted = set(TARGET.findall(read(document)))
    assert [name for name in sorted(wanted) if f"\n{name}:" not in makefile] == []


def test_the_readme_is_read_in_one_go() -> None:
    text = read("README.md")
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 12_000


def test_the_index_names_every_page() -> None:
    index = read("docs/README.md")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in sorted(pages) if f"]({name}" not in index] == []


def test_the_tree_names_every_folder() -> None:
    text = read("docs/architecture.md")
    assert [name for name in sorted(folders()) if f"{name}/ " not in text] == []


@pytest.mark.parametrize("algorithm", algorithms())
def test_each_algorithm_has_a_section_with_its_picture(algorithm: str) -> None:
    _, *parts = SECTION.split(read(ALGORITHMS))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert algorithm in sections, f"write a section about it in {ALGORITHMS}"
    specs = [spec for spec, _ in PICTURE.findall(sections[algorithm])]
    assert parse(algorithm).spec in specs
    assert f"](#{algorithm})" in read(ALGORITHMS)


@pytest.mark.parametrize(("spec", "file"), PICTURE.findall(read(ALGORITHMS)))
def test_pictures_are_those_of_the_plans(spec: str, file: str) -> None:
    with Image.open(ROOT / "docs" / file) as image:
        drawn = image.info["Description"]
    assert drawn == f"{spec}; {fingerprint(picture(spec))}", "run make pictures"


def test_the_table_of_algorithms_is_that_of_the_plans() -> None:
    found = re.findall(r"^\| `(.+?)` \| (.+) \|$", read(ALGORITHMS), re.M)
    assert {parse(spec).name for spec, _ in found} == set(algorithms())
    for spec, cells in found:
        plan = picture(spec)
        counts = [
            sum(segment.compiled for segment in plan.segments),
            plan.count(TokenRole.LINKED),
            plan.computed,
            *(len(plan.blocks_of(kind)) for kind in ("shared", "copied", "computed")),
        ]
        assert cells.split(" | ") == list(map(str, counts)), spec


def test_commands_that_explain_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = COMMAND.findall(read(ALGORITHMS))
    assert len(commands) == 2
    for command in commands:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output


def test_every_command_is_in_a_document() -> None:
    text = "\n".join(map(read, DOCUMENTS))
    assert [name for name in main.commands if f"picbench {name}" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_in_documents_exist(document: str) -> None:
    unknown = [
        (line, flag)
        for line in COMMAND_LINE.findall(read(document))
        for flag in FLAG.findall(line)
        if flag not in flags_of(line.split())
    ]
    assert unknown == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_in_sentences_exist(document: str) -> None:
    options = [option for command in commands() for option in command.params]
    known = {flag for each in options for flag in (*each.opts, *each.secondary_opts)}
    spans = SPAN.findall(read(document))
    unknown = {flag for span in spans for flag in FLAG.findall(span)} - known - FOREIGN
    assert unknown - {"--help"} == set()


def test_every_command_has_a_help() -> None:
    assert [command.name for command in commands() if not command.help] == []


@pytest.mark.parametrize("file", ["pic_edges.py", "pyproject.toml"])
def test_the_worked_example_is_the_package_that_is_tested(file: str) -> None:
    assert f"\n{read(f'{THIRD_PARTY}/{file}')}```" in read(ADDING)
