"""An exception anywhere between arrival and answer ends one request; all others are served."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import Start, engine_ahead
from small_engine import check_drained, small_config
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import TransferCommands
from picbench.engines.engine import Engine
from picbench.engines.pace import Submission
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.transfer.copies import PlainCopies
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.tier_client import TierClient

#: Hooks that are called for a request, or for a job that a request waits for.
OF_A_REQUEST = [
    (Linker, "on_arrival"),
    (Linker, "before_schedule"),
    (Linker, "_advance"),
    (Linker, "can_schedule"),
    (Linker, "check_hits"),
    (Linker, "external_tokens"),
    (Linker, "on_allocated"),
    (Linker, "on_scheduled"),
    (Linker, "on_preempted"),
    (Linker, "on_finished"),
    (Linker, "_fill"),
    (ChunkJobs, "compile_or_fetch"),
    (ChunkJobs, "load"),
    (ChunkJobs, "finish"),
    (ChunkStore, "lookup"),
    (ChunkStore, "is_mappable"),
    (ChunkStore, "prepare_compile"),
    (ChunkStore, "prepare_fetch"),
    (ChunkStore, "complete_compile"),
    (ChunkStore, "complete_fetch"),
    (ChunkStore, "touch"),
    (ChunkStore, "release_stored"),
    (FCFSRequestQueue, "insert"),
    (TierClient, "_load"),
    (TierClient, "_finish_load"),
    (PlainCopies, "load"),
    (PoolRows, "copy"),
]

#: Hooks that are called for no request in particular: none has to end.
OF_NO_REQUEST = [
    (Linker, "on_transfer_results"),
    (ChunkStore, "complete_transfers"),
    (TierClient, "_store"),
    (TierClient, "finish_loads"),
    (TierClient, "take_results"),
    (PlainCopies, "store"),
]

#: Serves all requests, and returns those that failed.
Failed = Callable[[], list[tuple[Request, Result]]]

ALGORITHMS = ["mepic", "naive", "epic:k=16", "epic:k=4:copy=shared", "prefix"]


@pytest.fixture(scope="module", params=["in step", "ahead"])
def engine(pebble: Path, start: Start, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A pool that is too small for the requests that run at a time, and a tier for its chunks."""
    own = engine_ahead if request.param == "ahead" else start
    with own(
        small_config(pebble, 40, 256, batch_tokens=128, max_requests=8, tiers="host:1MiB")
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests(draw: Any) -> list[Request]:
    dice = random.Random(5)
    chunks = [Chunk(tokens=draw(dice.randint(17, 48), 5000 + i)) for i in range(9)]
    return [
        Request(
            [*dice.sample(chunks, dice.randint(1, 3)), Text(tokens=draw(5, 100_000 + index))],
            algorithm=ALGORITHMS[index % len(ALGORITHMS)],
            max_tokens=dice.choice([2, 4, 40]),
        )
        for index in range(24)
    ]


def serve(engine: Engine, requests: list[Request]) -> list[Result]:
    """All are submitted before the first step, so that they compete for blocks."""
    tags = [engine.submit(request, ignore_eos=True) for request in requests]
    done: dict[str, Result] = {}
    while len(done) < len(tags):
        done |= engine.step()
    engine.drain()
    return [done[tag] for tag in tags]


@pytest.fixture(scope="module")
def expected(engine: Engine, requests: list[Request]) -> list[Result]:
    results = serve(engine, requests)
    engine.reset()
    assert engine.preemptions > 0
    assert all(result.error is None for result in results)
    return results


def check_sound(engine: Engine) -> None:
    """Nothing is left of the requests, and every block was accounted for at every step."""
    check_drained(engine)
    assert all(sum(s.blocks.values()) == s.pool for s in engine.memory)


@pytest.fixture
def failed(engine: Engine, requests: list[Request], expected: list[Result]) -> Failed:
    """Serves the requests; (request, result) of those that are errors, all others being right."""
    engine.reset()

    def serve_all() -> list[tuple[Request, Result]]:
        results = serve(engine, requests)
        for result, right in zip(results, expected, strict=True):
            count = None if result.error is None else len(result.tokens)
            assert result.tokens == right.tokens[:count]
        check_sound(engine)
        return [pair for pair in zip(requests, results, strict=True) if pair[1].error is not None]

    return serve_all


@pytest.fixture
def fail_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, int], list[int]]:
    """Make the n-th call of a method raise; returns the list of its calls."""

    def install(owner: type, name: str, nth: int) -> list[int]:
        real, calls = getattr(owner, name), list[int]()

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(len(calls) + 1)
            if len(calls) == nth:
                raise RuntimeError("injected")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, hook)
        return calls

    return install


# The scope, which pytest cannot tell from two arguments, keeps tests of an engine together.
@pytest.mark.parametrize(
    ("engine", "nth"),
    [("in step", 1), ("in step", 2), ("ahead", 2)],
    indirect=["engine"],
    scope="module",
)
@pytest.mark.parametrize(("owner", "name"), OF_A_REQUEST)
def test_a_fault_ends_one_request(
    failed: Failed, fail_once: Any, owner: type, name: str, nth: int
) -> None:
    calls = fail_once(owner, name, nth)
    [(_, result)] = failed()
    assert len(calls) >= nth
    assert result.finish_reason == "error"
    assert "RuntimeError: injected" in str(result.error)
    assert "\n" not in str(result.error)


def test_a_fault_ends_the_request_whose_chunks_were_requested(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one at the head of the queue, for which the others wait."""
    real, ends = Linker._advance, list[tuple[int, ...]]()

    def advance(self: Linker, request: Any, link: Any, first: Any) -> None:
        if request is not first and not ends:
            ends.append(tuple(request.prompt_token_ids[-5:]))
            raise RuntimeError("injected")
        real(self, request, link, first)

    monkeypatch.setattr(Linker, "_advance", advance)
    [(request, _)] = failed()
    assert [request.segments[-1].tokens] == ends


@pytest.mark.parametrize(("owner", "name"), OF_NO_REQUEST)
def test_a_fault_of_no_request_ends_none(
    failed: Failed, fail_once: Any, owner: type, name: str
) -> None:
    calls = fail_once(owner, name, 2)
    assert not failed()
    assert len(calls) > 2


def test_chunks_that_are_not_stored_end_no_request(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is loaded or copied in the same step."""
    real, calls = TierClient._store, list[int]()

    def store(self: TierClient, command: Any) -> None:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("injected")
        real(self, command)

    monkeypatch.setattr(TierClient, "_store", store)
    assert not failed()
    assert len(calls) > 2


def test_a_step_whose_transfers_do_not_start_ends_those_that_need_them(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = TierClient.start, list[int]()

    def start(self: TierClient, commands: TransferCommands) -> None:
        if commands.loads and not seen:
            seen.append(len(commands.loads) + len({c.request_id for c in commands.copies}))
            raise RuntimeError("injected")
        real(self, commands)

    monkeypatch.setattr(TierClient, "start", start)
    assert 0 < len(failed()) <= seen[0]


def test_a_job_that_always_fails_is_not_tried_for_ever(
    failed: Failed, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure ends a request; the chunk's blocks serve others for as long as they last."""
    complete = ChunkStore.complete_compile

    def half(self: ChunkStore, *args: Any, success: bool, shared: bool) -> None:
        complete(self, *args, success=False, shared=shared)
        if success:
            raise RuntimeError("injected")

    monkeypatch.setattr(ChunkStore, "complete_compile", half)
    planned = [request for request in requests if request.algorithm != "prefix"]
    assert 0 < len(failed()) <= len(planned)


def test_an_abort_whose_orphans_are_not_found_leaks_nothing(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    def orphans(self: Linker) -> list[str]:
        raise RuntimeError("injected")

    engine.reset()
    prepared = engine._prepare(requests[0], 4, None, True)
    engine._submit(Submission(prepared, time.time(), 0.0))
    engine._running.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Linker, "orphans", orphans)
        engine._running.engine.abort_request([prepared.tag])
    engine._report(prepared.tag)
    engine.drain()
    check_sound(engine)
