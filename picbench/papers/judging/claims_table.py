"""The table of claims in a document, made from the papers' verdicts."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, DataError
from picbench.output import markdown
from picbench.papers.judging.judgement import VERDICTS
from picbench.whole_files import write_whole

BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"

#: Negative findings first.
_ORDER = ("fails", "holds", "undecided")

_COLUMNS = ("paper", "verdict", "claim", "published", "ours, 95 % interval", "where", "weights, n")


def write_claims(document: Path, papers: Sequence[tuple[str, Path]]) -> None:
    """Replace what is between the marks of a document by the table of the papers' verdicts.

    Raises ConfigError for a document without marks, DataError for verdicts that cannot be read.
    """
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(
            f"`claims` {document}: has not one pair of marks", hint=f"add {BEGIN} and {END}"
        )
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    table = claims_table(papers)
    write_whole(document, f"{head}{BEGIN}\n{table}\n{END}{tail}".encode())


def claims_table(papers: Sequence[tuple[str, Path]]) -> str:
    """Counts, then what was decided, in Markdown; the undecided are on the papers' pages.

    `papers` are (what to call it, folder with its verdicts).
    """
    found = [(title, _read(folder)) for title, folder in papers]
    lines = [
        markdown.table(("paper", *_ORDER), list(_counts(found)), right=1),
        "",
        markdown.table(
            _COLUMNS,
            [row for title, verdicts in found for row in _rows(title, verdicts)],
        ),
    ]
    return "\n".join(lines)


def _counts(found: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> Iterator[list[str]]:
    for title, verdicts in found:
        counts = Counter(verdict["verdict"] for verdict in verdicts)
        yield [title, *(str(counts[verdict]) for verdict in _ORDER)]


def _rows(title: str, verdicts: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for wanted in ("fails", "holds"):
        for found in verdicts:
            if found["verdict"] == wanted:
                low, high = found["interval"]
                interval = f" [{low:g}, {high:g}]"
                where, _, weights = found["run"].partition(": ")[2].partition("; ")
                yield [
                    title,
                    found["verdict"],
                    found["claim"],
                    found["published"],
                    f"{found['ours']}{interval}",
                    where,
                    weights,
                ]


def _read(folder: Path) -> list[dict[str, Any]]:
    path = folder / VERDICTS
    try:
        found: list[dict[str, Any]] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return found
