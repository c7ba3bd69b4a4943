"""Likelihood of answers, and fidelity: what is sent for them, what rows and tables have of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from harness_fakes import FakeEngine, Harness, make_reusing_samples, make_sample, run_fakes
from hypothesis import given
from hypothesis import strategies as st

from picbench.cli import main
from picbench.compare.arm import Drift, measured_arms
from picbench.compare.baseline import make_baseline
from picbench.compare.comparison import compare_own_arms
from picbench.compare.gate import GateVerdict, judge_arms
from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import ConfigError
from picbench.settings import ComparisonSettings
from picbench.store.reader import read_run
from picbench.store.records import Fidelity, compare_steps
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
    assert {(row.arm, row.first == 99) for row in run.rows} == {
        ("full", False),
        ("nocontext", True),
        ("naive", False),
    }
    assert [replace(row, nll=None, first=None) for row in run.rows] == list(plain.rows)
    assert [arm.moved for arm in run.summary.values()] == [
        arm.moved for arm in plain.summary.values()
    ]


def test_an_arm_gets_prompts_without_their_chunks(harness: Harness, tmp_path: Path) -> None:
    run = read_run(run_fakes(harness, tmp_path, *ARMS, **ASKED))
    prompts = {name: {row.tokens.prompt for row in run.rows if row.arm == name} for name in ARMS}
    assert prompts == {"full": {36}, "naive": {36}, "nocontext": {4}}
    assert {row.tokens.reused for row in run.rows if row.arm == "nocontext"} == {0}
    assert run.manifest["arms"]["nocontext"]["algorithm"] == "full"


@pytest.mark.parametrize("arms", [ARMS, ARMS[::-1], ("nocontext", "naive")])
def test_prompts_without_their_chunks_need_no_engine_of_their_own(
    harness: Harness, tmp_path: Path, arms: Sequence[str]
) -> None:
    run = read_run(run_fakes(harness, tmp_path, *arms, **ASKED))
    assert {*harness.servers} == {"full", "naive"}
    assert harness.servers["full"].config.stock
    assert {row.arm for row in run.rows} == {*arms}


def test_tables_have_what_is_kept(harness: Harness, tmp_path: Path) -> None:
    run = read_run(run_fakes(harness, tmp_path, *ARMS, **ASKED))
    found = {name: METRICS["kept"].text(arm) for name, arm in run.summary.items()}
    assert found == {
        "full": "1.00 (1.00 to 1.00)",
        "nocontext": "0.00 (0.00 to 0.00)",
        "naive": "0.75 (0.75 to 0.75)",
    }
    assert "| 1.500 | 0.75 | 1.000 |" in as_markdown([run])
    likely = {name: METRICS["same_first"].of_arm(arm) for name, arm in run.summary.items()}
    assert likely == {"full": 1.0, "nocontext": 0.0, "naive": 1.0}
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
        elsewhere = judge_arms(measured_arms(run), saved, times=False)
        assert check.verdict in {c.verdict for c in elsewhere if c.metric == "perplexity"}
    assert found == {"same": GateVerdict.OK, "worse": GateVerdict.REGRESSION}
    plain = read_run(run_fakes(harness, tmp_path / "plain", "full"))
    assert make_baseline([plain]).thresholds.perplexity is None


@pytest.mark.parametrize("lost", [False, True], ids=["by chance", "not measured"])
def test_perplexity_that_may_have_grown_does_not_pass(
    harness: Harness, tmp_path: Path, lost: bool
) -> None:
    run = read_run(run_fakes(harness, tmp_path / "saved", "full", **ASKED))
    saved, arm = make_baseline([run]), measured_arms(run)["full"]
    first, *others = arm.times["perplexity"]
    assert first is not None
    changed = (None if lost else 10 * first, *others)
    arms = {"full": replace(arm, times={**arm.times, "perplexity": changed})}
    [check, *_] = [c for c in judge_arms(arms, saved) if c.metric == "perplexity"]
    assert (check.verdict, check.fails) == (GateVerdict.INCONCLUSIVE, True)


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


def test_arms_are_held_to_the_replies_of_full(harness: Harness, tmp_path: Path) -> None:
    """Also where full is not the first to serve, and beside likelihood."""
    flags = {"scoring": "likelihood,fidelity", "concurrency": 2}
    run = read_run(run_fakes(harness, tmp_path / "run", "naive", "full", "nocontext", **flags))
    p, q = exp(-1.0), exp(-1.5)
    kl = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
    assert run.summary["full"].fidelity == Fidelity(0.0, 1.0)
    found = run.summary["naive"].fidelity
    assert found is not None and found.same_top == 1.0
    assert found.kl == pytest.approx(kl)
    assert {row.nll for row in run.rows if row.arm == "naive"} == {1.5}
    assert METRICS["kl"].text(run.summary["naive"]) == f"{kl:.4f}"
    # Each arm gets replies of full, and nothing of it is in what was measured.
    assert harness.order[-3:] == ["full", "full", "naive"]  # nocontext is served by full's engine.
    plain = Harness(harness.samples, weights="real")
    rows = read_run(run_fakes(plain, tmp_path / "plain", *ARMS[::-1], concurrency=2)).rows
    assert {r.output_sha256 for r in run.rows} == {r.output_sha256 for r in rows}


def test_divergence_is_compared_and_gated(tmp_path: Path) -> None:
    """Also of an arm that does not diverge."""
    samples = [make_sample(n) for n in range(12)]
    run = read_run(
        run_fakes(Harness(samples, weights="real"), tmp_path, *ARMS[::2], scoring="fidelity")
    )
    compared = compare_own_arms(run, ComparisonSettings(arms=("full", "naive")))
    change = compared.arms[0].metric("exp_kl")
    kl = run.summary["naive"].fidelity
    assert change is not None and kl is not None
    assert (change.before, change.change.value) == (1.0, pytest.approx(exp(kl.kl)))
    assert (change.wins, change.losses) == (0, 12)
    saved = make_baseline([run])
    assert saved.thresholds.exp_kl == {"ratio": 1.02}
    judged = [check for check in judge_arms(measured_arms(run), saved) if check.metric == "exp_kl"]
    assert [check.verdict for check in judged] == [GateVerdict.OK] * 2


def test_fidelity_goes_on_at_a_whole_round(tmp_path: Path) -> None:
    """A run that was stopped within a round begins it again, since full's replies are gone."""
    samples = [make_sample(n) for n in range(12)]
    flags = {"scoring": "fidelity", "concurrency": 1}
    whole = read_run(run_fakes(Harness(samples), tmp_path / "whole", *ARMS[::2], **flags))
    seen = 0

    def stop() -> None:
        nonlocal seen
        if (seen := seen + 1) == 20:
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_fakes(Harness(samples, watch=stop), folder, *ARMS[::2], **flags)
    batches = (folder / "batches.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "batches.jsonl").write_bytes(b"".join(batches[:-1]))
    run = read_run(run_fakes(Harness(samples), folder, *ARMS[::2], **flags))
    assert [replace(r, e2e_ms=0) for r in run.rows] == [replace(r, e2e_ms=0) for r in whole.rows]


def test_fidelity_needs_full(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held to those of full"):
        run_fakes(harness, tmp_path, "naive", scoring="fidelity")


def test_a_reply_that_failed_has_no_fidelity(tmp_path: Path) -> None:
    harness = Harness([make_sample(0), make_sample(1, first=666)])
    run = read_run(run_fakes(harness, tmp_path, "full", "naive", scoring="fidelity"))
    known = {row.sample: row.kl is None for row in run.rows if row.arm == "naive"}
    assert known == {"s0": False, "s1": True}


def test_an_engine_that_dies_meanwhile_keeps_what_it_served(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(3)], dies_at={"naive": 1})
    run = read_run(run_fakes(harness, tmp_path, "full", "naive", scoring="fidelity", concurrency=1))
    rows = [row for row in run.rows if row.arm == "naive"]
    assert [(row.error is None, row.kl) for row in rows] == [(True, None), *[(False, None)] * 2]


def steps(*rows: Sequence[float]) -> Result:
    """A reply whose tokens have these log-probabilities, of tokens 0, 1, ...; NaN is not listed."""
    told = tuple({t: n for t, n in enumerate(row) if n == n} for row in rows)
    times = Timings(0.0, 0.0, None, 0.0)
    tokens = (0,) * len(rows)
    return Result("", tokens, (1,), times, TokenCounts(), Hits(), logprobs=told)


@given(st.integers(2, 30), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_divergence_is_over_the_likeliest_tokens_and_all_others(
    n: int, top: int, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    p, q = (np.log(dice.dirichlet(np.full(n, 0.5)) + 1e-30) for _ in range(2))
    whole = compare_steps(steps(p, q), steps(q, q))
    assert whole.kl == pytest.approx(float((np.exp(p) * (p - q)).sum()) / 2, rel=1e-3, abs=1e-6)
    assert whole.same_top == (0.5 if p.argmax() != q.argmax() else 1.0)
    listed = [np.where(v >= np.sort(v)[-min(top, n)], v, np.nan) for v in (p, q)]
    with_reply = np.where(np.arange(n) == p.argmax(), q, listed[1])
    for found in (listed[1], with_reply):
        assert 0.0 <= compare_steps(steps(listed[0]), steps(found)).kl <= 2 * whole.kl + 1e-6
    assert compare_steps(steps(listed[0]), steps(listed[0])).kl == pytest.approx(0.0, abs=1e-9)


def test_failed_requests_have_no_likelihood(tmp_path: Path) -> None:
    harness = Harness([make_sample(0), make_sample(1, first=666)])
    run = read_run(run_fakes(harness, tmp_path, "full", **ASKED))
    assert [(row.error is None, row.nll) for row in run.rows] == [(True, 1.0), (False, None)]
    assert json.loads((tmp_path / "summary.json").read_text())["arms"]["full"]["likelihood"] == {
        "nll": 1.0,
        "samples": 1,
        "same_first": 1.0,
        **dict.fromkeys(("kept", "low", "high")),
    }
