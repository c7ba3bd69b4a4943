import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from picbench import plugins
from picbench.errors import ConfigError
from picbench.workloads import datasets
from picbench.workloads.datasets import Reading, find
from picbench.workloads.datasets.grid import EPIC
from picbench.workloads.sources.source import RowSource

RULER = [f"ruler:{task}" for task in ("cwe", "multikey", "multiquery", "multivalue", "vt")]
NAMES = ["2wikimqa", "hotpotqa", "multi_news", "musique", "needle", "qa", *RULER, "samsum"]
QA = ["2wikimqa", "hotpotqa", "musique", "needle"]


def count_words(texts: Any) -> list[int]:
    return [len(text.split()) for text in texts]


def row(**fields: Any) -> dict[str, Any]:
    return {"input": "q", "context": "c", "answers": ["x"], **fields}


def test_every_dataset_is_described_in_one_line() -> None:
    described = datasets.describe()
    assert list(described) == datasets.names() == NAMES
    assert all(line and "\n" not in line for line in described.values())
    assert [find(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize(
    ("name", "metric", "max_tokens"),
    [
        *((name, "f1", 32) for name in QA),
        ("samsum", "rouge-l", 128),
        ("multi_news", "rouge-l", 512),
        *((name, "string-match", 128) for name in RULER),
    ],
)
def test_metric_and_length(name: str, metric: str, max_tokens: int) -> None:
    found = find(name)
    assert (found.metric, found.max_tokens) == (metric, max_tokens)


@pytest.mark.parametrize("value", ["picbench.nowhere:X", "picbench.errors:X", "pathlib:Path"])
def test_a_broken_registration_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("broken", value, "picbench.datasets")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=f"broken.*{value}"):
        find("broken")


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, ["Passage 1:\nA\n", "Passage 2:\nB"]) for name in (*QA[:3], "multi_news")),
        (
            "samsum",
            ["Dialogue: A: hi\nSummary: A greets.\n", "Dialogue: B: bye\nSummary: B leaves."],
        ),
    ],
)
def test_marked_text_is_cut_at_its_marks(name: str, chunks: list[str]) -> None:
    assert find(name).split("".join(chunks), count_words) == chunks


@pytest.mark.parametrize("name", NAMES)
def test_unmarked_text_is_cut_by_tokens(name: str) -> None:
    text = "One two three four. " * 300
    chunks = find(name).split(text, count_words)
    assert "".join(chunks) == text
    assert [len(chunk.split()) for chunk in chunks] == [512, 512, 176]


@pytest.mark.parametrize("name", QA)
def test_questions_are_scored_by_their_best_answer(name: str) -> None:
    assert find(name).score("The Eiffel Tower", ["Louvre", "eiffel tower"]) == 1.0
    assert find(name).score("", ["Louvre"]) == 0.0


def test_a_summary_is_the_first_line() -> None:
    reply = "\nAda is late.\nDialogue: Ben: hi\nSummary: Ben greets."
    assert find("samsum").extract(reply) == "Ada is late."
    assert find("samsum").score(reply, ["Ada is late."]) == pytest.approx(1.0)


def test_a_report_may_have_many_lines() -> None:
    assert find("multi_news").score("One.\nTwo.", ["One.\nTwo."]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_only_few_shot_prompts_go_without_a_chat_template(name: str) -> None:
    assert find(name).chat == (name != "samsum")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RULER])
def test_a_grid_is_refused_where_rows_are_ready_made(name: str, write_rows: Any) -> None:
    data = write_rows(name, row())
    with pytest.raises(ConfigError, match="`grid`"):
        list(find(name).rows(RowSource(data), Reading(count_words, grid=EPIC)))


def test_files_are_read_round_robin(write_rows: Any) -> None:
    write_rows("musique", row(_id="b1"), row(_id="b2"), row(_id="b3"), name="b")
    data = write_rows("musique", row(_id="a1"), name="a")
    rows = find("musique").rows(RowSource(data), Reading(count_words))
    assert [one.id for one in rows] == ["a1", "b1", "b2", "b3"]


def test_one_file_for_a_dataset_is_found(write_rows: Any, tmp_path: Path) -> None:
    folder = write_rows("musique", row(_id="x"))
    (folder / "musique" / "rows.jsonl").rename(tmp_path / "musique.jsonl")
    rows = find("musique").rows(RowSource(tmp_path), Reading(count_words))
    assert [one.id for one in rows] == ["x"]


def test_a_folder_without_rows_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"musique/\*\.jsonl"):
        list(find("musique").rows(RowSource(tmp_path), Reading(count_words)))


def test_listing_imports_nothing_heavy() -> None:
    program = (
        "import sys; from picbench.workloads import datasets, models;"
        "datasets.describe(); models.describe();"
        "heavy = {'torch', 'vllm', 'transformers', 'tokenizers', 'numpy', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
