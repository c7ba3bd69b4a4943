"""What a shell is told when it asks how a command line may go on."""

import os
import subprocess
import sys

import pytest


def complete(words: str) -> list[str]:
    """The words that bash offers for the last one of `words`."""
    asked = {
        "_PICBENCH_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from picbench.cli import main; main(prog_name='picbench')"],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("picbench ga", ["gate"]),
        ("picbench run --tens", ["--tensor-parallel"]),
        ("picbench run --algo mep", ["mepic"]),
        ("picbench run --algo full,mep", ["full,mepic"]),
        ("picbench run --dataset mus", ["musique"]),
        ("picbench run --model testbed:b", ["testbed:block"]),
        ("picbench run --model nothing", ["nothing"]),  # As a folder: see below.
    ],
)
def test_the_shell_offers_what_fits(words: str, expected: list[str]) -> None:
    assert complete(words) == expected
