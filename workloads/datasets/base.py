"""What a data set is: rows, a prompt, chunks, a score."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar, Literal

from picbench.errors import ConfigError
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.metrics.f1 import f1
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.prompts.segmentation import Counter, by_tokens
from picbench.workloads.prompts.template import Template
from picbench.workloads.sources.row import BadRows, DatasetRow, read_rows
from picbench.workloads.sources.source import no_rows, row_files

Metric = Literal["f1", "rouge-l"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read.

    `count` tells tokens, `bad` meets malformed rows. Only data sets that make their rows look at
    the rest: `seed`, `room` (how many tokens a context may have; None: no bound) and `grid`
    (None: their own).
    """

    count: Counter
    seed: int = 0
    room: int | None = None
    bad: BadRows = field(default_factory=BadRows)
    grid: Grid | None = None


class Dataset:
    """One data set of one task.

    `summary` is one line for `picbench list`; `max_tokens` how many tokens a reply may have;
    `template` the prompt in picbench's own words; `metric` how replies are scored. `chat` says
    whether a chat template goes around the prompt where the tokenizer has one: LongBench (pred.py)
    leaves it out where examples teach the form of the reply.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[Metric]
    max_tokens: ClassVar[int]
    template: ClassVar[Template]
    chat: ClassVar[bool] = True

    def marked(self, context: str) -> list[str]:
        """Cut a context where its parts are marked; put together they are the context again."""
        return [context]

    def split(self, context: str, count: Counter) -> list[str]:
        """Cut a context into chunks: at its marks, or by tokens where it has no two parts."""
        parts = self.marked(context)
        return parts if len(parts) > 1 else by_tokens(context, count)

    def rows(self, data: Path, reading: Reading) -> Iterator[DatasetRow]:
        """Read the rows in `data`, one from each file in turn, files in the order of their names.

        So a run that takes only the first rows sees every file.
        Raises ConfigError where there is no file, or a grid that nothing can be made of, and
        DataError at a malformed row.
        """
        if reading.grid is not None:
            raise ConfigError(
                f"`grid`: the rows of {self.name!r} are there already",
                hint="`grid` needs `dataset=needle` and `data=DIR` with text files",
            )
        files = row_files(data, self.name)
        if not files:
            raise no_rows(data, self.name, f"{self.name}/*.jsonl or {self.name}.jsonl in it")
        yield from _in_turn([read_rows(file, self.name, reading.bad) for file in files])

    def extract(self, prediction: str) -> str:
        """Return the part of a reply that is scored: all of it."""
        return prediction

    def score(self, prediction: str, answers: Sequence[str]) -> float:
        """Return LongBench's score of a reply against its best answer, from 0 to 1."""
        return self.best(f1 if self.metric == "f1" else rouge_l, prediction, answers)

    def best(
        self, metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]
    ) -> float:
        """Return the highest `metric` of (reply, answer); 0 without answers."""
        reply = self.extract(prediction)
        return max((metric(reply, answer) for answer in answers), default=0.0)


def _in_turn(streams: list[Iterator[DatasetRow]]) -> Iterator[DatasetRow]:
    for turn in zip_longest(*streams):
        yield from (row for row in turn if row is not None)
