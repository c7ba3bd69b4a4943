"""The engine's scores beside the model card's: the page, and what is too far apart."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
from harness_fakes import GPU_FACTS, Harness, make_sample

from picbench.engines.config import EngineConfig
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments import serve_arms as accuracy
from picbench.experiments.serve_arms import ARMS, ROWS, Score
from picbench.experiments.serve_arms import measure_accuracy as measure
from picbench.experiments.serve_arms import render_accuracy as render
from picbench.experiments.serve_arms import write_accuracy as write
from picbench.run.workload import Workload
from picbench.settings import RunConfig

FACTS = GPU_FACTS | {"dtype": "float32", "eager": False}

SCORES = [
    Score("musique", "full", 200, engine=0.75, card=0.7),
    Score("musique", "mepic", 200, engine=0.5, card=0.625),
    Score("samsum", "full", 200, engine=1.0, card=1.0),
    Score("samsum", "mepic", 200, engine=0.25, card=0.2),
]

Answers = Callable[[int], list[EngineConfig]]


@dataclass
class Answering:
    """Answers "yes", the right reply, but for the first requests to mepic."""

    config: EngineConfig
    wrong: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def describe(self) -> dict[str, str]:
        return {"dtype": self.config.dtype}

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        return [self._answer(n, request) for n, request in enumerate(requests)]

    def _answer(self, number: int, request: Request) -> Result:
        wrong = request.algorithm == "mepic" and number < self.wrong
        assert request.max_tokens == 2
        return Result(
            "no" if wrong else "yes", (5,), (), Timings(0.1, 0.1, None, 0.1), TokenCounts(), Hits()
        )


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set, whose right reply is "yes" in every row; the card says that all arms score 1."""

    def load(config: RunConfig) -> Workload:
        found = Harness([make_sample(n) for n in range(ROWS)]).load(config)
        return replace(found, dataset=config.dataset)

    monkeypatch.setattr(accuracy, "DATASETS", ("samsum",))
    monkeypatch.setattr(accuracy, "load_workload", load)


@pytest.fixture
def answering(yes: None, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """(wrong) -> the settings of engines that give so many wrong replies; none so far."""

    def start(wrong: int) -> list[EngineConfig]:
        started: list[EngineConfig] = []

        def engine(config: EngineConfig) -> Answering:
            started.append(config)
            return Answering(config, wrong)

        monkeypatch.setattr(accuracy, "Engine", engine)
        return started

    return start


def test_the_page_has_both_scores_of_each_arm_and_set() -> None:
    lines = render(SCORES, FACTS).splitlines()
    assert "| arm | musique | samsum |" in lines
    assert "| full | 0.750 / 0.700 | 1.000 / 1.000 |" in lines
    assert "| mepic | 0.500 / 0.625 | 0.250 / 0.200 |" in lines
    assert "Largest difference: 0.125." in lines


@pytest.mark.parametrize(("eager", "said"), [(False, "float32; G"), (True, "float32, eager; G")])
def test_the_page_says_what_ran(eager: bool, said: str) -> None:
    page = render(SCORES, FACTS | {"eager": eager})
    assert f"200 synthetic rows of each set, greedy, {said}, driver D, vLLM V, torch T" in page


def test_files_are_named_after_the_type(tmp_path: Path) -> None:
    write(SCORES, FACTS, tmp_path / "new")
    noted = json.loads((tmp_path / "new" / "accuracy-float32.json").read_text())
    assert noted["provenance"] == FACTS
    assert noted["results"][1] == {
        "dataset": "musique",
        "arm": "mepic",
        "rows": 200,
        "engine": 0.5,
        "card": 0.625,
        "difference": -0.125,
    }
    assert (tmp_path / "new" / "accuracy-float32.md").read_text() == render(SCORES, FACTS)


def test_scores_that_are_close_enough_are_a_good_run(answering: Answers, tmp_path: Path) -> None:
    answering(5)
    measure("cpu", "float32", ROWS, True, "abc", tmp_path)
    noted = json.loads((tmp_path / "accuracy-float32.json").read_text())
    found = {result["arm"]: result["engine"] for result in noted["results"]}
    assert found == {"full": 1.0, "naive": 1.0, "epic:k=16": 1.0, "mepic": 0.975}
    assert noted["results"][3]["difference"] == pytest.approx(-0.025)
    assert (noted["provenance"]["commit"], noted["provenance"]["eager"]) == ("abc", True)


def test_scores_that_are_apart_are_written_and_invalid(answering: Answers, tmp_path: Path) -> None:
    answering(7)
    with pytest.raises(InvalidRun, match=r"card's differ: mepic on samsum: -0\.035$") as error:
        measure("cpu", "bfloat16", ROWS, True, "abc", tmp_path)
    assert error.value.exit_code == 3
    assert "0.965 / 1.000" in (tmp_path / "accuracy-bfloat16.md").read_text()


def test_fewer_rows_than_the_cards_are_not_held_to_it(answering: Answers, tmp_path: Path) -> None:
    answering(20)
    measure("cpu", "float32", 20, True, "abc", tmp_path)
    assert "| mepic | 0.000 / 1.000 |" in (tmp_path / "accuracy-float32.md").read_text()


def test_the_engine_has_room_for_the_longest_request(answering: Answers, tmp_path: Path) -> None:
    started = answering(0)
    measure("cpu", "bfloat16", 3, False, "abc", tmp_path)
    [config] = started
    assert (config.device, config.dtype, config.eager) == ("cpu", "bfloat16", False)
    # 36 tokens of prompt and 2 of reply are 3 blocks.
    assert (config.context, config.kv_blocks) == (38, 600)


@pytest.mark.engine
def test_a_real_engine_is_scored_on_a_real_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "DATASETS", ("hotpotqa",))
    measure("cpu", "float32", 1, True, "abc", tmp_path)
    noted = json.loads((tmp_path / "accuracy-float32.json").read_text())
    full, *others = noted["results"]
    assert [result["arm"] for result in (full, *others)] == list(ARMS)
    assert (full["rows"], full["engine"], full["card"]) == (1, pytest.approx(1.0), 1.0)
    assert all(result["card"] < 1.0 for result in others)
    assert noted["provenance"]["driver"] == "none"
