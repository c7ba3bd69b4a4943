"""Scores of a model under position-independent reuse, without an engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer

from picbench.workloads.synthetic.generate import DATASETS, rows
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer
from picbench.workloads.testbed.llama import Llama
from picbench.workloads.testbed.pic import (
    PaddedBatch,
    PromptTokens,
    ReuseArm,
    collate,
    expand,
    visible,
)
from picbench.workloads.testbed.prompt import Coder, dataset, prompt

#: Rows of a batch on a GPU and elsewhere: masks take memory with the square of the length.
_AT_ONCE = {"cuda": 200, "cpu": 4}


@dataclass(frozen=True, slots=True)
class Item:
    """A row, tokenized."""

    row: dict[str, Any]
    tokens: PromptTokens


class Judge:
    """Scores a model on rows of the invented world."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self._model = model
        self._coder = Coder(tokenizer)
        self._device = next(model.parameters()).device

    def table(self, arms: Sequence[ReuseArm], count: int) -> dict[str, dict[str, float]]:
        """The mean score of every arm on the first `count` rows of every data set."""
        found: dict[str, dict[str, float]] = {arm.name: {} for arm in arms}
        for name in DATASETS:
            items = self.items(rows(name, count=count))
            for arm in arms:
                mean = round(fmean(score for score, _ in self.judge(items, arm)), 4)
                found[arm.name][name] = mean
                print(f"{name}: {arm.name} {mean:.3f}", flush=True)
        return found

    def items(self, found: Sequence[dict[str, Any]]) -> list[Item]:
        """Tokenize rows, sorted by length."""
        items = [Item(row, tokens_of(row, self._coder)) for row in found]
        return sorted(items, key=lambda item: sum(map(len, item.tokens.chunks)))

    def judge(self, items: Sequence[Item], arm: ReuseArm) -> Iterator[tuple[float, str]]:
        """Yield the score and the reply of every item."""
        size = _AT_ONCE.get(self._device.type, 1)
        for start in range(0, len(items), size):
            group = items[start : start + size]
            for item, reply in zip(group, self._replies(group, arm), strict=True):
                name = item.row["dataset"]
                yield dataset(name).score(answer(name, reply), item.row["answers"]), reply

    def _replies(self, group: Sequence[Item], arm: ReuseArm) -> list[str]:
        prompts = [item.tokens for item in group]
        if arm.shuffled:
            others = prompts[1:] + prompts[:1]
            prompts = list(map(with_chunks_of, prompts, others))
        layout = collate([expand(tokens, arm, self._coder.links) for tokens in prompts])
        limit = MAX_TOKENS[group[0].row["dataset"]]
        layout = layout.to(self._device)
        replies = generate(self._model, layout, limit, self._coder.eos, arm.anchored)
        return list(map(self._coder.decode, replies))


def tokens_of(row: Mapping[str, Any], coder: Coder) -> PromptTokens:
    """The prompt of a row, as a run tokenizes it."""
    texts = prompt(row["dataset"], row["context"], row["input"], coder.count)
    head, *chunks, tail = coder.encode([texts.head, *texts.chunks, texts.tail])
    return PromptTokens([coder.bos, *head], chunks, tail)


def chance(count: int, names: Sequence[str] = DATASETS) -> dict[str, float]:
    """The score of another row's right answer: the floor for replies to the wrong chunks."""
    means = {}
    for name in names:
        found = rows(name, count=count)
        pairs = zip(found, [*found[1:], *found[:1]], strict=True)
        scores = (dataset(name).score(two["answers"][0], one["answers"]) for one, two in pairs)
        means[name] = round(fmean(scores), 4)
    return means


def with_chunks_of(tokens: PromptTokens, other: PromptTokens) -> PromptTokens:
    """Chunks of the same lengths, filled with the chunk tokens of another request."""
    foreign = cycle(token for chunk in other.chunks for token in chunk)
    return tokens._replace(chunks=[list(islice(foreign, len(c))) for c in tokens.chunks])


@torch.no_grad()
def generate(
    model: Llama, layout: PaddedBatch, limit: int, stop: int, anchored: bool = False
) -> list[list[int]]:
    """Decode greedily after each row, up to `stop` or `limit` tokens."""
    mask = visible(layout, anchored)
    hidden, caches = model(layout.ids, layout.positions, mask)
    rows = torch.arange(len(layout.ids), device=layout.ids.device)
    last = layout.filled.sum(1) - 1
    token = model.logits(hidden[rows, last]).argmax(-1)
    position = layout.positions[rows, last]
    seen = (layout.filled & ~layout.hidden)[:, None, None, :]
    replies = [token]
    done = token == stop
    while len(replies) < limit and not bool(done.all()):
        position = position + 1
        seen = torch.cat((seen, torch.ones_like(seen[..., :1])), -1)
        hidden, caches = model(token[:, None], position[:, None], seen, caches)
        token = model.logits(hidden[:, -1]).argmax(-1)
        replies.append(token)
        done |= token == stop
    return [_until(row, stop) for row in torch.stack(replies, 1).tolist()]


def _until(row: list[int], stop: int) -> list[int]:
    return row[: row.index(stop)] if stop in row else row
