"""Runs that declare the state of their caches, over engines that count as the real ones do."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import (
    FakeEngine,
    Harness,
    PicEngine,
    make_reusing_samples,
    make_sample,
    make_snapshot,
    no_gpu,
    run_fakes,
)

from picbench.engines.ledger import Snapshot
from picbench.errors import ConfigError, InvalidRun
from picbench.run.cache_state import NOVEL, fill_requests
from picbench.run.job import prepare
from picbench.run.result import print_result
from picbench.settings import parse_config
from picbench.store.reader import read_run
from picbench.workloads.sample import Sample

ARMS = ("full", "prefix", "mepic")
SAMPLES = make_reusing_samples(8)


def engines(**settings: Any) -> dict[str, FakeEngine]:
    return {name: PicEngine(name, **settings) for name in ARMS}


@dataclass
class PicHarness(Harness):
    """Engines that count compiled chunks, blocks and evictions."""

    samples: Sequence[Sample] = field(default_factory=lambda: SAMPLES)
    engines: Mapping[str, FakeEngine] = field(default_factory=engines)


def expected(folder: Path, arm: str) -> list[int | None]:
    return [row.expected_reuse for row in read_run(folder).rows if row.arm == arm]


def shown(folder: Path, samples: Sequence[Sample], **settings: Any) -> list[str]:
    """The lines below a run's table."""
    values = {"algo": ARMS, "dataset": "fake", **settings}
    job = prepare(parse_config(values), PicHarness(samples).load, no_gpu)
    stream = io.StringIO()
    print_result(job, read_run(folder).summary, stream)
    return stream.getvalue().splitlines()


def test_without_a_state_nothing_is_expected(tmp_path: Path) -> None:
    run_fakes(PicHarness(), tmp_path / "run", *ARMS)
    run = read_run(tmp_path / "run")
    assert {row.expected_reuse for row in run.rows} == {None}
    assert {arm.cache for arm in run.summary.values()} == {None}
    assert run.manifest["cache"] == "cold at start, kept between requests"


def test_cold_caches_are_dropped_before_each_group(tmp_path: Path) -> None:
    harness = PicHarness()
    run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=1)
    for name in ARMS:
        own = [entry for entry in harness.order if entry in (name, f"reset {name}")]
        assert own == [f"reset {name}", name] * len(SAMPLES)
    run = read_run(tmp_path / "run")
    assert run.manifest["cache"] == "cold"
    assert {row.tokens.compiled for row in run.rows if row.arm == "mepic"} == {32}
    assert {*expected(tmp_path / "run", "mepic")} == {0}


def test_requests_of_a_cold_group_begin_together_and_may_share(tmp_path: Path) -> None:
    harness = PicHarness([make_sample(number) for number in range(8)])
    run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=4)
    calls = harness.servers["mepic"].engine.calls
    assert [c for c in calls if c.startswith("generate")] == ["generate 4 at 4"] * 2
    rows = [row for row in read_run(tmp_path / "run").rows if row.arm == "mepic"]
    assert [row.tokens.compiled for row in rows] == [32, 16, 16, 16] * 2
    # A text of two tokens and a chunk of 16 are in all prompts of a group.
    assert {row.expected_reuse for row in rows} == {18}


@pytest.mark.parametrize("arm", ["prefix", "mepic"])
def test_a_cold_run_that_hits_is_invalid(arm: str, tmp_path: Path) -> None:
    samples = [make_sample(0), make_sample(0)] if arm == "prefix" else SAMPLES
    harness = PicHarness(samples, engines=engines() | {arm: PicEngine(arm, stale=True)})
    with pytest.raises(InvalidRun, match=rf"arm {arm}, sample s.: the cache is not cold: \d+"):
        run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=1)
    assert read_run(tmp_path / "run").manifest["status"] == "invalid"


class FullPoolEngine(PicEngine):
    """Has blocks of earlier requests when a group begins."""

    @property
    def memory(self) -> Sequence[Snapshot]:
        first = make_snapshot(0, 0.0, 10)
        blocks = {**first.blocks, "free": 80.0, "chunk_idle": 10.0}
        return [Snapshot(0, 0.0, first.pool, blocks)]


def test_a_cold_pool_with_earlier_blocks_is_invalid(tmp_path: Path) -> None:
    harness = PicHarness(engines=engines() | {"mepic": FullPoolEngine("mepic")})
    with pytest.raises(InvalidRun, match=r"arm mepic, round 0: .* 10 blocks of earlier requests"):
        run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=1)


def test_warm_caches_are_filled_with_chunks_and_not_with_prompts(tmp_path: Path) -> None:
    chunks = {chunk.tokens for sample in SAMPLES for chunk in sample.chunks}
    harness = PicHarness()
    run_fakes(harness, tmp_path / "run", *ARMS, cache="warm", concurrency=1)
    first = {name: server.engine.calls for name, server in harness.servers.items()}
    generated = {n: [c for c in calls if c.startswith("generate")] for n, calls in first.items()}
    assert generated["mepic"][0] == f"generate {len(chunks)} at 1"
    assert generated["full"][0] == "generate 1 at 1"
    rows = [row for row in read_run(tmp_path / "run").rows if row.arm == "mepic"]
    assert {row.tokens.compiled for row in rows} == {0}
    assert {*expected(tmp_path / "run", "mepic")} == {32}
    # The first text and 14 tokens of the first chunk are a block of 16; there is no more of it.
    assert {*expected(tmp_path / "run", "prefix")} == {16}
    cache = read_run(tmp_path / "run").summary["mepic"].cache
    assert cache is not None
    assert cache.missed_requests == 0
    assert (cache.expected_tokens, cache.found_tokens) == (8 * 32, 8 * 32)


def test_what_fills_a_cache_has_the_texts_around_it() -> None:
    filled = fill_requests(SAMPLES)
    assert {sample.max_tokens for sample in filled} == {1}
    for sample in filled:
        assert [segment.kind for segment in sample.segments] == ["text", "chunk", "text"]
        assert sample.segments[0] == SAMPLES[0].segments[0]


@pytest.mark.parametrize("arm", ["prefix", "mepic"])
def test_a_warm_run_that_misses_is_invalid(arm: str, tmp_path: Path) -> None:
    forgetful = PicEngine(arm, capacity=1, lossy=True)
    harness = PicHarness(engines=engines() | {arm: forgetful})
    with pytest.raises(InvalidRun, match=rf"arm {arm}, sample s.: the cache is not warm"):
        run_fakes(harness, tmp_path / "run", *ARMS, cache="warm", concurrency=1)


@pytest.mark.parametrize("arm", ["prefix", "mepic"])
def test_evictions_explain_misses_and_are_said(arm: str, tmp_path: Path) -> None:
    harness = PicHarness(engines=engines() | {arm: PicEngine(arm, capacity=3)})
    run_fakes(harness, tmp_path / "run", *ARMS, cache="warm", concurrency=1)
    cache = read_run(tmp_path / "run").summary[arm].cache
    assert cache is not None
    assert cache.missed_requests
    assert sum(cache.evicted_blocks.values()) > 0
    lines = shown(tmp_path / "run", SAMPLES, cache="warm")
    assert any(f"{arm}: {cache.missed_requests} of 8 requests missed" in line for line in lines)


def test_a_steady_stream_shows_how_gains_decay(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(NOVEL)]
    harness = PicHarness(samples)
    run_fakes(harness, tmp_path / "run", *ARMS, cache="steady")
    assert not [entry for entry in harness.order if entry.startswith("reset")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    windows = summary["arms"]["mepic"]["cache"]["decay"]
    assert [(w["first"], w["requests"]) for w in windows] == [(40 * n, 40) for n in range(5)]
    assert [w["ttft_vs_full"]["pairs"] for w in windows] == [40] * 5
    assert windows[0]["expected_tokens"] == 16 * 39
    assert [w["expected_tokens"] for w in windows[1:]] == [16 * 40] * 4
    assert [w["found_tokens"] for w in windows] == [w["expected_tokens"] for w in windows]
    lines = shown(tmp_path / "run", samples, cache="steady")
    line = "mepic: TTFT vs full over 5 windows of 200 requests 0.25x 0.25x 0.25x 0.25x 0.25x; "
    assert any(found.startswith(line) for found in lines)


def test_windows_of_a_stream_are_over_all_repeats(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(NOVEL)]
    run_fakes(PicHarness(samples), tmp_path / "run", *ARMS, cache="steady", repeats=2)
    lines = shown(tmp_path / "run", samples, cache="steady", repeats=2)
    line = "mepic: TTFT vs full over 5 windows of 400 requests 0.25x "
    assert any(found.startswith(line) for found in lines)


def without_chunks(number: int) -> Sample:
    sample = make_sample(number)
    return replace(sample, segments=tuple(s for s in sample.segments if s.kind == "text"))


@pytest.mark.parametrize(
    ("harness", "state", "message"),
    [
        (PicHarness([make_sample(n) for n in range(199)]), "steady", "199 different prompts"),
        (PicHarness([make_sample(0)] * 300), "steady", "1 different prompts"),
        (PicHarness([without_chunks(n) for n in range(8)]), "warm", "have no chunks to fill"),
        (PicHarness(arrivals=(0.0,) * 8), "cold", "arrive on their own overlap"),
        (PicHarness(preload=SAMPLES[:2]), "cold", "2 chunks to preload"),
    ],
)
def test_requests_that_a_state_cannot_be_measured_with_are_refused(
    harness: Harness, state: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_fakes(harness, tmp_path / "run", *ARMS, cache=state)


def test_states_are_other_runs() -> None:
    prints = set()
    for state in (None, "cold", "warm"):
        values = {"algo": ARMS, "dataset": "fake", "cache": state}
        prints.add(prepare(parse_config(values), PicHarness().load, no_gpu).fingerprint)
    assert len(prints) == 3
