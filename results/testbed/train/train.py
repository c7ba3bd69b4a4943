"""Train the testbed model, or one of its tuned variants, on one GPU.

    python results/testbed/train/train.py base --out DIR
    python results/testbed/train/train.py block --out DIR
    python results/testbed/train/train.py link --out DIR

`base` trains a tokenizer, unless DIR has one, and writes a model folder; the others read that
folder and add a delta. The same command resumes from the last checkpoint. Progress is
logged to DIR/<variant>.log.jsonl, the budget to DIR/training.json;
`picbench.workloads.testbed.evaluate` adds the scores.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenization
import torch
from lowrank import adapt, deltas
from recipes import RECIPES, Recipe
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from trainer import Batches, Trainer

from picbench.files import write_json
from picbench.workloads.testbed.llama import Llama, LlamaShape
from picbench.workloads.testbed.model_files import LINK_ROWS, device_name, load, save_weights
from picbench.workloads.testbed.prompt import BOS, EOS, LINKS, LINKS_EACH, PAD, ids_of


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
    _save_training(out, variant, trainer.step, trainer.tokens, trainer.seconds, device)
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
    start = ids_of(tokenizer, LINKS)[0]
    return slice(start, start + LINKS_EACH)


def _save(variant: str, model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    if variant == "base":
        _save_model(model, tokenizer, out)
        return
    found: dict[str, Tensor] = deltas(model)
    if variant == "link":
        rows = model.model.embed_tokens.weight[_link_rows(tokenizer)]
        found[LINK_ROWS] = rows.detach().bfloat16().contiguous()
    save_file(found, out / f"{variant}.delta")


def _save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Save weights in bfloat16 and the configuration; the tokenizer's files are there already."""
    save_weights(model.state_dict(), folder)
    bos, eos, pad = ids_of(tokenizer, (BOS, EOS, PAD))
    write_json(folder / "config.json", _config(model.shape, bos, eos, pad))
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    write_json(folder / "generation_config.json", generation)


def _config(shape: LlamaShape, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """The model's ``config.json`` for Hugging Face."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }


def _save_training(
    folder: Path, variant: str, steps: int, tokens: int, seconds: float, device: torch.device
) -> None:
    """Record the cost of training a variant in ``training.json``."""
    file = folder / "training.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known[variant] = {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "device": device_name(device),
        "torch": torch.__version__,
    }
    write_json(file, known)


if __name__ == "__main__":
    main()
