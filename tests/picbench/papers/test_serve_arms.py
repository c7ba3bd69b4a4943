"""Rows served by every arm and alone, and scores beside the card's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest
from harness_fakes import Harness, make_sample

from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.errors import ConfigError, InvalidRun
from picbench.papers import serve_arms
from picbench.papers.arm_scores import Case, ScoredPart, score_arms
from picbench.papers.serve_arms import (
    ARMS,
    ROWS,
    WINDOW,
    ServeSettings,
    first_difference,
    measure,
    measure_accuracy,
    measure_alone,
)
from picbench.run.measurements import Accuracy, ServeAlone
from picbench.run.workload import Workload
from picbench.settings import RunConfig

SERVED = ("full", "naive", "mepic")
#: What the right answer costs under arms that are given the chunks.
NATS = {"full": 0.1, "naive": 0.3, "mepic:anchor=sample-3": 0.2}
SETTINGS = ServeSettings(
    dataset=("musique",), rows=2 * WINDOW + 1, algo=("naive", "mepic"), device="cpu", commit="C"
)
ALONE = ServeAlone(
    dataset=("musique", "needle"), algo=("naive", "mepic"), device="cpu", commit="C", requests=7
)


def reply(*tokens: int, gaps: Sequence[float] = ()) -> Result:
    """A reply; at each token the second best one is this much less likely."""
    steps = tuple({token: -0.1, 99: -0.1 - gap} for token, gap in zip(tokens, gaps, strict=False))
    counts = TokenCounts(prompt=36)
    times = Timings(0.1, 0.1, None, 0.1)
    return Result("yes", tokens, (), times, counts, Hits(), "stop", logprobs=steps)


@dataclass
class Answers:
    """An engine, and the process of one, that notes what it is asked.

    It answers "yes", the right reply, but for the first `wrong` requests of a batch to `arm`.
    """

    wrong: int = 0
    arm: str | None = None
    linked: int = 16
    fails: bool = False
    compilations: Sequence[str] = ()
    calls: list[str] = field(default_factory=list)
    batches: list[list[Request]] = field(default_factory=list)
    configs: list[EngineConfig] = field(default_factory=list)

    def __call__(self, *given: Any) -> Self:
        self.configs += [one for one in given if isinstance(one, EngineConfig)]
        return self

    def __enter__(self) -> Self:
        return self

    def nothing(self, *_: object) -> None: ...

    __exit__ = warm_up = watch_compilations = close = kill = nothing

    def ready(self) -> dict[str, object]:
        return {}

    def describe(self) -> dict[str, str]:
        return {"dtype": self.configs[-1].dtype}

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def reset(self) -> None:
        self.calls.append("reset")

    def generate(self, requests: Sequence[Request], *, logprobs: int = 0) -> list[Result]:
        self.calls.append(f"generate {len(requests)}")
        self.batches.append(list(requests))
        return [self._answer(n, request, len(requests)) for n, request in enumerate(requests)]

    def _answer(self, number: int, request: Request, batch: int) -> Result:
        assert request.max_tokens == 2
        if request.reply:
            chunks = any(isinstance(segment, Chunk) for segment in request.segments)
            nats = NATS[str(request.algorithm)] if chunks else 0.9
            counts = TokenCounts(prompt=36 if chunks else 4)
            steps = tuple({token: -nats} for token in request.reply)
            given = replace(reply(*request.reply), logprobs=steps, counts=counts)
            error = {"finish_reason": "error", "error": "a fault", "logprobs": None}
            return replace(given, **error) if self.fails and not chunks else given
        wrong = number < self.wrong and self.arm in (None, request.algorithm) and batch > 1
        found = reply(5, 7 if wrong else 6, gaps=(1.0, 0.5 if wrong else 0.25))
        reused = 0 if request.algorithm == "full" else 20
        linked = self.linked if request.algorithm == "mepic" else 0
        return replace(
            found,
            text="no" if wrong else "yes",
            counts=replace(found.counts, reused=reused, linked=linked),
            finish_reason="error" if self.fails else "stop",
            error="a fault" if self.fails else None,
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Any engine, and rows whose right reply is "yes" in place of any data set's."""

    def load(config: RunConfig) -> Workload:
        found = Harness([make_sample(n) for n in range(ROWS)]).load(config)
        return replace(found, dataset=config.dataset)

    found = Answers()
    monkeypatch.setattr(serve_arms, "load_workload", load)
    monkeypatch.setattr(serve_arms, "Engine", found)
    return found


def scored(engine: Answers, folder: Path, **changes: Any) -> ScoredPart:
    """The part of `SETTINGS`, measured to its end."""
    settings = SETTINGS.model_copy(update={"output": folder, **changes})
    assert measure(settings, launcher=engine).code == 0
    return ScoredPart.read(folder / f"{settings.cases[0].name}.json")


def test_every_arm_has_every_row_in_order(engine: Answers, tmp_path: Path) -> None:
    engine.wrong, engine.arm = 1000, "naive"
    part = scored(engine, tmp_path)
    assert (part.case, part.rows, tuple(part.arms)) == (Case("testbed", "musique"), 21, SERVED)
    scores = {arm: set(rows.score) for arm, rows in part.arms.items()}
    assert scores == {"full": {1.0}, "naive": {0.0}, "mepic": {1.0}}
    # Two chunks of one block: all of them is linked by mepic and by full.
    assert part.arms["mepic"].linked == part.arms["full"].linked == [32] * 21
    assert part.arms["naive"].computed == [16] * 21
    assert (part.prompt[0], part.chunk[0]) == (36, 32)


def test_batches_have_all_arms_in_a_random_order_of_the_seed(
    engine: Answers, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        scored(engine, tmp_path / name, seed=seed)
    assert [len(batch) for batch in engine.batches] == [3 * WINDOW, 3 * WINDOW, 3] * 3
    orders = [[str(request.algorithm) for request in batch] for batch in engine.batches]
    assert orders[1] != orders[0] != sorted(orders[0]) == sorted(SERVED * WINDOW)
    assert engine.batches[:3] == engine.batches[3:6] != engine.batches[6:]


def test_a_measurement_that_was_stopped_goes_on(engine: Answers, tmp_path: Path) -> None:
    stopped = SETTINGS.model_copy(update={"output": tmp_path, "seconds": 1e-9})
    assert measure(stopped, launcher=engine).code == 4
    assert not list(tmp_path.iterdir())
    whole = scored(engine, tmp_path, kv_blocks=2000, max_requests=7, eager=True)
    config = engine.configs[-1]
    assert (config.kv_blocks, config.max_requests, config.tiers) == (2000, 7, "")
    assert (config.device, config.dtype, config.eager) == ("cpu", "bfloat16", True)
    partly = json.loads((tmp_path / "testbed-musique.json").read_text())
    for rows in (partly, *partly["arms"].values()):
        for name in rows.keys() & {"prompt", "chunk", "score", "linked", "computed"}:
            rows[name] = rows[name][:WINDOW]
    (tmp_path / "testbed-musique.json").write_text(json.dumps(partly))
    engine.batches.clear()
    for _ in range(2):  # What is complete starts no engine.
        assert scored(engine, tmp_path, eager=True) == whole
        assert [len(batch) for batch in engine.batches] == [3 * WINDOW, 3]
    with pytest.raises(ConfigError, match="other settings"):
        scored(engine, tmp_path, dtype="float32")


def test_cases_come_one_after_another_and_leave_nothing_cached(
    engine: Answers, tmp_path: Path
) -> None:
    scored(engine, tmp_path, dataset=("musique", "needle"), rows=1)
    assert engine.calls == ["reset", "generate 3"] * 2
    scored(engine, tmp_path, dataset=("needle", "hotpotqa"), drop=True, rows=1)
    names = {path.name for path in tmp_path.iterdir()}
    # Needle has no lead passages that could be left out.
    parts = {"testbed-musique.json", "testbed-needle.json", "testbed-hotpotqa-drop.json"}
    assert names == parts


def test_the_first_rows_can_be_left_out(engine: Answers, tmp_path: Path) -> None:
    part = scored(engine, tmp_path, rows=WINDOW, first=WINDOW - 2)
    assert (part.rows, part.wanted, part.case.first) == (2, 2, WINDOW - 2)
    chunks = {request.segments[1].tokens for request in engine.batches[0]}
    assert chunks == {(1000 + row,) * 16 for row in (8, 9)}
    with pytest.raises(ConfigError, match="`first` 10: fake has no row after that"):
        scored(engine, tmp_path, dataset=("fake",), rows=10, first=10)


def test_a_request_that_fails_or_links_more_than_its_plan_is_invalid(
    engine: Answers, tmp_path: Path
) -> None:
    engine.linked = 33
    with pytest.raises(InvalidRun, match="mepic on row 0 of testbed-musique linked 33 tokens"):
        scored(engine, tmp_path)
    engine.fails = True
    with pytest.raises(InvalidRun, match="full on row 0 of testbed-musique failed: a fault"):
        scored(engine, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_right_answers_are_forced_with_and_without_chunks(engine: Answers, tmp_path: Path) -> None:
    algo = ("nocontext", "naive", "mepic:anchor=sample-3")
    part = scored(engine, tmp_path, likelihood=True, algo=algo)
    assert part.likelihood
    gains = {arm: {*rows.score} for arm, rows in part.arms.items()}
    assert gains == {"full": {0.8}, "nocontext": {0.0}, "naive": {0.6}, algo[2]: {0.7}}
    assert part.arms["nocontext"].linked == [0] * 21
    config, first = engine.configs[-1], engine.batches[0]
    assert config.forced_replies
    assert {*map(len, config.anchors)} == {len("sample-3")}
    assert {len(request.reply or ()) for request in first} == {1, 2, 3}
    assert {request.logprobs for request in first} == {0}
    assert score_arms(part)["naive"].kept == pytest.approx((0.75, 0.75, 0.75))
    with pytest.raises(ConfigError, match="other settings"):
        scored(engine, tmp_path, algo=algo)
    engine.fails = True
    with pytest.raises(InvalidRun, match="on row 0 of testbed-musique failed: a fault"):
        scored(engine, tmp_path / "other", likelihood=True, algo=algo)


@pytest.mark.engine
def test_a_real_engine_links_what_plans_say(tmp_path: Path) -> None:
    settings = ServeSettings(
        dataset=("multi_news",),
        rows=2,
        algo=("mepic:anchor=head:context=document", "cacheblend:r=0.15"),
        device="cpu",
        dtype="float32",
        eager=True,
        kv_blocks=1024,
        output=tmp_path,
    )
    assert measure(settings).code == 0
    part = ScoredPart.read(tmp_path / "testbed-multi_news.json")
    full, own, blend = part.arms.values()
    assert full.score == pytest.approx([1.0, 1.0], abs=0.1)
    assert full.linked == part.chunk
    assert all(0 < linked < chunk for linked, chunk in zip(own.linked, part.chunk, strict=True))
    assert blend.linked == [int(0.15 * chunk) for chunk in part.chunk]


def noted(folder: Path, name: str = "alone-float32") -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_each_request_is_served_again_alone_in_an_empty_engine(
    engine: Answers, tmp_path: Path
) -> None:
    measure_alone(ALONE.model_copy(update={"output": tmp_path}))
    assert engine.calls == ["generate 7", *["reset", "generate 1"] * 7]
    together, *alone = engine.batches
    assert together == [request for [request] in alone]
    assert {request.algorithm for request in together} == set(SERVED)
    found = noted(tmp_path)
    assert (found["differing"], found["requests"]) == ([], 7)
    assert found["provenance"]["tokens"] == 14


def test_other_tokens_are_written_and_invalid_in_float32(engine: Answers, tmp_path: Path) -> None:
    engine.wrong = 2
    settings = ALONE.model_copy(update={"output": tmp_path})
    with pytest.raises(InvalidRun, match="2 of 7 requests differ from those alone"):
        measure_alone(settings)
    first, second = noted(tmp_path)["differing"]
    assert (first["token"], first["gap"]) == (1, pytest.approx(0.25))
    assert second["arm"] in SERVED
    measure_alone(settings.model_copy(update={"dtype": "bfloat16"}))
    assert len(noted(tmp_path, "alone-bfloat16")["differing"]) == 2
    page = (tmp_path / "alone-bfloat16.md").read_text()
    assert "2 of 7 requests have other tokens (14 in all)." in page
    assert f"| {second['dataset']} | {second['row']} | `{second['arm']}` | 1 | 2.5e-01 |" in page


def test_a_reply_that_ends_early_differs_after_its_last_token() -> None:
    long, short = reply(5, 6, gaps=(1.0, 0.75)), reply(5, gaps=(1.0,))
    assert first_difference(long, short) == (1, pytest.approx(0.75))
    assert first_difference(short, long) == (1, pytest.approx(0.75))


def compared(folder: Path, dtype: str, rows: int = ROWS) -> Any:
    """What is written of scores beside the card's, those of one data set."""
    settings = Accuracy(device="cpu", eager=True, commit="C", output=folder)
    measure_accuracy(settings.model_copy(update={"dtype": dtype, "rows": rows}))
    return noted(folder, f"accuracy-{dtype}")


@pytest.fixture
def samsum(engine: Answers, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """One set; the card says that all arms score 1. The first replies under mepic are wrong."""
    monkeypatch.setattr(serve_arms, "DATASETS", ("samsum",))
    engine.arm = "mepic"
    return engine


def test_scores_that_are_close_enough_are_a_good_run(samsum: Answers, tmp_path: Path) -> None:
    samsum.wrong = 5
    found = compared(tmp_path, "float32")
    engines = {result["arm"]: result["engine"] for result in found["results"]}
    assert engines == {"full": 1.0, "naive": 1.0, "epic:k=16": 1.0, "mepic": 0.975}
    *_, last = found["results"]
    assert last.pop("difference") == pytest.approx(-0.025)
    assert last == {"dataset": "samsum", "arm": "mepic", "rows": 200, "engine": 0.975, "card": 1.0}
    assert (found["provenance"]["commit"], found["provenance"]["eager"]) == ("C", True)


def test_scores_that_are_apart_are_written_and_invalid_if_the_card_has_as_many_rows(
    samsum: Answers, tmp_path: Path
) -> None:
    samsum.wrong = 7
    with pytest.raises(InvalidRun, match=r"card's differ: mepic on samsum: -0\.035$") as error:
        compared(tmp_path, "bfloat16")
    assert error.value.exit_code == 3
    page = tmp_path / "accuracy-bfloat16.md"
    assert "0.965 / 1.000" in page.read_text()
    compared(tmp_path, "bfloat16", rows=3)
    assert "| mepic | 0.000 / 1.000 |" in page.read_text()
    config = samsum.configs[-1]
    # 36 tokens of prompt and 2 of reply are 3 blocks.
    assert (config.context, config.kv_blocks, config.eager) == (38, 600, True)


@pytest.mark.engine
def test_a_real_engine_is_scored_on_a_real_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_arms, "DATASETS", ("hotpotqa",))
    found = compared(tmp_path, "float32", rows=1)
    full, *others = found["results"]
    assert [result["arm"] for result in (full, *others)] == list(ARMS)
    assert (full["rows"], full["engine"], full["card"]) == (1, pytest.approx(1.0), 1.0)
    assert all(result["card"] < 1.0 for result in others)
    assert found["provenance"]["driver"] == "none"
