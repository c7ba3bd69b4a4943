"""Training sequences: concatenated examples, tokenized exactly as rows are.

A sequence has no padding: the last example is cut off where the sequence is full.
"""

from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from picbench.workloads.synthetic.example import Example, Level
from picbench.workloads.synthetic.generate import DATASETS, example
from picbench.workloads.synthetic.passages import Manner
from picbench.workloads.testbed.prompt import Coder, prompt

#: Tokens of the largest context of each data set.
_LARGEST = MappingProxyType(
    {
        "musique": 2200,
        "2wikimqa": 1150,
        "hotpotqa": 1150,
        "samsum": 1800,
        "multi_news": 900,
        "needle": 3800,
    }
)
_FURTHER = MappingProxyType(
    {"musique": 20, "2wikimqa": 20, "hotpotqa": 20, "samsum": 6, "multi_news": 0, "needle": 6}
)

Ids = npt.NDArray[np.int32]


class Shares(NamedTuple):
    """Relative frequencies of the data sets, in the order of DATASETS."""

    musique: int = 4
    wikimqa: int = 4
    hotpotqa: int = 4
    samsum: int = 2
    multi_news: int = 4
    needle: int = 2


USUAL = Shares()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences of one length, (rows, tokens) each.

    `loss_on` is 1 on the tokens of replies and -1 on link tokens, which are not predicted; `chunk`
    is the number of a token's chunk from 1, or 0 outside of chunks.
    """

    ids: Ids
    loss_on: Ids
    chunk: Ids


@dataclass(frozen=True, slots=True)
class Stage:
    """The composition of a batch.

    Its size, the progress of the curriculum (0 to 1), the links after each chunk, and the shares
    of the data sets.
    """

    rows: int
    tokens: int
    progress: float = 1.0
    links: int = 0
    shares: Shares = USUAL

    def level(self, dataset: str) -> Level:
        """How hard the examples of a data set are."""
        room = min(1.0, 0.8 * self.tokens / _LARGEST[dataset])
        plain = 1.0 - self.progress
        manner = Manner()
        return Level(
            scale=room * (0.1 + 0.9 * self.progress),
            more=_FURTHER[dataset],
            simple=0.15 + 0.6 * plain,
            even=True,
            manner=Manner(
                literal=manner.literal + (1 - manner.literal) * plain**2,
                named=manner.named + (1 - manner.named) * plain,
                cut=manner.cut * self.progress,
            ),
        )


class Packer:
    """Makes batches; the same stage, seed and number make the same batch."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._coder = Coder(tokenizer)
        self._seed = seed

    def batch(self, number: int, stage: Stage) -> PackedBatch:
        """Make batch `number`."""
        rng = Random(f"{self._seed}/{number}")
        rows = [self._row(rng, stage) for _ in range(stage.rows)]
        columns = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        return PackedBatch(*columns)

    def _row(self, rng: Random, stage: Stage) -> list[list[int]]:
        row = _Sequence()
        while len(row.ids) < stage.tokens:
            dataset = rng.choices(DATASETS, stage.shares)[0]
            index, seed = rng.randrange(1 << 30), rng.randrange(1 << 30)
            made = example(dataset, "train", index, seed, stage.level(dataset))
            self._append(row, dataset, made, stage.links)
        return [column[: stage.tokens] for column in (row.ids, row.loss_on, row.chunk)]

    def _append(self, row: "_Sequence", dataset: str, made: Example, links: int) -> None:
        coder = self._coder
        texts = prompt(dataset, made.context, made.exchange.input, coder.count)
        head, *chunks = coder.encode([texts.head, *texts.chunks])
        row.add([coder.bos, *head])
        for chunk in chunks:
            row.add_chunk(chunk)
            row.add(coder.links[:links], loss_on=-1)
        for tail, reply in zip(*self._exchanges(dataset, made, texts.tail), strict=True):
            row.add(tail)
            row.add([*reply, coder.eos], loss_on=1)

    def _exchanges(
        self, dataset: str, made: Example, tail: str
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Questions and replies; from the second on, a question is a prompt's last paragraph."""
        others = (
            prompt(dataset, "", further.input, self._coder.count).tail for further in made.more
        )
        tails = [tail, *("\n\n" + other.rpartition("\n\n")[2] for other in others)]
        replies = [f" {further.reply}" for further in (made.exchange, *made.more)]
        return self._coder.encode(tails), self._coder.encode(replies)


@dataclass(slots=True)
class _Sequence:
    """A sequence that grows: ids, and the marks of `PackedBatch`."""

    ids: list[int] = field(default_factory=list)
    loss_on: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    _chunks: int = 0

    def add(self, ids: list[int], loss_on: int = 0, chunk: int = 0) -> None:
        self.ids += ids
        self.loss_on += [loss_on] * len(ids)
        self.chunk += [chunk] * len(ids)

    def add_chunk(self, ids: list[int]) -> None:
        self._chunks += 1
        self.add(ids, chunk=self._chunks)
