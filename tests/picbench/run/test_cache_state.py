"""Declared states of caches: what is expected, verified, and restored."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import (
    Harness,
    PicEngine,
    StuckEngine,
    make_reusing_samples,
    make_sample,
    make_snapshot,
    no_gpu,
    run_fakes,
)
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import Reuse
from picbench.engines.ledger import Snapshot
from picbench.errors import ConfigError, InvalidRun
from picbench.run.cache_state import NOVEL, SeenKv, count_shared, fill_requests
from picbench.run.job import prepare
from picbench.run.result import print_result
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.store.reader import read_run
from picbench.workloads.sample import Sample, SampleSegment

ARMS = ("full", "prefix", "mepic")
SAMPLES = make_reusing_samples(8)


def pic(samples: Sequence[Sample] = SAMPLES, **settings: Any) -> Harness:
    """Engines that count compiled chunks, blocks and evictions."""
    return Harness(samples, make=PicEngine, **settings)


def expected(folder: Path, arm: str) -> list[int | None]:
    return [row.expected_reuse for row in read_run(folder).rows if row.arm == arm]


def shown(folder: Path, samples: Sequence[Sample], **settings: Any) -> list[str]:
    """The lines below a run's table."""
    values = {"algo": ARMS, "dataset": "fake", **settings}
    job = prepare(parse_config(values), pic(samples).load, no_gpu)
    stream = io.StringIO()
    print_result(job, read_run(folder).summary, stream)
    return stream.getvalue().splitlines()


def test_without_a_state_nothing_is_expected(tmp_path: Path) -> None:
    run_fakes(pic(), tmp_path / "run", *ARMS)
    run = read_run(tmp_path / "run")
    assert {row.expected_reuse for row in run.rows} == {None}
    assert {arm.cache for arm in run.summary.values()} == {None}
    assert run.manifest["cache"] == "cold at start, kept between requests"


def test_cold_caches_are_dropped_before_each_group(tmp_path: Path) -> None:
    harness = pic()
    run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=1)
    for name in ARMS:
        own = [entry for entry in harness.order if entry in (name, f"reset {name}")]
        assert own == [f"reset {name}", name] * len(SAMPLES)
    run = read_run(tmp_path / "run")
    assert run.manifest["cache"] == "cold"
    assert {row.tokens.compiled for row in run.rows if row.arm == "mepic"} == {32}
    assert {*expected(tmp_path / "run", "mepic")} == {0}


def test_requests_of_a_cold_group_begin_together_and_may_share(tmp_path: Path) -> None:
    harness = pic([make_sample(number) for number in range(8)])
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
    harness = pic(samples, engines={arm: PicEngine(arm, stale=True)})
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
    harness = pic(engines={"mepic": FullPoolEngine("mepic")})
    with pytest.raises(InvalidRun, match=r"arm mepic, round 0: .* 10 blocks of earlier requests"):
        run_fakes(harness, tmp_path / "run", *ARMS, cache="cold", concurrency=1)


def test_warm_caches_are_filled_with_chunks_and_not_with_prompts(tmp_path: Path) -> None:
    chunks = {chunk.tokens for sample in SAMPLES for chunk in sample.chunks}
    harness = pic()
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
    harness = pic(engines={arm: forgetful})
    with pytest.raises(InvalidRun, match=rf"arm {arm}, sample s.: the cache is not warm"):
        run_fakes(harness, tmp_path / "run", *ARMS, cache="warm", concurrency=1)


@pytest.mark.parametrize("arm", ["prefix", "mepic"])
def test_evictions_explain_misses_and_are_said(arm: str, tmp_path: Path) -> None:
    harness = pic(engines={arm: PicEngine(arm, capacity=3)})
    run_fakes(harness, tmp_path / "run", *ARMS, cache="warm", concurrency=1)
    cache = read_run(tmp_path / "run").summary[arm].cache
    assert cache is not None
    assert cache.missed_requests
    assert sum(cache.evicted_blocks.values()) > 0
    lines = shown(tmp_path / "run", SAMPLES, cache="warm")
    assert any(f"{arm}: {cache.missed_requests} of 8 requests missed" in line for line in lines)


def test_a_steady_stream_shows_how_gains_decay(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(NOVEL)]
    harness = pic(samples)
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
    # Windows are over all repeats of the stream.
    run_fakes(pic(samples), tmp_path / "twice", *ARMS, cache="steady", repeats=2)
    lines = shown(tmp_path / "twice", samples, cache="steady", repeats=2)
    line = "mepic: TTFT vs full over 5 windows of 400 requests 0.25x "
    assert any(found.startswith(line) for found in lines)


def without_chunks(number: int) -> Sample:
    sample = make_sample(number)
    return replace(sample, segments=tuple(s for s in sample.segments if s.kind == "text"))


@pytest.mark.parametrize(
    ("harness", "state", "message"),
    [
        (pic([make_sample(n) for n in range(199)]), "steady", "199 different prompts"),
        (pic([make_sample(0)] * 300), "steady", "1 different prompts"),
        (pic([without_chunks(n) for n in range(8)]), "warm", "have no chunks to fill"),
        (pic(arrivals=(0.0,) * 8), "cold", "arrive on their own overlap"),
        (pic(preload=SAMPLES[:2]), "cold", "2 chunks to preload"),
    ],
)
def test_requests_that_a_state_cannot_be_measured_with_are_refused(
    harness: Harness, state: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_fakes(harness, tmp_path / "run", *ARMS, cache=state)


@pytest.fixture(autouse=True)
def quick_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: dict(found))


def test_an_arm_whose_cache_cannot_be_dropped_is_lost(tmp_path: Path) -> None:
    harness = Harness(make_reusing_samples(3), engines={"mepic": StuckEngine("mepic", reused=0)})
    run_fakes(harness, tmp_path, "full", "mepic", cache="cold", concurrency=1)
    assert read_run(tmp_path).summary["mepic"].failed == 2
    assert read_run(tmp_path).summary["full"].failed == 0


A, B, C = (1,) * 20, (2,) * 12, (1,) * 8 + (3,) * 4


def sample(*chunks: tuple[int, ...], head: tuple[int, ...] = (9,) * 4, tail: int = 8) -> Sample:
    segments = (
        SampleSegment("text", "", head),
        *(SampleSegment("chunk", "", chunk) for chunk in chunks),
        SampleSegment("text", "", (tail,) * 3),
    )
    return Sample("s", "fake", segments, (), 1)


def test_chunks_are_found_at_any_place_and_where_they_are_repeated() -> None:
    seen = SeenKv(Reuse.CHUNKS, 16)
    assert [seen.find(sample(A, B)), seen.find(sample(A, B, A))] == [0, 20]
    # A chunk in another document is another one.
    other = SampleSegment("chunk", "", A, before=SampleSegment("text", "", (5,)))
    seen.add(Sample("s", "fake", (other,), (), 1))
    assert seen.find(sample(A)) == 0
    seen.add(sample(A))
    assert [seen.find(sample(B, A)), seen.find(sample(B, A, A))] == [20, 40]


def test_prefixes_are_found_in_whole_blocks_and_end_before_the_last_token() -> None:
    seen = SeenKv(Reuse.PREFIX, 16)
    seen.add(sample(A, B))
    assert [seen.find(sample(A, C)), seen.find(sample(B, A))] == [16, 0]
    whole = sample(A, (4,) * 5)
    seen.add(whole)
    assert len(whole.tokens) == 32
    assert seen.find(whole) == 16


@pytest.mark.parametrize(
    ("prompts", "prefix", "chunks"),
    [
        ([[A, B]], [0], [0]),
        ([[A, B, A]], [0], [20]),
        ([[A], [B]], [4, 4], [4, 4]),
        ([[A], [C]], [12, 12], [12, 12]),
        ([[B, A], [C, A]], [4, 4], [4 + 20, 4 + 8 + 20]),
        ([[A, B], [A, B]], [39, 39], [39, 39]),
    ],
)
def test_what_prompts_have_in_common(
    prompts: list[list[tuple[int, ...]]], prefix: list[int], chunks: list[int]
) -> None:
    samples = [sample(*found) for found in prompts]
    assert count_shared(samples, Reuse.PREFIX) == prefix
    assert count_shared(samples, Reuse.CHUNKS) == chunks
    assert count_shared(samples, Reuse.NOTHING) == [0] * len(samples)


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_group_shares_at_least_what_it_finds_in_any_order(
    prompts: list[list[tuple[int, ...]]],
) -> None:
    samples = [sample(*found) for found in prompts]
    for reuse in (Reuse.CHUNKS, Reuse.PREFIX):
        shared = count_shared(samples, reuse)
        for last in range(len(samples)):
            seen = SeenKv(reuse, 2)
            for number, other in enumerate(samples):
                if number != last:
                    seen.add(other)
            assert seen.find(samples[last]) <= shared[last]


def evicting(**settings: Any) -> Harness:
    return Harness(make_reusing_samples(5), make=partial(PicEngine, capacity=9), **settings)


TIMES = (0.0, 0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("state", "arrivals"),
    [(None, None), ("cold", None), ("warm", None), (None, TIMES), ("warm", TIMES)],
)
def test_repeats_begin_alike(
    state: str | None, arrivals: tuple[float, ...] | None, tmp_path: Path
) -> None:
    run_fakes(evicting(arrivals=arrivals), tmp_path, *ARMS, cache=state, repeats=3, concurrency=1)
    rows = read_run(tmp_path).rows
    for arm in ARMS:
        own = [row for row in rows if row.arm == arm]
        assert [row.repeat for row in own] == [0] * 5 + [1] * 5 + [2] * 5
        assert sorted({row.round for row in own}) == list(range(3 if arrivals else 15))
        counts = [(row.sample, row.tokens, row.expected_reuse) for row in own]
        assert counts[:5] == counts[5:10] == counts[10:]
    summary = json.loads((tmp_path / "summary.json").read_text())["arms"]["mepic"]
    assert summary["requests"] == 15
    assert summary["ttft_vs_full"]["pairs"] == 15


def test_arms_begin_in_turn_in_open_loops_too(tmp_path: Path) -> None:
    found = evicting(arrivals=(0.0,) * 5)
    run_fakes(found, tmp_path, *ARMS, repeats=3)
    served = found.groups
    assert len({tuple(served[start : start + 3]) for start in (0, 3, 6)}) == 3
    assert all({*served[start : start + 3]} == {*ARMS} for start in (0, 3, 6))


def test_prompts_are_reordered_anew_in_each_repeat(tmp_path: Path) -> None:
    samples = make_reusing_samples(12)
    run_fakes(Harness(samples), tmp_path, "prefix", "reorder", repeats=2, concurrency=1)
    sent = [row.prompt_sha256 for row in read_run(tmp_path).rows if row.arm == "reorder"]
    assert sent[:12] == sent[12:]
