"""The generated rows: schema, determinism, splits, sizes."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from picbench.errors import ConfigError
from picbench.workloads.synthetic.generate import example
from picbench.workloads.synthetic.names import SPLITS, Split, split_of
from picbench.workloads.synthetic.needle_rows import DEPTHS, LENGTHS
from picbench.workloads.synthetic.passages import continuations
from picbench.workloads.testbed import DATASETS, MAX_TOKENS, answer, model_path, rows
from picbench.workloads.testbed.prompt import Coder, prompt

QA = ("musique", "2wikimqa", "hotpotqa")
FINGERPRINTS = json.loads(Path(__file__).with_name("fingerprints.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def coder() -> Coder:
    return Coder(Tokenizer.from_file(str(model_path() / "tokenizer.json")))


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_are_these_byte_for_byte(dataset: str) -> None:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows(dataset))
    assert hashlib.sha256(text.encode()).hexdigest() == FINGERPRINTS[dataset]


def test_first_rows_are_the_ones_to_read() -> None:
    lines = Path(__file__).with_name("rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [rows(name, count=1)[0] for name in DATASETS]


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_have_longbenchs_schema(dataset: str) -> None:
    for row in rows(dataset, count=5):
        assert row["dataset"] == dataset
        assert row["language"] == "en"
        assert row["all_classes"] is None
        assert len(row["answers"]) == 1
        assert row["length"] > 100
        assert all(0 <= i < len(chunks(dataset, row["context"])) for i in row["gold_passages"])
    assert len({row["_id"] for row in rows(dataset, count=50)}) == 50


def test_wrong_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="musique"):
        rows("musiqe")
    with pytest.raises(ConfigError, match="validation"):
        rows("musique", split="valid")  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_every_name_belongs_to_its_split(dataset: str, split: Split) -> None:
    for row in rows(dataset, split, count=8):
        found = names(dataset, row["context"])
        assert found
        assert {split_of(name) for name in found} == {split}


def test_splits_differ_and_indices_differ() -> None:
    contexts = {example("hotpotqa", split, i).context for split in SPLITS for i in range(5)}
    assert len(contexts) == 15


@pytest.mark.parametrize("dataset", QA)
def test_passages_have_60_to_200_tokens(dataset: str, coder: Coder) -> None:
    for row in rows(dataset, count=20):
        sizes = coder.count(chunks(dataset, row["context"]))
        assert min(sizes) >= 50
        assert max(sizes) <= 200


@pytest.mark.parametrize("dataset", DATASETS)
def test_prompts_and_replies_fit(dataset: str, coder: Coder) -> None:
    for index, row in enumerate(rows(dataset)):
        context, reply = coder.count(
            [row["context"], example(dataset, "test", index).exchange.reply]
        )
        assert 200 <= context <= 3800
        assert reply + 1 <= MAX_TOKENS[dataset]


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_reply_that_is_taught_holds_the_answer(dataset: str) -> None:
    for index in range(30):
        made = example(dataset, "test", index)
        assert answer(dataset, f" {made.exchange.reply}") == made.answer


@pytest.mark.parametrize("dataset", QA)
def test_gold_passages_hold_the_answer_or_its_grounds(dataset: str) -> None:
    for index in range(30):
        made = example(dataset, "test", index)
        passages = chunks(dataset, made.context)
        gold = " ".join(passages[i] for i in made.gold)
        assert made.answer in ("yes", "no") or made.answer in gold + made.exchange.input


def test_hotpotqa_has_two_gold_passages() -> None:
    assert {len(row["gold_passages"]) for row in rows("hotpotqa")} <= {1, 2}
    assert sum(len(row["gold_passages"]) == 2 for row in rows("hotpotqa")) >= 190


def test_question_sorts_come_by_their_shares() -> None:
    found = [row["qtype"] for row in rows("musique", count=100)]
    for kind, share in {"2-hop": 50, "3-hop": 30, "4-hop": 20}.items():
        assert abs(found.count(kind) - share) <= 2


def test_needle_covers_the_grid() -> None:
    contexts = [row["context"] for row in rows("needle", count=len(LENGTHS) * len(DEPTHS))]
    by_length = [contexts[i : i + len(DEPTHS)] for i in range(0, len(contexts), len(DEPTHS))]
    means = [sum(map(len, group)) / len(group) for group in by_length]
    assert means == sorted(means)
    for group, depth in zip(zip(*by_length, strict=True), DEPTHS, strict=True):
        assert len(group) == len(LENGTHS), depth


def chunks(dataset: str, context: str) -> list[str]:
    return list(prompt(dataset, context, "", lambda texts: [len(t) // 5 for t in texts]).chunks)


def names(dataset: str, context: str) -> set[str]:
    """Names that can be found without knowing how rows are made."""
    if dataset == "samsum":
        return set(re.findall(r"^(?:Dialogue: )?(\w+): ", context, re.MULTILINE)) - {"Summary"}
    if dataset == "needle":
        return set(re.findall(r"^Section \d+: (.+)$", context, re.MULTILINE))
    if dataset == "multi_news":
        person = r"([A-Z]\w+ [A-Z]\w+)(?= of [A-Z]\w+ [A-Z]\w+ (?:was )?in | spoke for )"
        return set(re.findall(person, context))
    titles = re.findall(r"^Passage \d+:\n(.+)$", context, re.MULTILINE)
    return {title for title in titles if title not in continuations()}
