"""Training, by the scripts in results/testbed/train, on a very small scale."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer
from lowrank import adapt, deltas
from packing import Packer, Stage
from recipes import RECIPES, Recipe
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.attention.flex_attention import create_mask
from train import train

from picbench.workloads.testbed import model_path
from picbench.workloads.testbed.llama import Llama, LlamaShape
from picbench.workloads.testbed.model_files import LINK_ROWS, load, merge
from picbench.workloads.testbed.pic import NAIVE, PromptTokens, collate, expand, visible
from picbench.workloads.testbed.prompt import LINKS, LINKS_EACH, ids_of

TOKENIZER = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
SMALL = LlamaShape(
    TOKENIZER.get_vocab_size(), width=32, layers=2, heads=2, kv_heads=1, head_size=16, inner=32
)


def recipe(variant: str, steps: int = 4) -> Recipe:
    full = RECIPES[variant]
    small = replace(full.schedule, steps=steps, tokens=256, lengths=((0.0, (128,)),))
    return replace(full, schedule=small, rank=min(full.rank, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, tmp_path / name)
    return tmp_path


def test_a_model_and_its_variants_are_trained_and_saved(folder: Path) -> None:
    for variant in RECIPES:
        train(variant, folder, recipe(variant), workers=0, shape=SMALL)
    device = torch.device("cpu")
    base, _ = load(folder, device)
    ids = torch.tensor([[5, 30, 31, 32]])
    plain = base(ids, torch.arange(4)[None])[0]
    for variant in ("block", "link"):
        tuned, _ = load(folder, device, variant)
        assert (tuned(ids, torch.arange(4)[None])[0] - plain).abs().max() > 0
    assert load_file(folder / "link.delta")[LINK_ROWS].shape == (LINKS_EACH, 32)
    noted = json.loads((folder / "training.json").read_text("utf-8"))
    assert {name: took["steps"] for name, took in noted.items()} == dict.fromkeys(RECIPES, 4)


def test_only_link_embeddings_and_deltas_learn(folder: Path) -> None:
    train("base", folder, recipe("base"), workers=0, shape=SMALL)
    before, _ = load(folder, torch.device("cpu"))
    train("link", folder, recipe("link"), workers=0)
    after, _ = load(folder, torch.device("cpu"), "link")
    changed = (before.model.embed_tokens.weight != after.model.embed_tokens.weight).any(1)
    assert changed.nonzero().flatten().tolist() == ids_of(TOKENIZER, LINKS)[:LINKS_EACH]


def test_training_resumes_from_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 2)
    whole = train("base", folder, recipe("base"), workers=0, shape=SMALL).model.state_dict()
    (folder / "base.checkpoint.pt").unlink()
    with pytest.raises(KeyboardInterrupt):
        _interrupted(folder, monkeypatch)
    resumed = train("base", folder, recipe("base"), workers=0, shape=SMALL)
    assert resumed.step == 4
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, whole[name])


def _interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = trainer.Trainer._train
    calls: list[int] = []

    def stop(self: trainer.Trainer, *batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_train", stop)
        train("base", folder, recipe("base"), workers=0, shape=SMALL)


def test_batches_are_full_and_the_same_every_time() -> None:
    stage = Stage(2, 700, progress=0.5, links=2)
    first, second = (Packer(TOKENIZER, 1).batch(3, stage) for _ in range(2))
    assert first.ids.shape == first.loss_on.shape == first.chunk.shape == (2, 700)
    assert (first.ids == second.ids).all()
    links = ids_of(TOKENIZER, LINKS)
    assert ((first.loss_on == -1) == (first.ids >= links[0]) & (first.ids <= links[1])).all()
    assert 0.02 < (first.loss_on == 1).mean() < 0.5


def test_the_training_mask_is_that_of_naive_reuse() -> None:
    tokens = PromptTokens([5, 6], [[7, 8], [9, 10, 11]], [12])
    slots = expand(tokens, NAIVE)
    chunk = torch.tensor([[max(group, 0) for group in slots.group]])
    assert (trainer.isolated(chunk) == visible(collate([slots]))).all()


def test_the_sparse_mask_is_the_dense_one() -> None:
    chunk = torch.from_numpy(Packer(TOKENIZER, 2).batch(0, Stage(2, 256)).chunk)
    made = trainer.sparse(chunk)
    found = create_mask(made.mask_mod, 2, 1, 256, 256, "cpu")
    assert (found == trainer.isolated(chunk)).all()
    assert made.sparsity() > 0


def test_recipes_isolate_what_their_papers_do() -> None:
    assert {name: made.isolate for name, made in RECIPES.items()} == {
        "base": 0.0,
        "block": 0.5,
        "link": 1.0,
    }
    assert RECIPES["link"].schedule.stage(0).links == LINKS_EACH
    assert RECIPES["block"].schedule.stage(0).links == 0


def test_deltas_lose_little_in_eight_bits() -> None:
    model = Llama(SMALL)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapt(model, rank=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".up", ".down")):
                parameter.normal_().mul_(torch.rand(1))
    exact = {
        name.removesuffix("up") + "weight": up
        @ model.state_dict()[name.removesuffix("up") + "down"]
        for name, up in model.state_dict().items()
        if name.endswith(".up")
    }
    merged = merge(weights, deltas(model))
    assert {name for name in merged if not merged[name].equal(weights[name])} == set(exact)
    for name, product in exact.items():
        error = (merged[name] - weights[name] - product).norm() / product.norm()
        assert error < 0.02, name


def test_an_untrained_delta_changes_nothing() -> None:
    model = Llama(SMALL)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapt(model, rank=2)
    merged = merge(weights, deltas(model))
    assert all(merged[name].equal(weights[name]) for name in weights)
