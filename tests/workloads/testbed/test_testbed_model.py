"""The model that ships with picbench."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from picbench.errors import ConfigError
from picbench.workloads.testbed import DATASETS, model_path, rows
from picbench.workloads.testbed.evaluate import ARMS_OF, card, evaluate
from picbench.workloads.testbed.judge import Judge, chance
from picbench.workloads.testbed.model_files import build_variant, load
from picbench.workloads.testbed.pic import FULL, NAIVE, ReuseArm

CPU = torch.device("cpu")


def test_all_models_together_have_at_most_32_megabytes() -> None:
    assert sum(file.stat().st_size for file in model_path().iterdir()) <= 32e6


def test_the_card_says_what_was_noted() -> None:
    names = ("config.json", "training.json", "scores.json")
    config, training, scores = (json.loads((model_path() / n).read_text("utf-8")) for n in names)
    assert card(config, training, scores) == (model_path() / "README.md").read_text("utf-8")
    assert set(training) == set(scores) == set(ARMS_OF)
    for variant, arms in ARMS_OF.items():
        found = scores[variant]["arms"]
        assert {arm.name for arm in arms} == set(found) - {"chance"}
        assert all(set(score) == set(DATASETS) for score in found.values())
        assert scores[variant]["rows"] >= 200


def test_evaluation_notes_scores_and_keeps_those_of_other_variants(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    folder = tmp_path / "model"
    before = json.loads((folder / "scores.json").read_text("utf-8"))
    noted = dict.fromkeys(DATASETS, 0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "table", lambda self, arms, count: {a.name: noted for a in arms})
        evaluate(folder, 3, ["block"])
    after = json.loads((folder / "scores.json").read_text("utf-8"))
    assert after.pop("block")["arms"] == {"full": noted, "naive": noted}
    before.pop("block")
    assert after == before
    assert "| naive | 0.250 |" in (folder / "README.md").read_text("utf-8")


def test_chance_is_what_another_rows_answer_scores() -> None:
    found = chance(12, ("musique", "samsum"))
    assert found["musique"] <= 0.2
    assert 0.05 < found["samsum"] < 0.5


def test_hugging_face_computes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    ours, tokenizer = load(model_path(), CPU)
    text = rows("hotpotqa", count=1)[0]["context"][:800]
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        hidden, _ = ours(ids, torch.arange(ids.shape[1])[None])
        difference = (theirs(ids).logits - ours.logits(hidden)).abs().max()
    assert difference < 1e-3
    found = transformers.AutoTokenizer.from_pretrained(model_path())
    assert found(text)["input_ids"] == ids[0].tolist()
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<s>", "</s>", "<pad>")


def test_it_answers_and_reuse_costs_accuracy() -> None:
    judge = Judge(*load(model_path(), CPU))
    items = judge.items(rows("hotpotqa", count=8))
    found = {
        arm.name: [score for score, _ in judge.judge(items, arm)]
        for arm in (FULL, NAIVE, ReuseArm("shuffled", shuffled=True))
    }
    means = {name: sum(scores) / len(scores) for name, scores in found.items()}
    assert means["full"] >= 0.9
    assert means["naive"] < means["full"]
    assert means["shuffled"] <= 0.4


@pytest.mark.parametrize("variant", ["block", "link"])
def test_variants_are_build_variant_once(variant: str, tmp_path: Path) -> None:
    folder = build_variant(model_path(), variant, tmp_path)
    assert build_variant(model_path(), variant, tmp_path) == folder
    assert list(tmp_path.iterdir()) == [folder]
    merged, _ = load(folder, CPU)
    tuned, _ = load(model_path(), CPU, variant)
    for one, other in zip(merged.parameters(), tuned.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_link_tuned_variant_names_its_link_tokens(tmp_path: Path) -> None:
    found = {}
    for variant in ("block", "link"):
        config = build_variant(model_path(), variant, tmp_path) / "config.json"
        found[variant] = json.loads(config.read_text(encoding="utf-8")).get("link_token_ids")
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    links = [tokenizer.token_to_id(f"<link_{i}>") for i in range(5)]
    assert found == {"block": None, "link": links}


def test_a_variant_that_cannot_be_written_is_a_plain_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="testbed-block"):
        build_variant(model_path(), "block", blocked)
