"""vLLM's replies beside those of Hugging Face's own model."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from picbench.cli import main
from picbench.errors import ConfigError, IncomparableRuns
from picbench.measure.agreement import Side, compare, read_replies, read_side, write
from picbench.output.run_directory import RunDirectory
from picbench.output.sample_row import SampleRow
from picbench.workloads.testbed import model_path, rows
from picbench.workloads.testbed.lm.files import load
from picbench.workloads.testbed.lm.judge import Judge
from picbench.workloads.testbed.lm.pic import FULL

ENGINE = {"vllm": "0.32.0", "torch": "2.13.0", "device": "cpu", "dtype": "float32"}
VERSIONS = {"torch": "2.13.0", "transformers": "5.19.0", "tokenizers": "0.23.3"}
SCORES = (1.0, 0.5, 0.0)


def run(folder: Path, scores: tuple[float, ...] = SCORES, error: str | None = None) -> Path:
    """A run directory with one arm, whose replies have these scores."""
    made = RunDirectory.create(folder)
    made.write_manifest(
        {
            "status": "complete",
            "config": {"dataset": "musique"},
            "arms": {"full": {"engine": ENGINE}},
            "provenance": {"git": {"commit": "0" * 40, "dirty": False}},
        }
    )
    base = SampleRow(arm="full", sample="", round=0, timed=True, prompt_sha256="", error=error)
    made.append(
        replace(base, sample=f"s{i}", prompt_sha256=f"hash {i}", text=f" reply {i}", score=score)
        for i, score in enumerate(scores)
    )
    made.append([replace(base, arm="naive", sample="s0", text="", score=0.0)])
    return folder


def replies(file: Path, scores: tuple[float, ...] = SCORES, **changed: Any) -> Path:
    """A file of Hugging Face's replies."""
    row = {"dataset": "musique", **changed}
    found = [
        {"sample": f"s{i}", "prompt_sha256": f"hash {i}", "text": f" reply {i}", "score": score}
        | row
        for i, score in enumerate(scores)
    ]
    noted = {"dtype": "float32", "device": "cpu", "versions": VERSIONS, "replies": found}
    file.write_text(json.dumps(noted), encoding="utf-8")
    return file


def sides(run_folder: Path, file: Path) -> tuple[list[Side], list[Side]]:
    return [read_side(run_folder)], read_replies(file)


def test_means_are_compared_sample_by_sample(tmp_path: Path) -> None:
    file = replies(tmp_path / "replies.json", (1.0, 0.5, 1.0), text=" reply 1")
    (found,) = compare(*sides(run(tmp_path / "run"), file))
    assert (found.dataset, found.dtype, found.rows) == ("musique", "float32", 3)
    assert (found.vllm, found.difference) == (0.5, pytest.approx(-1 / 3))
    assert found.same == pytest.approx(1 / 3)


def test_what_is_written_says_what_was_compared(tmp_path: Path) -> None:
    runs, references = sides(run(tmp_path / "run"), replies(tmp_path / "replies.json"))
    write(runs, references, tmp_path / "out")
    noted = json.loads((tmp_path / "out" / "agreement.json").read_text("utf-8"))
    assert [result["same"] for result in noted["results"]] == [1.0]
    assert noted["vllm"][0]["git"] == {"commit": "0" * 40, "dirty": False}
    assert noted["hugging_face"][0]["versions"] == VERSIONS
    page = (tmp_path / "out" / "agreement.md").read_text("utf-8")
    assert "| musique | float32 | 3 | 0.5000 | 0.5000 | +0.0000 | 1.000 |" in page
    assert "synthetic rows" in page


@pytest.mark.parametrize(
    "other",
    [
        {"scores": (1.0, 0.5)},
        {"prompt_sha256": "another"},
        {"dataset": "hotpotqa"},
    ],
)
def test_other_prompts_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    file = replies(tmp_path / "replies.json", **other)
    with pytest.raises(IncomparableRuns, match="musique in float32"):
        compare(*sides(run(tmp_path / "run"), file))


def test_a_run_with_failed_requests_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(IncomparableRuns, match="not every request"):
        read_side(run(tmp_path / "run", error="out of memory"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"replies": [{}]}'])
def test_files_that_are_something_else_are_plain_errors(tmp_path: Path, text: str) -> None:
    file = tmp_path / "replies.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not a file of replies"):
        read_replies(file)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="not the directory of a run"):
        read_side(tmp_path)


@pytest.mark.parametrize(("scores", "code"), [(SCORES, 0), ((0.9, 0.5, 0.0), 3)])
def test_the_command_fails_where_scores_differ(
    tmp_path: Path, scores: tuple[float, ...], code: int
) -> None:
    file = replies(tmp_path / "replies.json", scores)
    flags = ["--replies", str(file), "--output", str(tmp_path / "out")]
    folder = str(run(tmp_path / "run"))
    found = CliRunner().invoke(main, ["measure", "agreement", "compare", folder, *flags])
    assert found.exit_code == code
    assert (tmp_path / "out" / "agreement.md").exists()


def test_replies_to_an_unknown_data_set_are_a_usage_error(tmp_path: Path) -> None:
    output = tmp_path / "replies.json"
    flags = ["--dtype", "float32", "--dataset", "musik", "--output", str(output)]
    found = CliRunner().invoke(main, ["measure", "agreement", "replies", *flags])
    assert found.exit_code == 2
    assert "--dataset musik: no such data set" in found.stderr
    assert not output.exists()


def test_hugging_face_replies_as_the_testbed_does(tmp_path: Path) -> None:
    output = tmp_path / "replies.json"
    flags = ["--dtype", "float32", "--rows", "2", "--dataset", "multi_news"]
    arguments = ["measure", "agreement", "replies", *flags, "--output", str(output)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    (side,) = read_replies(output)
    judge = Judge(*load(model_path(), torch.device("cpu")))
    items = judge.items(rows("multi_news", count=2))
    ours = {
        item.row["_id"]: {"text": text, "score": score}
        for item, (score, text) in zip(items, judge.judge(items, FULL), strict=True)
    }
    theirs = {sample: asdict(reply) for sample, reply in side.replies.items()}
    assert {sample: reply.pop("prompt") for sample, reply in theirs.items()}
    assert theirs == ours
