"""Rows of the testbed's data sets as tokens of its model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from picbench.workloads import models

if TYPE_CHECKING:
    from picbench.workloads.testbed.lm.pic import PromptTokens


def testbed_folder() -> Path:
    """Where the testbed's model lies."""
    return Path(models.resolve("testbed").path)


def testbed_prompts(dataset: str, count: int) -> Iterator["PromptTokens"]:
    """The first rows of a data set."""
    from tokenizers import Tokenizer

    from picbench.workloads.testbed import rows
    from picbench.workloads.testbed.lm.judge import tokens_of
    from picbench.workloads.testbed.testbed_tokenizer import Coder

    coder = Coder(Tokenizer.from_file(str(testbed_folder() / "tokenizer.json")))
    for row in rows(dataset, count=count):
        yield tokens_of(row, coder)
