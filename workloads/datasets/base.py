"""The interface of a data set: rows, a prompt, chunks, a score."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import ClassVar, Literal

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.metrics.f1 import comparable, f1, string_match, wordless
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.prompts.segmentation import Counter, before, by_tokens
from picbench.workloads.prompts.template import Template
from picbench.workloads.sources.row import BadRows, DatasetRow, placed, read_rows
from picbench.workloads.sources.source import RowSource, no_rows

Metric = Literal["f1", "rouge-l", "string-match"]

#: What data sets say in place of an answer (Qasper, QuAC).
_NO_ANSWER = ("unanswerable", "cannotanswer")


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read.

    `count` counts tokens, `bad` handles malformed rows. The other fields are for data sets that
    generate their rows: `seed`, `room` (the most tokens of a context; None: no bound) and `grid`
    (None: the data set's own).
    """

    count: Counter
    seed: int = 0
    room: int | None = None
    bad: BadRows = field(default_factory=BadRows)
    grid: Grid | None = None


class Dataset:
    """One data set of one task.

    `summary` is one line for `picbench list`; `max_tokens` how many tokens a reply may have;
    `template` the prompt in picbench's own words; `metric` how replies are scored. `chat` is
    whether the tokenizer's chat template wraps the prompt: LongBench (pred.py) omits it where
    examples show the form of the reply. Rows of a `generated` one are made from the seed.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[Metric]
    max_tokens: ClassVar[int]
    template: ClassVar[Template]
    chat: ClassVar[bool] = True
    generated: ClassVar[bool] = False

    def marked(self, context: str) -> list[str]:
        """Cut a context at its marks, such as ``Passage 1:``; the concatenation is the context."""
        return [context]

    def split(self, context: str, count: Counter) -> list[str]:
        """Cut a context into chunks: at its marks, or by tokens where there are none."""
        chunks = self.marked(context)
        return chunks if len(chunks) > 1 else by_tokens(context, count)

    def before(
        self, chunks: Sequence[str], documents: Sequence[Hashable] = (), places: Sequence[int] = ()
    ) -> list[str]:
        """For each chunk of a context, the text of its document that precedes it.

        `documents` names the document of each chunk, and `places` its place there, where the row
        does. A context without marks is one document; where the order of chunks in their documents
        is not known, each stands alone.
        """
        if documents:
            return before(chunks, documents, places)
        if len(self.marked("".join(chunks))) > 1:
            return [""] * len(chunks)
        return list(accumulate(chunks, initial=""))[:-1]

    def rows(self, data: RowSource, reading: Reading) -> Iterator[DatasetRow]:
        """Read the rows in `data`, round-robin over its files in the order of their names.

        A run of only the first rows thus sees every file. Raises ConfigError where there is no
        file, or for a grid where rows are not generated, and DataError at a malformed row.
        """
        if reading.grid is not None:
            raise ConfigError(
                f"`grid`: the rows of {self.name!r} are there already",
                hint="`grid` needs a `dataset` of ruler, or needle and `data=DIR` with text files",
            )
        streams = data.streams(self.name)
        if not streams:
            raise no_rows(data.path, self.name, f"{self.name}/*.jsonl or {self.name}.jsonl in it")
        rows = [read_rows(stream, self.name, reading.bad, data.columns) for stream in streams]
        yield from _answered(_round_robin(rows), reading.bad)

    def extract(self, prediction: str) -> str:
        """Return the part of a reply that is scored: all of it."""
        return prediction

    def abstained(self, prediction: str) -> bool:
        """Return whether a reply says that the answer is not in the prompt; never by default."""
        return False

    def score(self, prediction: str, answers: Sequence[str]) -> float:
        """Return the score of a reply by `metric` against its best answer, from 0 to 1."""
        known = {"f1": f1, "rouge-l": rouge_l, "string-match": string_match}
        return self.best(known[self.metric], prediction, answers)

    def best(
        self, metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]
    ) -> float:
        """Return the highest `metric` of (reply, answer); 0 without an answer that has a word.

        Texts that look the same are the same, in whatever Unicode form they are.
        """
        reply = comparable(self.extract(prediction))
        known = (comparable(answer) for answer in answers if not wordless(answer))
        return max((metric(reply, answer) for answer in known), default=0.0)


def _round_robin(streams: list[Iterator[DatasetRow]]) -> Iterator[DatasetRow]:
    for rows in zip_longest(*streams):
        yield from (row for row in rows if row is not None)


def _answered(rows: Iterator[DatasetRow], bad: BadRows) -> Iterator[DatasetRow]:
    """The rows with those of their answers that a reply can match; rows without go to `bad`."""
    for row in rows:
        answers = tuple(answer for answer in row.answers if not wordless(answer))
        if all(answer.strip(" .").lower() in _NO_ANSWER for answer in answers):
            error = f"field 'answers': no reply can match {row.answers[0]!r}"
            hint = "an answer has a word that is no article"
            bad.reject(placed(row.source, DataError(error, hint=hint)))
        else:
            yield replace(row, answers=answers)
