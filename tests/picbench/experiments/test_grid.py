"""Which traffic a grid has, in which order, its requests, and how engines serve them."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.experiments import grid
from picbench.experiments.grid import (
    ARMS,
    AUTO,
    IDS,
    GridEngines,
    GridStage,
    GridTraffic,
    MadeBatch,
    QuietCores,
    SampleBatch,
    draw_traffic,
    make_requests,
    plan_grid,
    read_grids,
    serve_cells,
    time_loop,
)
from picbench.profile.predictor import ALONE, BURST, ArmCell
from picbench.run.measurements import BreakEven
from picbench.workloads.traffic.corpus import from_tokens

GRIDS = read_grids()
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
    assert max(t.point.prompt for t in small) == settings.again_tokens
    assert not points & {traffic.point for traffic in beside}
    assert {traffic.seed for traffic in again} == {1, 2}


def test_arms_and_lengths_are_served_where_they_tell_something() -> None:
    settings = GRIDS["cuda"]
    points = {traffic.point for traffic in plan_grid(settings)}
    lengths = {load: {p.chunks for p in points if p.load == load} for load in (ALONE, BURST)}
    assert lengths[BURST] == set(settings.chunks)
    assert lengths[ALONE] == {*settings.chunks, *settings.alone_chunks} > lengths[BURST]
    for point in points:
        arms = settings.arms_at(point)
        small = point.load == ALONE and (1 - point.reuse) * point.prompt <= 1024
        assert ("naive" in arms) is small, point
        assert "full" not in arms or not point.reuse
        rivals = {"prefix", "reorder"} if point.reuse else {"prefix"}
        assert rivals | {"mepic", AUTO} == set(arms) - {"full", "naive"}
    assert "naive" in GRIDS["cpu"].arms
    long = next(p for p in points if p.prompt > 10_000 and p.load == BURST)
    short = next(p for p in points if p.prompt < 300 and p.load == BURST)
    assert settings.requests(long) < settings.requests(short)


def test_traffic_has_the_reuse_that_the_cell_says() -> None:
    planned = [t for t in plan_grid(SETTINGS) if t.point.reuse == 0.5 and t.point.load == BURST]
    requests = draw_traffic(planned[0], SETTINGS)
    cold, warm = requests.cold.samples, requests.warm.samples
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
        filled = [chunk for sample in requests.fill.samples for chunk in sample.chunks]
        assert len(filled) == len(set(filled)) == len(requests.fill.samples)
        assert all(sample.max_tokens == 1 for sample in requests.fill.samples)
        asked = [chunk for sample in requests.warm.samples for chunk in sample.chunks]
        known = sum(chunk in set(filled) for chunk in asked) / len(asked)
        held = settings.pool * BLOCK_SIZE / (traffic.point.corpus * traffic.point.chunk_tokens)
        assert known == pytest.approx(traffic.point.reuse * min(1.0, held), abs=0.13), traffic
        if traffic.point.reuse == 0:
            assert not filled


def test_each_arm_has_requests_of_its_own() -> None:
    batches = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    full = [one for _, requests in make_requests("full", batches, stock=True) for one in requests]
    # Stock engines serve each as a tenant, and nothing fills a cache that is not there.
    assert len({request.salt for request in full}) == len(full)
    assert len(full) == len(batches.cold.samples) + len(batches.warm.samples)
    assert {request.algorithm for request in full} == {None}
    ours = make_requests("reorder", batches, stock=False)
    assert {r.algorithm for _, requests in ours for r in requests} == {"prefix"}
    for arm in ("prefix", "reorder", "mepic"):
        cold, fill, warm = make_requests(arm, batches, stock=False)
        assert cold[0].measured and warm[0].measured and not fill[0].measured
        assert len(fill[1]) == len(batches.fill.samples) > 0


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("device", GRIDS)
def test_what_is_not_reordered_is_served_once(device: str, stock: bool) -> None:
    settings = GRIDS[device]
    left_out = 0
    for traffic in plan_grid(settings)[:100]:
        batches = draw_traffic(traffic, settings)
        one, other = (
            list(make_requests(arm, batches, stock=stock)) for arm in ("prefix", "reorder")
        )
        reordered = "reorder" in settings.arms_at(traffic.point)
        assert reordered or one == other
        left_out += not reordered
    assert left_out > 5


def test_each_batch_has_arrivals_of_its_own() -> None:
    settings = GRIDS["cuda"]
    traffic = next(t for t in plan_grid(settings) if not t.point.closed)
    cold, fill, warm = draw_traffic(traffic, settings)
    for batch in (cold, warm):
        assert batch.arrivals is not None
        assert batch.arrivals[0] == 0
        assert len(batch.arrivals) == len(batch.samples)
        assert list(batch.arrivals) == sorted(batch.arrivals)
    assert fill.arrivals is None


class Served:
    """An engine that notes how many requests each call has, and how many it is to run at a time."""

    memory: tuple[()] = ()
    busy_s = 1.5

    def __init__(self) -> None:
        self.calls: list[tuple[int, int | None]] = []

    def reset(self) -> None: ...

    def measure(self) -> None: ...

    def generate(self, requests: Sequence[Request], **given: Any) -> list[Result]:
        self.calls.append((len(requests), given["concurrency"]))
        timings = Timings(ttft=0.5, prefill=0.25, tpot=None, e2e=1.0)
        counts = TokenCounts(prompt=100, reused=40, linked=10, compiled=0, padded=0)
        return [Result("", (1, 2), (3,), timings, counts, Hits()) for _ in requests]


def cpu_work() -> list[MadeBatch]:
    """Four requests of mepic's, and what fills the cache."""
    drawn = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    fill = drawn.fill._replace(samples=drawn.fill.samples[:9])
    batches = SampleBatch(drawn.cold.samples[:4]), fill
    return list(make_requests("mepic", batches, stock=False))


def test_requests_alone_begin_on_a_quiet_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cores:
        """The first of four requests finds no quiet core."""

        def __init__(self, shortest: float) -> None:
            self.shortest = shortest / 2
            self.settled = iter((False, True, True, True, True))

        def settle(self) -> bool:
            return next(self.settled)

    monkeypatch.setattr(grid, "QuietCores", Cores)
    engine = Served()
    [cell], shortest = serve_cells(cpu_work(), 1, 16, 8.0, engine)  # type: ignore[arg-type]
    # What fills the cache is served together.
    assert engine.calls == [*4 * [(1, 1)], (9, 16)]
    assert shortest == 4.0
    assert (cell.requests, cell.quiet, cell.ttft_s) == (4, 0.75, 0.5)
    assert cell.requests_s == pytest.approx(4 / (4 * 1.5))


@pytest.mark.parametrize(("shortest", "running"), [(None, 1), (inf, 4)])
def test_a_burst_is_one_call_and_so_are_requests_where_cores_do_not_matter(
    shortest: float | None, running: int
) -> None:
    engine = Served()
    [cell], found = serve_cells(cpu_work(), running, 16, shortest, engine)  # type: ignore[arg-type]
    assert engine.calls[0] == (4, running)
    assert cell.requests_s == pytest.approx(4 / 1.5)
    assert (found is None) == (cell.quiet is None) == (shortest is None)


class Server:
    """Notes the shortest loop that others have met, and has met one of its own."""

    def __init__(self, own: float) -> None:
        self.own, self.told = own, list[float | None]()

    def call(self, function: Callable[[Any], Any]) -> tuple[list[ArmCell], float | None]:
        *_, shortest = function.args  # type: ignore[attr-defined]
        self.told.append(shortest)
        return [], None if shortest is None else min(shortest, self.own)


def test_stock_vllm_serves_what_it_can_on_a_gpu() -> None:
    for device, stock in (("cuda", {"full", "prefix", "reorder"}), ("cpu", set())):
        engines = GridEngines(device)
        configs = engines.configs(BreakEven(device=device), GRIDS[device])
        assert engines.stock == stock
        assert {arm for arm in ARMS if configs[engines.name(arm)].stock} == stock


@pytest.mark.parametrize(
    ("device", "own", "stock"),
    [("cuda", [inf, 1.0], [2.0, 1.0]), ("cpu", [None] * 4, [])],
)
def test_engines_hold_cores_against_the_quietest_of_all(
    device: str, own: list[float | None], stock: list[float]
) -> None:
    engines, servers = GridEngines(device), {"picbench": Server(2.0), "stock": Server(1.0)}
    for arm in ("mepic", "prefix", "naive", "full"):
        assert engines.serve(servers, arm, (), 1) == []  # type: ignore[arg-type]
    assert servers["picbench"].told == own
    assert servers["stock"].told == stock


class Host:
    """A thread on the first of a host's cores; loops take `speeds` seconds, each on its core."""

    def __init__(self, patch: pytest.MonkeyPatch, *speeds: float) -> None:
        self.speeds, self.core = list(speeds), 0
        patch.setattr(grid, "own_cores", lambda: range(len(speeds)))
        patch.setattr(grid, "move_to", lambda core: setattr(self, "core", core))
        patch.setattr(grid, "time_loop", lambda: self.speeds[self.core])


@pytest.mark.parametrize(
    ("speeds", "before", "after"),
    [([1.7, 1.0, 1.7, 1.1], 3, 3), ([1.7, 1.0, 1.7, 1.0], 2, 1), ([1.7, 1.7, 1.7, 1.1], 1, 3)],
)
def test_a_thread_stays_on_a_quiet_core_and_leaves_a_busy_one(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], before: int, after: int
) -> None:
    host = Host(monkeypatch, 1.0, 1.0, 1.7, 1.0)
    cores = QuietCores()
    host.speeds, host.core = speeds, before
    assert cores.settle()
    assert host.core == after


def test_a_host_that_is_busy_everywhere_is_known_by_what_others_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch, 1.7, 1.8, 1.7)
    assert QuietCores().settle()
    assert QuietCores().shortest == 1.7
    cores = QuietCores(shortest=1.0)
    assert not cores.settle()
    host.speeds[1] = 0.9
    assert cores.settle()
    assert cores.shortest == 0.9


@given(
    st.lists(st.floats(0.5, 3.0), min_size=1, max_size=8),
    st.lists(st.lists(st.floats(0.5, 3.0), min_size=8, max_size=8), max_size=5),
)
def test_a_quiet_core_is_found_if_there_is_one(
    first: list[float], later: list[list[float]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        host = Host(patch, *first)
        cores = QuietCores()
        assert cores.shortest == min(first)
        for speeds in later:
            host.speeds = speeds[: len(first)]
            found = cores.settle()
            assert found == any(speed <= 1.35 * cores.shortest for speed in host.speeds)
            assert not found or host.speeds[host.core] <= 1.35 * cores.shortest


def test_without_cores_to_choose_from_a_thread_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "own_cores", lambda: ())
    monkeypatch.setattr(grid, "time_loop", iter((1.0, 1.0, 2.0)).__next__)
    cores = QuietCores()
    assert cores.settle()
    assert not cores.settle()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved here")
def test_a_thread_may_use_all_of_its_cores_afterwards() -> None:
    allowed = os.sched_getaffinity(0)
    QuietCores().settle()
    assert os.sched_getaffinity(0) == allowed
    assert 0 < time_loop() < 1
