"""Likelihood of right answers: what is sent for it, what rows and tables have of it."""

import json
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness_fakes import FakeEngine, Harness, make_reusing_samples, make_sample, run_fakes

from picbench.cli import main
from picbench.compare.arm import Drift, measured_arms
from picbench.compare.baseline import make_baseline
from picbench.compare.comparison import compare_own_arms
from picbench.compare.gate import GateVerdict, judge_arms
from picbench.errors import ConfigError
from picbench.settings import ComparisonSettings
from picbench.store.reader import read_run
from picbench.tables.metrics import METRICS
from picbench.tables.run import as_markdown

ARMS = ("full", "nocontext", "naive")
ASKED = {"scoring": "longbench,likelihood", "concurrency": 2}


@pytest.fixture
def harness() -> Harness:
    return Harness([make_sample(n) for n in range(12)], weights="real")


def test_answers_are_asked_for_beside_what_is_measured(harness: Harness, tmp_path: Path) -> None:
    plain = read_run(run_fakes(harness, tmp_path / "plain", *ARMS, concurrency=2))
    run = read_run(run_fakes(harness, tmp_path / "asked", *ARMS, **ASKED))
    nats = {"full": 1.0, "nocontext": 3.0, "naive": 1.5}
    assert {(row.arm, row.nll) for row in run.rows} == {*nats.items()}
    assert {row.nll for row in plain.rows} == {None}
    assert [replace(row, nll=None) for row in run.rows] == list(plain.rows)
    assert [arm.moved for arm in run.summary.values()] == [
        arm.moved for arm in plain.summary.values()
    ]


def test_an_arm_gets_prompts_without_their_chunks(harness: Harness, tmp_path: Path) -> None:
    run = read_run(run_fakes(harness, tmp_path, *ARMS, **ASKED))
    prompts = {name: {row.tokens.prompt for row in run.rows if row.arm == name} for name in ARMS}
    assert prompts == {"full": {36}, "naive": {36}, "nocontext": {4}}
    assert {row.tokens.reused for row in run.rows if row.arm == "nocontext"} == {0}
    assert harness.servers["nocontext"].config.stock
    assert run.manifest["arms"]["nocontext"]["algorithm"] == "full"


def test_tables_have_what_is_kept(harness: Harness, tmp_path: Path) -> None:
    run = read_run(run_fakes(harness, tmp_path, *ARMS, **ASKED))
    found = {name: METRICS["kept"].text(arm) for name, arm in run.summary.items()}
    assert found == {
        "full": "1.00 (1.00 to 1.00)",
        "nocontext": "0.00 (0.00 to 0.00)",
        "naive": "0.75 (0.75 to 0.75)",
    }
    assert "| 1.500 | 0.75 |" in as_markdown([run])
    # Without an arm that it needs there is no share, and random weights are marked.
    random = Harness(harness.samples)
    others = read_run(run_fakes(random, tmp_path / "random", "full", "naive", **ASKED)).summary
    assert METRICS["nll"].text(others["naive"]) == "1.500*"
    assert METRICS["kept"].text(others["naive"]) is None
    assert METRICS["kept"].known(others["naive"]) is METRICS["nll"].known(others["naive"]) is None


def test_nothing_is_kept_of_what_is_worth_nothing(tmp_path: Path) -> None:
    """Context that makes answers less likely."""
    samples = [make_sample(n) for n in range(4)]
    harness = Harness(samples, engines={"full": FakeEngine("full", nats=9.0)})
    run = read_run(run_fakes(harness, tmp_path, *ARMS, **ASKED))
    assert run.summary["naive"].likelihood is not None
    assert run.summary["naive"].likelihood.kept is None


@pytest.mark.parametrize("linked", [False, True], ids=["apart", "linked"])
def test_perplexity_is_compared(linked: bool, tmp_path: Path) -> None:
    """By sets of documents, and by requests where all are linked."""
    samples = make_reusing_samples(12) if linked else [make_sample(n) for n in range(12)]
    run = read_run(run_fakes(Harness(samples, weights="real"), tmp_path, *ARMS, **ASKED))
    compared = compare_own_arms(run, ComparisonSettings(arms=("full", "naive")))
    change = compared.arms[0].metric("perplexity")
    assert change is not None and change.change.interval is not None
    assert change.change.value == pytest.approx(exp(0.5))
    assert (change.wins, change.losses) == (0, 12)
    assert (change.drift, change.before) == (Drift.ALIKE, pytest.approx(exp(1.0)))


def test_perplexity_is_gated(harness: Harness, tmp_path: Path) -> None:
    saved = make_baseline([read_run(run_fakes(harness, tmp_path / "saved", "full", **ASKED))])
    assert saved.thresholds.perplexity == {"ratio": 1.02}
    found = {}
    for name, engine in (("same", FakeEngine("full")), ("worse", FakeEngine("full", nats=0.5))):
        again = Harness(harness.samples, weights="real", engines={"full": engine})
        run = read_run(run_fakes(again, tmp_path / name, "full", **ASKED))
        [check] = [c for c in judge_arms(measured_arms(run), saved) if c.metric == "perplexity"]
        found[name] = check.verdict
    assert found == {"same": GateVerdict.OK, "worse": GateVerdict.REGRESSION}
    plain = read_run(run_fakes(harness, tmp_path / "plain", "full"))
    assert make_baseline([plain]).thresholds.perplexity is None


@pytest.mark.parametrize("wrong", ["likely", "longbench,cacheblend", "likelihood,likelihood", ","])
def test_other_words_are_refused(tmp_path: Path, wrong: str) -> None:
    flags = ["--algo", "full", "--dataset", "musique", "--scoring", wrong, "--dry-run"]
    result = CliRunner().invoke(main, ["run", *flags, "--output", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "--scoring" in result.stderr and result.stderr.count("\n") == 1


def test_servers_elsewhere_are_not_asked(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`scoring=likelihood` and `arm`"):
        run_fakes(harness, tmp_path, "full", arm=("r=http://host:1/v1",), scoring="likelihood")


def test_prompts_without_chunks_are_no_algorithm_to_profile(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("{}")
    flags = ["profile", str(tmp_path / "trace.jsonl"), "--algo", "mepic,nocontext"]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert "nocontext" in result.stderr and result.stderr.count("\n") == 1


def test_failed_requests_have_no_likelihood(tmp_path: Path) -> None:
    harness = Harness([make_sample(0), make_sample(1, first=666)])
    run = read_run(run_fakes(harness, tmp_path, "full", **ASKED))
    assert [(row.error is None, row.nll) for row in run.rows] == [(True, 1.0), (False, None)]
    assert json.loads((tmp_path / "summary.json").read_text())["arms"]["full"]["likelihood"] == {
        "nll": 1.0,
        "samples": 1,
        **dict.fromkeys(("kept", "low", "high")),
    }
