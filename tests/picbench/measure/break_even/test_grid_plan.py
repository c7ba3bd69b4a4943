"""Which traffic a grid has, in which order, and its requests."""

from collections import Counter
from dataclasses import replace
from itertools import chain, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.config import BLOCK_SIZE
from picbench.experiments.grid_plan import (
    GRIDS,
    IDS,
    GridStage,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.profile.grid import ALONE, BURST
from picbench.workloads.traffic.corpus import from_tokens

SETTINGS = GRIDS["cpu"]


@pytest.mark.parametrize("device", GRIDS)
def test_any_part_of_a_grid_is_even(device: str) -> None:
    settings = GRIDS[device]
    planned = plan_grid(settings)
    assert len(set(planned)) == len(planned)
    assert settings.seeds >= 3
    assert Counter(traffic.seed for traffic in planned).keys() == set(range(settings.seeds))
    for _, stage in groupby(planned, settings.stage):
        seeds = [traffic.seed for traffic in stage]
        assert seeds == sorted(seeds)
    first = planned[: len(planned) // settings.seeds // 2]
    assert {traffic.seed for traffic in first} == {0}
    assert {traffic.point.reuse for traffic in first} == set(settings.reuse)
    assert {traffic.point.load for traffic in first} == {ALONE, BURST}
    quarter = first[: len(first) // 2]
    assert len({traffic.point.reuse for traffic in quarter}) > 1


def test_a_gpus_grid_repeats_small_prompts_first() -> None:
    settings = GRIDS["cuda"]
    stages: dict[GridStage, list[GridTraffic]] = {}
    for traffic in plan_grid(settings):
        stages.setdefault(settings.stage(traffic), []).append(traffic)
    assert list(stages) == list(GridStage)
    once, small, beside, again = stages.values()
    assert {traffic.seed for traffic in (*once, *beside)} == {0}
    points = {traffic.point for traffic in once}
    assert len(points) == len(once)
    assert {p for p in points if p.load == ALONE} >= {traffic.point for traffic in small}
    assert Counter(t.seed for t in small)[1] == Counter(t.seed for t in small)[2] > 20
    assert max(t.point.chunks * t.point.chunk_tokens for t in small) == settings.again_tokens
    assert not points & {traffic.point for traffic in beside}
    assert {traffic.seed for traffic in again} == {1, 2}


def test_more_lengths_of_prompts_are_served_alone() -> None:
    settings = GRIDS["cuda"]
    counts: dict[str, set[int]] = {}
    for traffic in plan_grid(settings):
        counts.setdefault(traffic.point.load, set()).add(traffic.point.chunks)
    assert counts[BURST] == set(settings.chunks)
    assert counts[ALONE] == {*settings.chunks, *settings.alone_chunks} > counts[BURST]


@given(
    device=st.sampled_from(sorted(GRIDS)),
    count=st.integers(1, 5),
    seeds=st.integers(1, 4),
    again=st.sampled_from([0, 300, 5_000, 50_000]),
)
def test_parts_are_all_of_a_grid_in_its_order(
    device: str, count: int, seeds: int, again: int
) -> None:
    settings = replace(GRIDS[device], seeds=seeds, again_tokens=again)
    whole, order = plan_grid(settings), list(GridStage)
    assert len(set(whole)) == len(whole)
    parts = [plan_grid(settings, (number + 1, count)) for number in range(count)]
    assert sum(map(len, parts)) == len(whole)
    assert set(chain(*parts)) == set(whole)
    for part in (whole, *parts):
        places = [order.index(settings.stage(traffic)) for traffic in part]
        assert places == sorted(places)


def test_naive_is_served_where_steps_are_small() -> None:
    settings = GRIDS["cuda"]
    for point in {traffic.point for traffic in plan_grid(settings)}:
        served = "naive" in settings.arms_at(point)
        new = (1 - point.reuse) * point.chunks * point.chunk_tokens
        assert served is (point.load == ALONE and new <= 1024), point
    assert "naive" in GRIDS["cpu"].arms


def test_traffic_has_the_reuse_that_the_cell_says() -> None:
    planned = [t for t in plan_grid(SETTINGS) if t.point.reuse == 0.5 and t.point.load == BURST]
    requests = draw_traffic(planned[0], SETTINGS)
    cold, warm = requests.cold, requests.warm
    assert len(cold) == len(warm) == SETTINGS.burst
    assert {len(sample.chunks) for sample in cold} == {planned[0].point.chunks}
    point = planned[0].point
    corpus = from_tokens(
        IDS, planned[0].seed, pool=point.corpus, chunk_tokens=point.chunk_tokens, max_tokens=1
    )
    known = {chunk.tokens for topic in corpus.topics for chunk in topic.chunks}
    chunks = [chunk for sample in (*cold, *warm) for chunk in sample.chunks]
    assert sum(chunk.tokens in known for chunk in chunks) / len(chunks) == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.parametrize("device", GRIDS)
def test_a_warm_cache_has_what_its_requests_have_in_common(device: str) -> None:
    settings = GRIDS[device]
    for traffic in plan_grid(settings)[:40]:
        requests = draw_traffic(traffic, settings)
        filled = [chunk for sample in requests.fill for chunk in sample.chunks]
        assert len(filled) == len(set(filled)) == len(requests.fill)
        assert all(sample.max_tokens == 1 for sample in requests.fill)
        asked = [chunk for sample in requests.warm for chunk in sample.chunks]
        known = sum(chunk in set(filled) for chunk in asked) / len(asked)
        held = settings.pool * BLOCK_SIZE / (traffic.point.corpus * traffic.point.chunk_tokens)
        assert known == pytest.approx(traffic.point.reuse * min(1.0, held), abs=0.13), traffic
        if traffic.point.reuse == 0:
            assert not filled


def test_what_takes_the_same_at_every_reuse_is_served_once() -> None:
    points = {traffic.point for traffic in plan_grid(GRIDS["cuda"])}
    full = {p.reuse for p in points if "full" in GRIDS["cuda"].arms_at(p)}
    assert full == {0.0}
    for point in points:
        rivals = {"prefix", "reorder"} if point.reuse else {"prefix"}
        assert rivals | {"mepic"} == set(GRIDS["cuda"].arms_at(point)) - {"full", "naive"}
    long = next(p for p in points if p.chunks * p.chunk_tokens > 10_000 and p.load == BURST)
    short = next(p for p in points if p.chunks * p.chunk_tokens < 300 and p.load == BURST)
    assert GRIDS["cuda"].requests(long) < GRIDS["cuda"].requests(short)
