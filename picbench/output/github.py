"""What GitHub Actions shows of a result: the job's summary, and annotations."""

import os
from pathlib import Path
from typing import TextIO

from picbench.whole_files import naming

#: Names the file that a step's summary is appended to.
SUMMARY_FILE = "GITHUB_STEP_SUMMARY"


def write_step_summary(markdown: str, stream: TextIO) -> None:
    """Append Markdown to the summary of the step; to `stream` where there is no GitHub Actions."""
    path = os.environ.get(SUMMARY_FILE)
    if path:
        with naming(Path(path)), Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown)
    else:
        stream.write(markdown)


def annotation(level: str, title: str, message: str) -> str:
    """A workflow command that annotates the run: `level` is error, warning or notice."""
    return f"::{level} title={_escape(title, ',:')}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
