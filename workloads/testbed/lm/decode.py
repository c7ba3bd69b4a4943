"""Greedy decoding behind an expanded sequence."""

import torch
from torch import Tensor

from picbench.workloads.testbed.lm.llama import Cache, Llama
from picbench.workloads.testbed.lm.pic import PaddedBatch, visible


@torch.no_grad()
def generate(
    model: Llama,
    layout: PaddedBatch,
    limit: int,
    stop: int,
    anchored: bool = False,
) -> list[list[int]]:
    """Return the tokens that each row goes on with, up to `stop` or `limit` of them."""
    mask = visible(layout, anchored)
    hidden, caches = model(layout.ids, layout.positions, mask)
    rows = torch.arange(len(layout.ids), device=layout.ids.device)
    last = layout.filled.sum(1) - 1
    token = model.logits(hidden[rows, last]).argmax(-1)
    seen = (layout.filled & ~layout.hidden)[:, None, None, :]
    return _continue(model, token, layout.positions[rows, last], seen, caches, limit, stop)


def _continue(
    model: Llama,
    token: Tensor,
    position: Tensor,
    seen: Tensor,
    caches: list[Cache],
    limit: int,
    stop: int,
) -> list[list[int]]:
    said = [token]
    done = token == stop
    while len(said) < limit and not bool(done.all()):
        position = position + 1
        seen = torch.cat((seen, torch.ones_like(seen[..., :1])), -1)
        hidden, caches = model(token[:, None], position[:, None], seen, caches)
        token = model.logits(hidden[:, -1]).argmax(-1)
        said.append(token)
        done |= token == stop
    return [_until(row, stop) for row in torch.stack(said, 1).tolist()]


def _until(row: list[int], stop: int) -> list[int]:
    return row[: row.index(stop)] if stop in row else row
