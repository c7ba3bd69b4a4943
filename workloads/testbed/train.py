"""Train the testbed model, or one of its tuned variants, on one GPU.

    python -m picbench.workloads.testbed.train base --out DIR
    python -m picbench.workloads.testbed.train block --out DIR
    python -m picbench.workloads.testbed.train link --out DIR

`base` trains a tokenizer, unless DIR has one, and writes a model folder; the others read that
folder and add a delta. The same command resumes from the last checkpoint. Progress is
logged to DIR/<variant>.log.jsonl, the budget to DIR/training.json; `evaluate` adds the scores.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from picbench.workloads.testbed import testbed_tokenizer as tokenization
from picbench.workloads.testbed.lm.files import LINK_ROWS, load, save_model, save_training
from picbench.workloads.testbed.lm.llama import Llama, LlamaShape
from picbench.workloads.testbed.lm.lowrank import adapt, deltas
from picbench.workloads.testbed.lm.recipes import LINKS_EACH, RECIPES, Recipe
from picbench.workloads.testbed.lm.trainer import Batches, Trainer


def train(
    variant: str,
    out: Path,
    recipe: Recipe,
    workers: int,
    seed: int = 0,
    shape: LlamaShape | None = None,
) -> Trainer:
    """Train a variant and write it to `out`; `shape` overrides the sizes of the base model."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = _tokenizer(out)
    if variant == "base":
        model = Llama(shape or LlamaShape(tokenizer.get_vocab_size())).to(device)
    else:
        model = _adapted(out, device, tokenizer, recipe, links=variant == "link")
    trainer = Trainer(model, recipe, variant, out)
    batches = Batches(out / "tokenizer.json", recipe.schedule, trainer.step, seed)
    pin = device.type == "cuda"
    trainer.run(DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=pin))
    _save(variant, model, tokenizer, out)
    save_training(out, variant, trainer.step, trainer.tokens, trainer.seconds, device)
    return trainer


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the testbed model or a variant")
    parser.add_argument("variant", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="the model folder")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    options = parser.parse_args(argv)
    recipe = RECIPES[options.variant]
    if options.steps:
        recipe = replace(recipe, schedule=replace(recipe.schedule, steps=options.steps))
    train(options.variant, options.out, recipe, options.workers)


def _tokenizer(out: Path) -> Tokenizer:
    file = out / "tokenizer.json"
    if not file.exists():
        tokenization.save(tokenization.train(), out)
    return Tokenizer.from_file(str(file))


def _adapted(
    out: Path, device: torch.device, tokenizer: Tokenizer, recipe: Recipe, links: bool
) -> Llama:
    """The base model, frozen, with deltas to train and, with `links`, their embeddings."""
    model, _ = load(out, device)
    model.float().train()
    adapt(model, recipe.rank)
    if links:
        _train_rows(model.model.embed_tokens.weight, _link_rows(tokenizer))
    return model


def _train_rows(weight: Tensor, trained: slice) -> None:
    """Train these rows of a matrix, and no others."""
    mask = torch.zeros_like(weight[:, :1])
    mask[trained] = 1
    weight.requires_grad_(True)
    weight.register_hook(lambda grad: grad * mask)  # type: ignore[no-untyped-call]


def _link_rows(tokenizer: Tokenizer) -> slice:
    start = tokenization.ids_of(tokenizer, tokenization.LINKS)[0]
    return slice(start, start + LINKS_EACH)


def _save(variant: str, model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    if variant == "base":
        save_model(model, tokenizer, out)
        return
    found: dict[str, Tensor] = deltas(model)
    if variant == "link":
        rows = model.model.embed_tokens.weight[_link_rows(tokenizer)]
        found[LINK_ROWS] = rows.detach().bfloat16().contiguous()
    save_file(found, out / f"{variant}.delta")


if __name__ == "__main__":
    main()
