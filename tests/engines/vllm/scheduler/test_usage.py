"""What requests are told of their prompts; nothing is computed."""

from pathlib import Path
from typing import Any

import pytest
from scheduler_bench import Bench, bench
from vllm.v1.request import RequestStatus

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.vllm.metrics import GAUGES, PicStats

#: Chunks of two, of two and a half and of three blocks.
A, B, C = tuple(range(100, 132)), tuple(range(200, 240)), tuple(range(300, 348))

PARTS = ("chunk_hit_tokens", "prefix_hit_tokens", "compiled_tokens", "computed_tokens")


def told(given: Bench, name: str) -> Any:
    """What a request is told that is sent now, run to its end."""
    found = given.ended[name].kv_transfer_params
    return found["pic"] if found else None


def states(report: Any) -> list[tuple[str, str | None]]:
    return [(chunk["state"], chunk.get("reason")) for chunk in report["chunks"]]


def ask(given: Bench, name: str, *chunks: tuple[int, ...], **more: Any) -> Any:
    request = given.submit(name, *chunks, usage=True, **more)
    given.run()
    report = told(given, name)
    parts = sum(report[part] for part in PARTS) + sum(report["loaded_tokens"].values())
    assert parts == sum(map(len, chunks)) + len(more.get("question", (7, 8))), request
    return report


def test_chunks_are_new_hit_and_evicted(llama: Path) -> None:
    given = bench(llama, blocks=8)
    report = ask(given, "first", A, B)
    assert states(report) == [("compiled", "new")] * 2
    assert [chunk["span"] for chunk in report["chunks"]] == [[0, 32], [32, 72]]
    assert report["compiled_tokens"] == 72 and report["padded_tokens"] == 8
    report = ask(given, "again", B, A, C[:1])
    assert states(report) == [("hit", None), ("hit", None), ("compiled", "new")]
    assert report["chunk_hit_tokens"] == 72 and report["prefix_hit_tokens"] == 0
    ask(given, "other", question=tuple(range(100)))
    assert states(ask(given, "last", A)) == [("compiled", "evicted")]


def test_exact_prefixes_are_apart_from_chunks(llama: Path) -> None:
    given = bench(llama)
    question = tuple(range(40))
    ask(given, "first", A, question=question)
    report = ask(given, "again", A, question=question)
    assert (report["chunk_hit_tokens"], report["prefix_hit_tokens"]) == (32, 32)
    assert report["computed_tokens"] == 8


@pytest.mark.parametrize("algorithm", ["full", "prefix"])
def test_chunks_that_are_not_reused_are_text(llama: Path, algorithm: str) -> None:
    given = bench(llama)
    for _ in range(2):
        report = ask(given, algorithm, A, B, algorithm=algorithm)
    assert states(report) == [("text", None)] * 2
    assert report["chunk_hit_tokens"] == report["compiled_tokens"] == 0
    assert report["prefix_hit_tokens"] == (64 if algorithm == "prefix" else 0)


def test_linked_tokens_are_computed_ones(llama: Path) -> None:
    given = bench(llama)
    # All tokens of the first chunk are linked: nothing of it is reused.
    report = ask(given, "one", A[:10], B, algorithm="mepic")
    assert states(report) == [("text", None), ("compiled", "new")]
    assert report["linked_tokens"] == 26 and report["computed_tokens"] == 28


@pytest.mark.parametrize("algorithm", ["naive", "epic:k=4"])
def test_chunks_are_loaded_and_lost(llama: Path, algorithm: str) -> None:
    """Fetched ones that requests share, and those that they load into blocks of their own."""
    given = bench(llama, tiers="host:1MiB")
    ask(given, "first", A, algorithm=algorithm)
    key = given.scheduler.linker._store.get(next(iter(given.scheduler.chunk_store._records))).key
    given.step(TransferResults(stored={key}))
    given.scheduler.reset_prefix_cache()
    for name, lost in (("loaded", False), ("lost", True)):
        given.submit(name, A, usage=True, algorithm=algorithm)
        [load] = given.step().commands.loads
        served = {} if lost else {load.request_id: {key: "host"}}
        results = TransferResults(served=served, lost={key} if lost else set())
        ended = {load.request_id}
        given.step(results, **{"failed" if lost else "loaded": ended})
        given.run()
        [(state, reason)] = states(told(given, name))
        assert (state, reason) == (("compiled", "lost") if lost else ("loaded:host", None))
        if not lost:
            assert sum(told(given, name)["loaded_tokens"].values()) > 0
        given.scheduler.reset_prefix_cache()


def test_who_is_told(llama: Path) -> None:
    """Those that ask, or with the setting all that do not refuse it."""
    for setting, expected in ((False, {"yes"}), (True, {"yes", "default", "plain"})):
        given = bench(llama, usage=setting)
        for name, usage in (("yes", True), ("no", False), ("default", None)):
            given.submit(name, A, usage=usage)
        given.submit("plain")
        given.run()
        assert {name for name in given.ended if told(given, name)} == expected


def test_nothing_is_kept_of_requests_that_end_early(llama: Path) -> None:
    given = bench(llama, batch_tokens=16)
    given.submit("one", A, question=tuple(range(100)), usage=True)
    for _ in range(4):
        given.step()
    assert given.scheduler._usage._reports.keys() == {"one"}
    given.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    assert not given.scheduler._usage._reports


@pytest.mark.parametrize("ahead", [False, True])
def test_what_steps_tell_adds_up_to_what_the_scheduler_counted(llama: Path, ahead: bool) -> None:
    given = bench(llama, blocks=14, counts=True, ahead=ahead, on_pressure="reject")
    for number in range(30):
        chunks = [A, B][: number % 3]
        name = f"r{number}"
        given.submit(name, *chunks, question=tuple(range(number + 1)), algorithm="mepic", tag=name)
        given.run(100)
    given.submit("large", A, question=tuple(range(150)))
    given.submit("refused", B, question=tuple(range(100)))
    given.run(100)
    given.submit("last", A, B)
    given.run(100)
    seen: dict[str, int] = {}
    for stats in given.counted:
        seen = PicStats(seen).aggregate(PicStats(stats.kv_connector_stats or {})).data
    scheduler = given.scheduler
    now = scheduler._usage.values(scheduler._pool)
    counters = {name for name in now if not name.startswith(GAUGES)}
    assert {n: seen[n] for n in counters} == {n: now[n] for n in counters}
    costs = [scheduler.linker.take_cost(f"r{number}") for number in range(30)]
    of_chunks = [cost.tokens for cost in costs if cost]
    assert now["requests|chunks"] >= len(of_chunks) == 20
    assert now["linked_tokens"] >= sum(tokens.linked for tokens in of_chunks) > 0
    kinds = ("chunk_hit", "prefix_hit", "loaded", "compiled", "computed")
    prompts = sum(len(A) * (n % 3 > 0) + len(B) * (n % 3 > 1) + n + 1 for n in range(30))
    assert sum(now[f"prompt_tokens|{kind}"] for kind in kinds) >= prompts
    assert now["compiled_chunks|evicted"] > 0
    assert now["compiled_chunks|new"] == 2
    assert now["refused_requests|pressure"] == 1
    assert 0 < now["kv_blocks|chunk"] <= now["kv_blocks|usable"] == 14
    assert now["kv_blocks|used"] == now["kv_blocks|pinned"] == 0
