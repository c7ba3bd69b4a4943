"""The ledger's counts, kept up to date step by step, are those of attributing all blocks anew."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.ledger import KINDS
from picbench.engines.planning.keys import is_canonical
from picbench.engines.vllm.scheduler import block_ledger
from picbench.engines.vllm.scheduler.block_ledger import BlockLedger
from picbench.engines.vllm.scheduler.pool import key_of

BLOCKS = 12

#: Keys of the first blocks of prompts: chunks' and others', so that prompts hit each other's.
PREFIXES = ((b"c" * 33, b"d" * 33, b"p" * 32), (b"c" * 33, b"q" * 32), (b"r" * 32,), ())
#: The kinds of the slots of those blocks; all other slots of a prompt are text.
PLANNED = {33: "chunk", 32: "linked"}


class Scheduler:
    """What a ledger sees of a scheduler; a step is whatever happened before `schedule`."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.kv_cache_manager = KVCacheManager(config, 512, BLOCK_SIZE, BLOCK_SIZE)
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.kv_holding_waiting: list[Any] = []
        self.deferred_frees: deque[Any] = deque()
        self.plans: dict[str, Any] = {}
        self.references: list[Any] = []
        self.linker = SimpleNamespace(plan_of=self.plans.get, held=lambda: self.references)

    def schedule(self) -> None:
        """Nothing: the tests do it."""

    def _preempt_request(self, request: Any) -> None:
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        self.running.remove(request)
        self.waiting.append(request)


def arrived(scheduler: Scheduler, keys: tuple[bytes, ...], more: int) -> Any:
    """A request whose first blocks have these keys, with `more` tokens after them."""
    name = str(len(scheduler.plans))
    tokens = len(keys) * BLOCK_SIZE + more
    request: Any = Request(name, [7] * tokens, SamplingParams(max_tokens=99), None)
    # Keys of its own for all blocks that it can fill.
    own = (f"{name}-{n}".encode().ljust(32) for n in range(BLOCKS))
    request.block_hashes[:] = [*keys, *own]
    kinds = [PLANNED[len(key)] for key in keys for _ in range(BLOCK_SIZE)] + ["prompt"] * more
    runs = tuple((kind, len(list(run))) for kind, run in groupby(kinds))
    scheduler.plans[name] = SimpleNamespace(kind_runs=runs)
    scheduler.requests[name] = request
    scheduler.waiting.append(request)
    return request


def compute(scheduler: Scheduler, request: Any, tokens: int, *, later: bool = False) -> bool:
    """Compute some of a request's tokens, at most up to one that is generated.

    Where steps are scheduled ahead, full blocks get their keys `later`.
    """
    manager, hit, blocks = scheduler.kv_cache_manager, 0, None
    if request in scheduler.waiting:
        blocks, hit, *_ = manager.get_computed_blocks(request)
    tokens = min(tokens, request.num_tokens - request.num_computed_tokens - hit)
    if manager.allocate_slots(request, tokens, hit, blocks, delay_cache_blocks=later) is None:
        return False
    if request in scheduler.waiting:
        scheduler.waiting.remove(request)
        scheduler.running.append(request)
    request.num_computed_tokens += hit + tokens
    if request.num_computed_tokens == request.num_tokens:
        request.append_output_token_ids(9)
    return True


def finish(scheduler: Scheduler, request: Any, *, deferred: bool = False) -> None:
    manager = scheduler.kv_cache_manager
    if deferred:
        scheduler.deferred_frees.append((0, manager.pop_blocks_for_free(request)))
    else:
        manager.free(request)
    scheduler.running.remove(request)
    del scheduler.requests[request.request_id]


def slots(scheduler: Scheduler, request: Any) -> Iterator[str]:
    """The kinds of the slots of a request's blocks, one after the other."""
    plan = scheduler.plans[request.request_id]
    kinds = [kind for kind, count in plan.kind_runs for _ in range(count)]
    [ids] = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    for slot in range(len(ids) * BLOCK_SIZE):
        if slot >= request.num_computed_tokens:
            yield "pad"
        else:
            yield kinds[slot] if slot < len(kinds) else "decode"


def counted(scheduler: Scheduler) -> dict[str, float]:
    """The ledger's counts by definition, of all blocks and slots."""
    manager = scheduler.kv_cache_manager
    held: dict[int, list[list[str]]] = {}
    for request in (*scheduler.running, *scheduler.kv_holding_waiting):
        kinds, [ids] = list(slots(scheduler, request)), manager.get_block_ids(request.request_id)
        for place, block in enumerate(ids):
            own = kinds[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
            held.setdefault(block, []).append(own)
    for block in scheduler.references:
        held.setdefault(block.block_id, []).append(["chunk"] * BLOCK_SIZE)
    for _, blocks in scheduler.deferred_frees:
        for block in blocks:
            held.setdefault(block.block_id, []).append(["pad"] * BLOCK_SIZE)
    counts: Counter[str] = Counter()
    for block in manager.block_pool.blocks[1:]:
        if rows := held.get(block.block_id):
            counts.update(min(slot, key=KINDS.index) for slot in zip(*rows, strict=True))
        else:
            key = key_of(block)
            kind = "free" if key is None else "chunk_idle" if is_canonical(key) else "prefix_idle"
            counts[kind] += BLOCK_SIZE
    return {kind: counts[kind] / BLOCK_SIZE for kind in KINDS}


class Steps(RuleBasedStateMachine):
    """Requests come, decode, lose their blocks and go; what they leave is hit or evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.ledger = BlockLedger(self.scheduler)

    @rule(keys=st.sampled_from(PREFIXES), more=st.integers(1, 40))
    def arrive(self, keys: tuple[bytes, ...], more: int) -> None:
        arrived(self.scheduler, keys, more)

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(dice=st.integers(0, 9), tokens=st.sampled_from([1, 1, 1, 15, 16, 33, 99]))
    def compute(self, dice: int, tokens: int) -> None:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        compute(self.scheduler, requests[dice % len(requests)], tokens)

    @precondition(lambda self: self.scheduler.running)
    @rule(dice=st.integers(0, 9), times=st.integers(1, 20), later=st.booleans())
    def decode(self, dice: int, times: int, later: bool) -> None:
        running = self.scheduler.running
        request = running[dice % len(running)]
        for _ in range(times):
            compute(self.scheduler, request, 1, later=later)
            self.scheduler.schedule()
        self.scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)

    @precondition(lambda self: self.scheduler.running)
    @rule(dice=st.integers(0, 9), end=st.sampled_from(["preempted", "over", "done", "deferred"]))
    def end(self, dice: int, end: str) -> None:
        running = self.scheduler.running
        request = running[dice % len(running)]
        if end in ("preempted", "over"):
            self.scheduler._preempt_request(request)
            if end == "over":
                # It starts over in the same step.
                compute(self.scheduler, request, 20)
        else:
            finish(self.scheduler, request, deferred=end == "deferred")

    @precondition(lambda self: self.scheduler.running)
    @rule(dice=st.integers(0, 9))
    def fail_a_load(self, dice: int) -> None:
        """A request whose load failed has computed nothing, and its blocks until it is tried."""
        running = self.scheduler.running
        request = running.pop(dice % len(running))
        request.num_computed_tokens = 0
        self.scheduler.kv_holding_waiting.append(request)

    @precondition(lambda self: self.scheduler.kv_holding_waiting)
    @rule()
    def try_again(self) -> None:
        request = self.scheduler.kv_holding_waiting.pop()
        self.scheduler.kv_cache_manager.free(request)
        self.scheduler.waiting.append(request)

    @rule()
    def free_deferred(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        while self.scheduler.deferred_frees:
            pool.free_blocks(self.scheduler.deferred_frees.popleft()[1])

    @rule(key=st.sampled_from([b"c" * 33, b"d" * 33]))
    def hold(self, key: bytes) -> None:
        """A waiting request references a chunk, or does no more."""
        pool, held = self.scheduler.kv_cache_manager.block_pool, self.scheduler.references
        if held:
            pool.free_blocks([held.pop()])
        elif found := pool.get_cached_block(key, [0]):
            pool.touch(found)
            held.extend(found)

    @rule()
    def reset(self) -> None:
        """Refused while anything is referenced."""
        self.scheduler.kv_cache_manager.reset_prefix_cache()

    @invariant()
    def counts_are_right(self) -> None:
        self.scheduler.schedule()
        last = self.ledger.snapshots[-1]
        assert last.blocks == counted(self.scheduler)
        assert last.pool == BLOCKS - 1 == sum(last.blocks.values())


def test_every_step_is_counted_as_it_is() -> None:
    chosen = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Steps, settings=chosen)  # type: ignore[no-untyped-call]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_preemptions_and_evictions_are_counted_by_kind(scheduler: Scheduler) -> None:
    ledger = BlockLedger(scheduler)
    first = arrived(scheduler, (b"c" * 33, b"p" * 32, b"q" * 32), 1)
    assert compute(scheduler, first, 99)
    scheduler._preempt_request(first)
    assert (ledger.preemptions, ledger.evictions) == (1, {"chunk": 0, "prefix": 0})
    # A request that needs the whole pool.
    assert compute(scheduler, arrived(scheduler, (), (BLOCKS - 1) * BLOCK_SIZE), 999)
    assert (ledger.preemptions, ledger.evictions) == (1, {"chunk": 1, "prefix": 2})


def test_a_measurement_begins_without_earlier_steps(scheduler: Scheduler) -> None:
    ledger = BlockLedger(scheduler)
    scheduler.schedule()
    scheduler.schedule()
    ledger.begin()
    assert ledger.snapshots == []
    scheduler.schedule()
    assert [snapshot.step for snapshot in ledger.snapshots] == [0]


def test_without_a_measurement_the_latest_steps_are_kept(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that serves for days took 700 bytes a step, whether or not anybody measured."""
    monkeypatch.setattr(block_ledger, "LATEST", 3)
    ledger = BlockLedger(scheduler)
    steps = lambda: [snapshot.step for snapshot in ledger.snapshots]  # noqa: E731
    for _ in range(5):
        scheduler.schedule()
    assert steps() == [2, 3, 4]
    ledger.begin()
    for _ in range(5):
        scheduler.schedule()
    assert steps() == [0, 1, 2, 3, 4], "a measurement has all of them"
    ledger.forget()
    for _ in range(5):
        scheduler.schedule()
    assert steps() == [2, 3, 4]


def test_what_reused_blocks_held_is_forgotten(scheduler: Scheduler) -> None:
    ledger = BlockLedger(scheduler)
    whole = (BLOCKS - 2) * BLOCK_SIZE + 1
    for keys, more in (((b"c" * 33,) * 3, 1), ((), whole)):
        request = arrived(scheduler, keys, more)
        assert compute(scheduler, request, 999)
        scheduler.schedule()
        finish(scheduler, request)
    scheduler.schedule()
    # The last block of the last request was not full.
    idle = {kind: count for kind, count in ledger.snapshots[-1].blocks.items() if count}
    assert idle == {"free": 1, "prefix_idle": BLOCKS - 2}


def test_blocks_that_get_their_keys_later_are_cached(scheduler: Scheduler) -> None:
    """Where steps are scheduled ahead, while the next block is being filled already."""
    ledger = BlockLedger(scheduler)
    request = arrived(scheduler, (), BLOCK_SIZE)
    for tokens in (BLOCK_SIZE, 1, 1):
        assert compute(scheduler, request, tokens, later=True)
        scheduler.schedule()
    scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
    scheduler.schedule()
    finish(scheduler, request)
    scheduler.schedule()
    assert ledger.snapshots[-1].blocks["prefix_idle"] == 1
