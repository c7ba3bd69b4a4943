"""Score the testbed model under position-independent reuse, without any engine.

Run ``python -m picbench.workloads.testbed.evaluate DIR`` to score a model folder.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer

from picbench.workloads.testbed.decode import generate
from picbench.workloads.testbed.files import load
from picbench.workloads.testbed.generate import DATASETS, rows
from picbench.workloads.testbed.model import Llama
from picbench.workloads.testbed.pic import ARMS, Arm, Tokens, collate, expand
from picbench.workloads.testbed.prompt import dataset, prompt
from picbench.workloads.testbed.reply import MAX_TOKENS, answer
from picbench.workloads.testbed.tokenizer import BOS, EOS, LINKS

_ROWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Item:
    """A row, tokenized."""

    row: dict[str, Any]
    tokens: Tokens


class Judge:
    """Scores a model on rows of the invented world."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._bos, self._eos = (tokenizer.token_to_id(token) for token in (BOS, EOS))
        self._links = [tokenizer.token_to_id(token) for token in LINKS]
        self._device = next(model.parameters()).device

    def table(
        self, arms: Sequence[Arm] = ARMS, count: int = 200, names: Sequence[str] = DATASETS
    ) -> dict[str, dict[str, float]]:
        """The mean score of every arm on every data set."""
        found: dict[str, dict[str, float]] = {arm.name: {} for arm in arms}
        for name in names:
            items = self.items(rows(name, count=count))
            for arm in arms:
                scores = [score for score, _ in self.judge(items, arm)]
                found[arm.name][name] = round(fmean(scores), 4)
        return found

    def items(self, found: Sequence[dict[str, Any]]) -> list[Item]:
        """Tokenize rows, sorted by length."""
        items = [Item(row, self._tokens(row)) for row in found]
        return sorted(items, key=lambda item: sum(map(len, item.tokens.chunks)))

    def judge(self, items: Sequence[Item], arm: Arm) -> Iterator[tuple[float, str]]:
        """Yield the score and the reply of every item."""
        for start in range(0, len(items), _ROWS_AT_ONCE):
            group = items[start : start + _ROWS_AT_ONCE]
            prompts = [item.tokens for item in group]
            if arm.shuffled:
                others = prompts[1:] + prompts[:1]
                prompts = list(map(_with_chunks_of, prompts, others))
            slots = [expand(tokens, arm, self._links) for tokens in prompts]
            layout = collate(slots).to(self._device)
            limit = MAX_TOKENS[group[0].row["dataset"]]
            said = generate(self._model, layout, limit, self._eos, arm.anchored)
            for item, ids in zip(group, said, strict=True):
                yield self._score(item.row, self._tokenizer.decode(ids))

    def _score(self, row: dict[str, Any], reply: str) -> tuple[float, str]:
        name = row["dataset"]
        return dataset(name).score(answer(name, reply), row["answers"]), reply

    def _tokens(self, row: dict[str, Any]) -> Tokens:
        parts = prompt(row["dataset"], row["context"], row["input"], self._count)
        head, *rest = self._encode([parts.head, *parts.chunks, parts.tail])
        return Tokens([self._bos, *head], rest[:-1], rest[-1])

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._encode(texts)]


def _with_chunks_of(tokens: Tokens, other: Tokens) -> Tokens:
    """Chunks of the same lengths, filled with what another request has in its chunks."""
    foreign = [token for chunk in other.chunks for token in chunk]
    chunks, start = [], 0
    for chunk in tokens.chunks:
        chunks.append([foreign[(start + i) % len(foreign)] for i in range(len(chunk))])
        start += len(chunk)
    return tokens._replace(chunks=chunks)


def main(folder: Path) -> None:
    """Print the table of a model folder as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(folder, device)
    print(json.dumps(Judge(model, tokenizer).table(), indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
