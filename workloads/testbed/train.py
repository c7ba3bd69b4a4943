"""Train the testbed model, or one of its tuned variants, on one GPU.

    python -m picbench.workloads.testbed.train base --out DIR
    python -m picbench.workloads.testbed.train block --out DIR
    python -m picbench.workloads.testbed.train link --out DIR

`base` writes a model folder; the others read it and add a delta to it. The same command again
goes on from the last checkpoint. Progress is logged as JSON lines to DIR/<variant>.log.jsonl.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from picbench.workloads.testbed import tokenizer as tokenization
from picbench.workloads.testbed.files import LINK_ROWS, load, save_model
from picbench.workloads.testbed.lowrank import adapt, deltas
from picbench.workloads.testbed.model import Llama, Shape
from picbench.workloads.testbed.muon import Muon
from picbench.workloads.testbed.packing import Packer
from picbench.workloads.testbed.schedule import Schedule

#: Loss weights of a token of a reply, and of any other token.
_ASKED, _OTHER = 2.0, 0.2
_LINKS = 5
_LOG_EVERY = 50
_SAVE_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a variant is trained: its schedule, rates, and how often chunks are isolated.

    Every `isolate`-th pair of steps lets chunk tokens see their own chunk only (0: no step does);
    pairs, because steps take turns in their length too.
    """

    schedule: Schedule
    adam: float
    muon: float = 0.0
    isolate: int = 0


_TUNING = ((0.0, (2048,)), (0.8, (2048, 4096)))
RECIPES = {
    "base": Recipe(Schedule(9000), adam=3e-3, muon=0.01),
    "block": Recipe(
        Schedule(1200, grown=0, decay=0.3, lengths=_TUNING), adam=2e-3, isolate=2
    ),
    "link": Recipe(
        Schedule(800, grown=0, decay=0.3, lengths=_TUNING, links=_LINKS), adam=2e-3, isolate=1
    ),
}


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The batch of every step, made on demand in worker processes."""

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
        return torch.from_numpy(batch.ids), torch.from_numpy(batch.asked), torch.from_numpy(batch.chunk)


class Trainer:
    """A model, its optimisers, and where it stands."""

    def __init__(self, model: Llama, recipe: Recipe, variant: str, out: Path) -> None:
        self.model = model
        self._recipe = recipe
        self._variant = variant
        self._out = out
        self._optimizers = _optimizers(model, recipe)
        self._loss = torch.compile(_loss, dynamic=False) if _on_gpu(model) else _loss
        self.step = 0
        self._resume()

    def run(self, batches: Iterator[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Train to the last step, saving and logging on the way."""
        started, seen = time.monotonic(), 0
        for ids, asked, chunk in batches:
            losses = self._train_step(ids, asked, chunk)
            self.step += 1
            seen += ids.numel()
            if self.step % _LOG_EVERY == 0:
                self._log(losses, seen, time.monotonic() - started)
            if self.step % _SAVE_EVERY == 0:
                self._save()

    def _train_step(self, ids: Tensor, asked: Tensor, chunk: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        ids, asked, chunk = (x.to(device, torch.long, non_blocking=True) for x in (ids, asked, chunk))
        factor = self._recipe.schedule.rate(self.step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        every = self._recipe.isolate
        alone = bool(every) and self.step // 2 % every == 0
        mask = isolated(chunk[:, :-1]) if alone else None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses: Tensor = self._loss(self.model, ids, asked, mask)
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses.detach()

    def _log(self, losses: Tensor, seen: int, seconds: float) -> None:
        loss, replies = losses.tolist()
        entry = {
            "step": self.step,
            "loss": round(loss, 4),
            "reply_loss": round(replies, 5),
            "tokens_per_second": round(seen / seconds),
            "seconds": round(seconds, 1),
        }
        line = json.dumps(entry)
        print(line, flush=True)
        with (self._out / f"{self._variant}.log.jsonl").open("a") as file:
            file.write(line + "\n")

    def _save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location=next(self.model.parameters()).device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    @property
    def _checkpoint(self) -> Path:
        return self._out / f"{self._variant}.checkpoint.pt"


def isolated(chunk: Tensor) -> Tensor:
    """The mask under which chunk tokens see their own chunk only: (rows, 1, tokens, tokens).

    `chunk` is (rows, tokens) and numbers the chunks from 1; 0 is text that sees all before it.
    """
    tokens = chunk.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=chunk.device).tril()
    own = chunk[:, :, None] == chunk[:, None, :]
    return ((own | (chunk == 0)[:, :, None]) & causal)[:, None]


def _loss(model: Llama, ids: Tensor, asked: Tensor, mask: Tensor | None) -> Tensor:
    """The training loss and the mean loss on replies."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    hidden, _ = model(ids[:, :-1], positions, mask)
    logits = model.logits(hidden).float().flatten(0, 1)
    each = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    kind = asked[:, 1:].flatten()
    reply = (kind == 1).float()
    weight = _ASKED * reply + _OTHER * (kind == 0)
    return torch.stack(
        ((each * weight).sum() / weight.sum(), (each * reply).sum() / reply.sum().clamp(min=1))
    )


def _optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers if it has a rate, AdamW for all the rest."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = [p for name, p in trained.items() if p.dim() == 2 and "embed" not in name]
    inner = inner if recipe.muon else []
    held = {id(parameter) for parameter in inner}
    rest = [p for p in trained.values() if id(p) not in held]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, recipe.adam, betas=(0.9, 0.95), weight_decay=0.0)
    ]
    if inner:
        made.append(Muon(inner, recipe.muon))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def _on_gpu(model: Llama) -> bool:
    return next(model.parameters()).is_cuda


def _prepare(
    variant: str, out: Path, device: torch.device, shape: Shape | None
) -> tuple[Llama, Tokenizer]:
    """The model as a variant's training begins."""
    if variant == "base":
        if not (out / "tokenizer.json").exists():
            tokenization.save(tokenization.train(), out)
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        return Llama(shape or Shape(tokenizer.get_vocab_size())).to(device), tokenizer
    model, tokenizer = load(out, device)
    model.float().train()
    adapt(model)
    if variant == "link":
        _train_links(model, tokenizer)
    return model, tokenizer


def _train_links(model: Llama, tokenizer: Tokenizer) -> None:
    """Let the embeddings of the link tokens learn, and those of no other token."""
    weight = model.model.embed_tokens.weight
    start = tokenizer.token_to_id(tokenization.LINKS[0])
    rows = torch.zeros(len(weight), 1, device=weight.device)
    rows[start : start + _LINKS] = 1
    weight.requires_grad_(True)
    weight.register_hook(lambda grad: grad * rows)


def _finish(variant: str, model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    if variant == "base":
        save_model(model, tokenizer, out)
        return
    found = deltas(model)
    if variant == "link":
        start = tokenizer.token_to_id(tokenization.LINKS[0])
        rows = model.model.embed_tokens.weight[start : start + _LINKS]
        found[LINK_ROWS] = rows.detach().bfloat16().contiguous()
    save_file(found, out / f"{variant}.safetensors")


def train(
    variant: str, out: Path, recipe: Recipe, workers: int, seed: int = 0, shape: Shape | None = None
) -> None:
    """Train a variant and write it to `out`; `shape` makes the base another size."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = _prepare(variant, out, device, shape)
    trainer = Trainer(model, recipe, variant, out)
    data = Batches(out / "tokenizer.json", recipe.schedule, trainer.step, seed)
    pinned = device.type == "cuda"
    loader = DataLoader(data, batch_size=None, num_workers=workers, pin_memory=pinned)
    trainer.run(iter(loader))
    _finish(variant, model, tokenizer, out)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the testbed model")
    parser.add_argument("variant", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="the model folder")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the recipe has")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    options: Any = parser.parse_args(argv)
    recipe = RECIPES[options.variant]
    if options.steps:
        recipe = replace(recipe, schedule=replace(recipe.schedule, steps=options.steps))
    train(options.variant, options.out, recipe, options.workers)


if __name__ == "__main__":
    main()
