"""The chunk store's measurement times what it says: lookups that hit, and whole evictions."""

from picbench.measure.chunk_store import measure, measure_plan, render


def test_every_operation_is_timed() -> None:
    timings = [*measure(known=100, repeats=2), *measure_plan(repeats=3)]
    assert [t.operation for t in timings] == [
        "lookup",
        "use",
        "evict",
        "plan, new chunks",
        "plan, known chunks",
    ]
    assert all(0 < t.low <= t.median <= t.high for t in timings[:2])
    facts = {"cpu": "c", "python": "p", "vllm": "v", "commit": "k"}
    assert render(timings, facts).count("\n| ") == 2 + len(timings)


def test_a_chunk_is_evicted_as_a_whole() -> None:
    from picbench.measure.chunk_store import _filled

    bench = _filled(10)
    bench.block_pool.get_new_blocks(1)
    assert len(bench.store) == 9
    assert not bench.store.is_mappable(bench.canonicals[0])
    assert all(map(bench.store.is_mappable, bench.canonicals[1:]))
