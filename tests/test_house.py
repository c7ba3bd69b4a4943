"""Rules of the source tree that linters do not check: sizes, names and words."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("engines", "kernels", "picbench", "workloads")
FILES = tuple(sorted(path for top in SOURCES for path in (ROOT / top).rglob("*.py")))
PROSE = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

MOST_LINES = 60

#: Lines of each package, at most. They fall; a commit that raises one says what a user gets for it.
LINES = {"engines": 21_814, "kernels": 6_657, "picbench": 27_595, "workloads": 9_273}

#: Files of each package, at most. A file has one public noun, and rather 150 to 500 lines than few.
FILES_OF = {"engines": 21_619, "kernels": 6_638, "picbench": 96, "workloads": 80}

#: Classes whose names end in a word that has said too much before, at most.
NAMED = {"Cell": 10, "Run": 10, "Settings": 13}

#: Words that were given up, and what is said instead.
RETIRED = {
    r"\b(at rest|[Kk]eys? rests?|rests? (un)?rotated)\b": "cached with or without RoPE",
    r"_turns?\b|\bturns?_|\bTURNS\b|\bturn(s|ed|ing)? (the )?(query|key)": "re-rotate",
    r"\b[Ww]alk(s|ed|ing)?\b": "paged prefill in place",
    r"\b[Vv]isit(s|ed|ing)?\b": "tile schedule",
    r"\b[Tt]reatments?\b|\bdef treat\b": "ChunkPolicy, plan_chunk",
    r"\b[Pp]ieces?\b|\bPart\b": "segment",
    r"\bwire\b": "request args",
    r"\b[Cc]ouriers?\b": "tier client",
    r"\bOwnConnector\b": "connector scope",
    r"\b[Ss]upply\b": "chunk jobs",
    r"\bCoordinator\b": "chunk store",
    r"\b[Oo]bservers?\b": "block ledger",
    r"\b[Aa]dmissions?\b": "limits",
    r"\b[Cc]ontests?\b|\b[Rr]aces?\b": "engine comparison",
    r"\b[Ff]ollows? (a|its|the|no)? ?plans?\b": "planned request",
    r"\b([Hh]eard|[Hh]ears)\b": "is notified, receives",
    r"\b([Ss]ome|[Nn]o|[Aa]ny|[Ee]very)body\b": "the request, the caller, ...",
    r"(?<!left )\b[Bb]ehind\b": "after, below",
}

#: Text that models read, not prose about the program.
INVENTED = (ROOT / "workloads/synthetic",)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_twin(paths: list[Path]) -> bool:
    """Whether files differ only in the device: one below cpu/, one below cuda/."""
    devices = [{"cpu", "cuda"} & set(path.relative_to(ROOT).parts) for path in paths]
    return len(paths) == 2 and sorted(map(len, devices)) == [1, 1] and devices[0] != devices[1]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """What the errors of a file say: the strings in calls of error classes, and all hints."""
    for call in ast.walk(tree(path)):
        if not isinstance(call, ast.Call):
            continue
        made = call.func.id if isinstance(call.func, ast.Name) else ""
        error = made.endswith(("Error", "InvalidRun"))
        parts = [*call.args, *(word.value for word in call.keywords)] if error else []
        parts += [word.value for word in call.keywords if word.arg == "hint"]
        for part in parts:
            yield (
                part.lineno,
                "".join(
                    node.value
                    for node in ast.walk(part)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                ),
            )


def test_packages_are_not_cut_into_more_files() -> None:
    files = Counter(path.relative_to(ROOT).parts[0] for path in FILES)
    assert {top: count for top, count in files.items() if count > FILES_OF[top]} == {}


def test_packages_do_not_grow() -> None:
    lines = {
        top: sum(len(p.read_text().splitlines()) for p in FILES if p.is_relative_to(ROOT / top))
        for top in LINES
    }
    assert {top: found for top, found in lines.items() if found > LINES[top]} == {}


@pytest.mark.parametrize("word", NAMED)
def test_one_word_names_few_things(word: str) -> None:
    found = [
        node.name
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith(word)
    ]
    assert len(found) <= NAMED[word], found


def test_no_two_classes_share_a_name() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    assert {k: list(map(name, v)) for k, v in found.items() if len(v) > 1 and not is_twin(v)} == {}


def test_functions_are_short() -> None:
    """Outside kernels, whose loops are one function by nature."""
    long = [
        f"{name(path)}: {node.name}"
        for path in FILES
        if "kernels" not in path.relative_to(ROOT).parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno > MOST_LINES
    ]
    assert long == []


def test_only_the_command_line_names_its_flags() -> None:
    """Errors name fields in backticks; `picbench.cli.guard` turns them into flags.

    Hints may spell a whole command: ``picbench run --requests FILE makes one``.
    """
    flags = [
        f"{name(path)}:{line}: {text}"
        for path in FILES
        if not path.is_relative_to(ROOT / "picbench" / "cli")
        for line, text in messages(path)
        if re.search(r"(?<![\w-])--[a-z]", text) and not text.startswith("picbench ")
    ]
    assert flags == []


def test_what_pydantic_refuses_is_worded_in_one_place() -> None:
    words = [name(path) for path in FILES if "include_url" in path.read_text()]
    assert words == ["picbench/errors.py"]


def test_files_are_written_whole() -> None:
    """By `picbench.files`; what only grows is opened for appending."""
    calls = re.compile(r"\.write_(text|bytes)\(|\.savefig\((?!drawn)|open\(.w|to_csv\((?!index)")
    found = [
        name(path)
        for path in FILES
        if path.is_relative_to(ROOT / "picbench") and calls.search(path.read_text())
    ]
    assert found == ["picbench/files.py"]


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_stay_away(word: str) -> None:
    pattern = re.compile(word)
    texts = [p for p in FILES if not any(p.is_relative_to(i) for i in INVENTED)] + list(PROSE)
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], f"say: {RETIRED[word]}"
