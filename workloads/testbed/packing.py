"""Training sequences: examples one after another, tokenized exactly as rows are.

A sequence has no padding: the next example begins where the last one ends, and is cut off where
the sequence is full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from picbench.workloads.testbed.example import Example, Level
from picbench.workloads.testbed.generate import DATASETS, example
from picbench.workloads.testbed.passages import Manner
from picbench.workloads.testbed.prompt import prompt
from picbench.workloads.testbed.tokenizer import BOS, EOS, LINKS

#: How often a sequence starts an example of each data set.
_SHARES = MappingProxyType(
    {"musique": 4, "2wikimqa": 4, "hotpotqa": 4, "samsum": 2, "multi_news": 4, "needle": 1}
)
#: Tokens of the largest context of each data set.
_LARGEST = MappingProxyType(
    {
        "musique": 2200,
        "2wikimqa": 1150,
        "hotpotqa": 1150,
        "samsum": 1800,
        "multi_news": 900,
        "needle": 3900,
    }
)
_TURNS = MappingProxyType(
    {"musique": 20, "2wikimqa": 20, "hotpotqa": 20, "samsum": 6, "multi_news": 0, "needle": 6}
)

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length, (rows, tokens) each.

    `asked` is 1 on the tokens of replies and -1 on link tokens, which nobody has to predict;
    `chunk` numbers the chunk of a token from 1, or is 0 outside of chunks.
    """

    ids: Ids
    asked: Ids
    chunk: Ids


@dataclass(frozen=True, slots=True)
class Stage:
    """What a batch is made of: its size, how far the curriculum is (0 to 1), the chunks' links."""

    rows: int
    tokens: int
    progress: float = 1.0
    links: int = 0

    def level(self, dataset: str) -> Level:
        """How hard the examples of a data set are."""
        room = min(1.0, 0.8 * self.tokens / _LARGEST[dataset])
        plain = 1.0 - self.progress
        return Level(
            scale=room * (0.1 + 0.9 * self.progress),
            more=_TURNS[dataset],
            simple=0.15 + 0.6 * plain,
            manner=Manner(literal=0.15 + 0.85 * plain**2, named=0.5 + 0.5 * plain),
        )


class Packer:
    """Makes batches; the same stage, seed and number make the same batch."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._bos, self._eos = (tokenizer.token_to_id(token) for token in (BOS, EOS))
        self._links = [tokenizer.token_to_id(token) for token in LINKS]

    def batch(self, number: int, stage: Stage) -> Batch:
        """Make batch `number`."""
        rng = Random(f"{self._seed}/{number}")
        rows = [self._row(rng, stage) for _ in range(stage.rows)]
        ids, asked, chunk = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        return Batch(ids, asked, chunk)

    def _row(self, rng: Random, stage: Stage) -> list[list[int]]:
        row: list[list[int]] = [[], [], []]
        while len(row[0]) < stage.tokens:
            dataset = rng.choices(DATASETS, [_SHARES[name] for name in DATASETS])[0]
            index, seed = rng.randrange(1 << 30), rng.randrange(1 << 30)
            made = example(dataset, "train", index, seed, stage.level(dataset))
            self._append(row, dataset, made, stage.links)
        return [column[: stage.tokens] for column in row]

    def _append(self, row: list[list[int]], dataset: str, made: Example, links: int) -> None:
        parts = prompt(dataset, made.context, made.turn.input, self._count)
        # Only the last paragraph is said again for the turns after the first.
        tails = [prompt(dataset, "", turn.input, self._count).tail for turn in made.more]
        tails = [parts.tail, *("\n\n" + tail.rpartition("\n\n")[2] for tail in tails)]
        replies = [f" {turn.reply}" for turn in (made.turn, *made.more)]
        head, *rest = self._encode([parts.head, *parts.chunks, *tails, *replies])
        add = _Appender(row)
        add([self._bos, *head])
        for chunk in rest[: len(parts.chunks)]:
            add(chunk, chunk=True)
            add(self._links[:links], asked=-1)
        said = rest[len(parts.chunks) :]
        for tail, reply in zip(said[: len(tails)], said[len(tails) :], strict=True):
            add(tail)
            add([*reply, self._eos], asked=1)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._encode(texts)]


class _Appender:
    """Appends runs of tokens to a row, with their marks."""

    def __init__(self, row: list[list[int]]) -> None:
        self._ids, self._asked, self._chunk = row

    def __call__(self, ids: list[int], asked: int = 0, chunk: bool = False) -> None:
        number = max(self._chunk, default=0) + 1 if chunk else 0
        self._ids += ids
        self._asked += [asked] * len(ids)
        self._chunk += [number] * len(ids)
