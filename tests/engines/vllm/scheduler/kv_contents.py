"""What the blocks of a pool hold, slot by slot, if workers do what a scheduler tells them to."""

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scheduler_bench import Step

from picbench.engines.chunk_cache.transfers import LoadCommand, TransferResults
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Plan
from picbench.engines.vllm.scheduler.pool import key_of


class Written(NamedTuple):
    """A slot that a request has computed; what it holds depends on the key of its block."""

    request: Any
    slot: int

    def is_right(self, key: Key | None, request: Any, slot: int) -> bool:
        """Whether it is what another request, or the same, needs in a slot with this key."""
        keys, page = self.request.block_hashes, self.slot // BLOCK_SIZE
        same = key is not None and page < len(keys) and keys[page] == key
        other = same and self.slot % BLOCK_SIZE == slot % BLOCK_SIZE
        return other or (self.request is request and self.slot == slot)


class Loaded(NamedTuple):
    """A slot that came from a tier."""

    key: Key
    offset: int

    def is_right(self, key: Key | None, request: Any, slot: int) -> bool:
        """See `Written.is_right`."""
        return self == (key, slot % BLOCK_SIZE)


class Tiers:
    """Tiers that hold a few chunks, lose some, and answer when they like."""

    def __init__(self, capacity: int, dice: random.Random) -> None:
        self.capacity = capacity
        self.dice = dice
        self.chunks: dict[Key, list[Any]] = {}
        self.storing: dict[Key, list[Any]] = {}
        self.loading: list[LoadCommand] = []

    def keep(self, key: Key, rows: list[Any]) -> bool:
        """Store a chunk; whether that succeeds."""
        if not self.capacity or self.dice.random() < 0.1:
            return False
        self.chunks[key] = rows
        if len(self.chunks) > self.capacity:
            del self.chunks[self.dice.choice(sorted(self.chunks))]
        return key in self.chunks


@dataclass(slots=True)
class Workers:
    """Blocks and tiers; `run` does a step, and answers as a worker's tier client does."""

    scheduler: Any
    tiers: Tiers
    blocks: dict[int, list[Any]] = field(default_factory=dict)

    def run(self, step: Step) -> tuple[TransferResults, set[str], set[str]]:
        """Do a step; the tiers' results, and the requests whose loads succeeded and failed."""
        results = TransferResults()
        self._start(step, results)
        for name, count in step.tokens.items():
            self._compute(self.scheduler.requests[name], count)
        return results, *self._go_on(results)

    def _row(self, block: int) -> list[Any]:
        return self.blocks.setdefault(block, [None] * BLOCK_SIZE)

    def _start(self, step: Step, results: TransferResults) -> None:
        commands, tiers = step.commands, self.tiers
        if commands.clear:
            tiers.chunks.clear()
        for store in commands.stores:
            rows = [list(self._row(block)) for block in store.blocks]
            tiers.storing.setdefault(store.key, rows)
        for copy in commands.copies:
            self.blocks[copy.target] = list(self._row(copy.source))
        tiers.loading += commands.loads
        for key in commands.lookups:
            (results.present if key in tiers.chunks else results.absent).add(key)

    def _go_on(self, results: TransferResults) -> tuple[set[str], set[str]]:
        tiers, done, failed = self.tiers, set[str](), set[str]()
        for key in [key for key in tiers.storing if tiers.dice.random() < 0.6]:
            kept = tiers.keep(key, tiers.storing.pop(key))
            (results.stored if kept else results.refused).add(key)
        for load in [load for load in tiers.loading if tiers.dice.random() < 0.5]:
            tiers.loading.remove(load)
            lost = {chunk.key for chunk in load.chunks if chunk.key not in tiers.chunks}
            for chunk in load.chunks:
                rows = tiers.chunks.get(chunk.key, [[None] * BLOCK_SIZE] * chunk.size)
                for page, block in zip(chunk.pages, chunk.blocks, strict=True):
                    self.blocks[block] = list(rows[page])
            results.lost |= lost
            (failed if lost else done).add(load.request_id)
            if not lost:
                results.served[load.request_id] = {chunk.key: "far" for chunk in load.chunks}
        results.pending = len(tiers.storing) + len(tiers.loading)
        return done, failed

    def _compute(self, request: Any, count: int) -> None:
        """Write what a request computes, and check all that it reads."""
        [ids] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        end = request.num_computed_tokens
        for slot in range(end - count, end):
            self._row(ids[slot // BLOCK_SIZE])[slot % BLOCK_SIZE] = Written(request, slot)

    def keys_of_nothing(self) -> list[int]:
        """Blocks whose key is not that of what they hold."""
        pool = self.scheduler.kv_cache_manager.block_pool
        found = []
        for block in pool.blocks:
            key, held = key_of(block), self._row(block.block_id)[0]
            if key is not None and not (held and held.is_right(key, None, 0)):
                found.append(block.block_id)
        return found

    def check(self, step: Step) -> None:
        """Check what the requests of a step read: a layer writes all its KV before it reads any."""
        for name in step.tokens:
            request = self.scheduler.requests[name]
            plan = self.scheduler.linker.plan_of(name)
            keys = keys_of(request, plan)
            hidden = hidden_slots(plan) if plan is not None else set()
            [ids] = self.scheduler.kv_cache_manager.get_block_ids(name)
            for slot in range(request.num_computed_tokens):
                page, offset = divmod(slot, BLOCK_SIZE)
                held = self._row(ids[page])[offset]
                key = keys[page] if page < len(keys) else None
                right = held is not None and held.is_right(key, request, slot)
                assert right or slot in hidden, (name, slot, held)


def keys_of(request: Any, plan: Plan | None) -> list[Key]:
    """The keys of a request's blocks; of those that it copies, the keys of their sources."""
    keys = list(request.block_hashes)
    if plan is not None and plan.copies:
        keys[plan.shared : plan.canonical] = plan.copies
    return keys


def hidden_slots(plan: Plan) -> set[int]:
    """Slots of a plan that hold no visible token."""
    kinds = enumerate(plan.kinds)
    return {slot for slot, kind in kinds if kind == "pad"}
