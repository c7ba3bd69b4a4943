"""The training loop: losses, optimisers, checkpoints, a log.

Muon is momentum, orthogonalised, for the matrices inside the layers (Jordan et al., 2024).
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from packing import Packer
from recipes import Recipe, Schedule
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import Parameter, functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.data import Dataset

from picbench.workloads.testbed.llama import Llama, Mask

#: Loss weights of a token of a reply, and of any other token.
_REPLY, _OTHER = 2.0, 0.2
_LOG_EVERY = 50
_SAVE_EVERY = 1000
# Muon's quintic's coefficients, from the authors' code: steep at zero, rough around one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The columns of a `PackedBatch` for every step from `first` on, made on demand.

    A worker process opens the tokenizer when it makes its first batch.
    """

    def __init__(self, tokenizer: Path, schedule: Schedule, first: int, seed: int) -> None:
        self._path = str(tokenizer)
        self._schedule = schedule
        self._first = first
        self._seed = seed
        self._packer: Packer | None = None

    def __len__(self) -> int:
        return self._schedule.steps - self._first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._packer is None:
            self._packer = Packer(Tokenizer.from_file(self._path), self._seed)
        step = self._first + index
        batch = self._packer.batch(step, self._schedule.stage(step))
        ids, loss_on, chunk = map(torch.from_numpy, (batch.ids, batch.loss_on, batch.chunk))
        return ids, loss_on, chunk


class Trainer:
    """A model, its optimisers, and the progress of training.

    Starts from the checkpoint `out`/`variant`.checkpoint.pt if there is one.
    """

    def __init__(self, model: Llama, recipe: Recipe, variant: str, out: Path) -> None:
        self.model = model
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self._recipe = recipe
        self._log_file = out / f"{variant}.log.jsonl"
        self._checkpoint = out / f"{variant}.checkpoint.pt"
        self._device = next(model.parameters()).device
        self._optimizers = optimizers(model, recipe)
        on_gpu = self._device.type == "cuda"
        self._loss = torch.compile(losses, dynamic=False) if on_gpu else losses
        # A dense mask is faster where nothing is compiled.
        self._sparse = torch.compile(create_block_mask, dynamic=False) if on_gpu else None
        if self._checkpoint.exists():
            self._resume()

    def run(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Train on every batch, with a log and checkpoints."""
        started = time.monotonic() - self.seconds
        for ids, loss_on, chunk in batches:
            found = self._train(ids, loss_on, chunk)
            self.step += 1
            self.tokens += ids.numel()
            self.seconds = time.monotonic() - started
            if self.step % _LOG_EVERY == 0:
                self._log(*found)
            if self.step % _SAVE_EVERY == 0:
                self._save()

    def _train(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        ids, loss_on, chunk = (x.to(self._device, torch.long, non_blocking=True) for x in batch)
        self._set_rates()
        mask = self._mask(chunk[:, :-1]) if self._recipe.isolate else None
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            loss, replies = self._loss(self.model, ids, loss_on, mask)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), replies.detach()

    def _mask(self, chunk: Tensor) -> Mask:
        """Isolate the chunks of the recipe's share of the rows; other rows are causal."""
        chunk[self._isolated(len(chunk)) :] = 0
        return sparse(chunk, self._sparse) if self._sparse else isolated(chunk)

    def _isolated(self, rows: int) -> int:
        return round(self._recipe.isolate * rows)

    def _set_rates(self) -> None:
        factor = self._recipe.schedule.rate(self.step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor

    def _log(self, loss: Tensor, replies: Tensor) -> None:
        count = self._isolated(len(replies))
        entry = {
            "step": self.step,
            "loss": round(loss.item(), 4),
            "reply_loss": _mean(replies[count:]),
            "isolated_reply_loss": _mean(replies[:count]),
            "tokens_per_second": round(self.tokens / self.seconds),
            "seconds": round(self.seconds, 1),
        }
        line = json.dumps(entry)
        print(line, flush=True)
        with self._log_file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _save(self) -> None:
        draft = self._checkpoint.with_suffix(".part")
        torch.save(self._state(), draft)
        draft.replace(self._checkpoint)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds = state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def losses(model: Llama, ids: Tensor, loss_on: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """Return the training loss, and for each row the mean loss on the tokens of replies."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    hidden, _ = model(ids[:, :-1], positions, mask)
    logits = model.logits(hidden).float().flatten(0, 1)
    each = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    kind = loss_on[:, 1:]
    each = each.view_as(kind)
    reply = (kind == 1).float()
    weight = _REPLY * reply + _OTHER * (kind == 0)
    replies = (each * reply).sum(1) / reply.sum(1).clamp(min=1)
    return (each * weight).sum() / weight.sum(), replies


def isolated(chunk: Tensor) -> Tensor:
    """The mask under which chunk tokens see their own chunk only: (rows, 1, tokens, tokens).

    `chunk` is (rows, tokens): the number of the chunk from 1, or 0 for text that sees all before.
    """
    tokens = torch.arange(chunk.shape[1], device=chunk.device)
    rows = torch.arange(len(chunk), device=chunk.device)
    return _sees(chunk, rows[:, None, None], tokens[:, None], tokens)[:, None]


def sparse(chunk: Tensor, make: Callable[..., BlockMask] = create_block_mask) -> BlockMask:
    """`isolated` as a block mask, which skips empty blocks; `make` may be compiled."""
    rows, tokens = chunk.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _sees(chunk, row, query, key)

    return make(sees, rows, None, tokens, tokens, chunk.device.type)


def _sees(chunk: Tensor, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    own = chunk[row, query]
    return ((own == chunk[row, key]) | (own == 0)) & (key <= query)


def _mean(values: Tensor) -> float | None:
    return round(values.mean().item(), 5) if len(values) else None


def optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers if its rate is set, AdamW for all others."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = [
        name for name, p in trained.items() if recipe.muon and p.dim() == 2 and "embed" not in name
    ]
    others = [p for name, p in trained.items() if name not in inner]
    made: list[torch.optim.Optimizer] = []
    if others:
        made.append(torch.optim.AdamW(others, recipe.adam, betas=(0.9, 0.95), weight_decay=0.0))
    if inner:
        made.append(Muon([trained[name] for name in inner], recipe.muon))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


class Muon(torch.optim.Optimizer):
    """Steps along the nearest orthogonal matrix to the momentum of each gradient."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter; those of one shape together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for same_shape in by_shape.values():
                self._update(same_shape, group)

    def _update(self, same_shape: list[Parameter], group: dict[str, Any]) -> None:
        momenta = torch.stack([self._momentum(p, group["momentum"]) for p in same_shape])
        rows, columns = same_shape[0].shape
        lr = group["lr"]
        for parameter, direction in zip(same_shape, _orthogonal(momenta), strict=True):
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(direction.to(parameter.dtype), alpha=-lr * max(1, rows / columns) ** 0.5)

    def _momentum(self, parameter: Parameter, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        held: Tensor = state["momentum"].lerp_(grad, 1 - momentum)
        return grad.lerp(held, momentum)


def _orthogonal(stack: Tensor) -> Tensor:
    """Bring all singular values of every matrix near one, by Newton and Schulz's iteration."""
    a, b, c = _QUINTIC
    tall = stack.size(-2) > stack.size(-1)
    x = (stack.mT if tall else stack).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if tall else x
    return found
