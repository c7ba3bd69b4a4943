"""Memory of the engine core: what is kept of chunks goes with them."""

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from far_tiers import FarTiers
from vllm import SamplingParams
from vllm.v1.request import Request

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import StoreCommand, TransferCommands
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.scheduler.planner import RequestPlanner
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.transfer.tier_client import TierClient

BLOCKS, SLOTS = 64, 16

#: Bytes of a block of the pool below.
ROW = SLOTS * 4 * 4

CHUNKS, AT_ONCE = 100_000, 50


@dataclass
class Pool:
    """Blocks that no request holds, least recently used out first."""

    pages: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    free: list[int] = field(default_factory=lambda: list(range(1, BLOCKS + 1)))

    def place(self, store: ChunkStore, chunk: Canonical) -> tuple[int, ...]:
        for page in chunk.pages:
            if not self.free:
                key = next(iter(self.pages))
                store.evict(key)
                if key in self.pages:
                    self.free.append(self.pages.pop(key))
            self.pages[page.name] = self.free.pop()
        return tuple(self.pages[page.name] for page in chunk.pages)

    def resident(self, key: Key) -> bool:
        return key in self.pages

    def in_use(self, key: Key) -> bool:
        return False

    def block_id(self, key: Key) -> int:
        return self.pages[key]

    def discard(self, keys: Iterable[Key]) -> None:
        self.free += [self.pages.pop(key) for key in keys if key in self.pages]


def client_of(tiers: str) -> TierClient:
    client = TierClient(tiers)
    client.register_kv_caches([torch.zeros(BLOCKS + 1, 1, SLOTS, 4)])
    client.set_namespace(b"model")
    return client


def prompts(planner: RequestPlanner) -> Iterator[list[Canonical]]:
    """Prompts of chunks that no other one has."""
    span = [[n * SLOTS, (n + 1) * SLOTS] for n in range(AT_ONCE)]
    for first in range(0, CHUNKS, AT_ONCE):
        tokens = [token for n in range(AT_ONCE) for token in [first + n] * SLOTS] + [7]
        params = SamplingParams(max_tokens=1, extra_args={"pic": {"spans": span}})
        request = Request(f"{first}", tokens, params, None)
        found = planner.read(request)
        assert found is not None
        yield list(planner.plan(request, *found).plan.canonicals)


def serve(chunks: list[Canonical], pool: Pool, store: ChunkStore, client: TierClient) -> None:
    """Compile chunks, and let the tiers have them."""
    for chunk in chunks:
        store.prepare_compile(chunk, "owner")
        blocks = pool.place(store, chunk)
        store.complete_compile(chunk, blocks, success=True, shared=True)
    client.start(store.commands.take())
    client.finish_loads()
    store.complete_transfers(client.take_results())
    assert not store.has_pending_work()


def test_many_chunks_leave_memory_as_it_was() -> None:
    limits = Limits(capacity=4096, positions=4096, blocks=BLOCKS, block_size=SLOTS, layers=1)
    planner = RequestPlanner(PicSettings(algorithm="naive"), limits)
    pool: Any = Pool()
    store, client = ChunkStore(pool, tiers=True), client_of(f"host:{100 * ROW}B")
    blocks = []
    for number, chunks in enumerate(prompts(planner), start=1):
        serve(chunks, pool, store, client)
        if number * AT_ONCE * 2 in (CHUNKS, 2 * CHUNKS):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    arena, done = client._chunks.arena, client.counters["host"]
    client.close()
    assert arena is not None
    assert (done.stored, len(arena._extents)) == (CHUNKS, 100)
    # Of Python's memory, of which a chunk takes some 50 while it is known.
    assert blocks[1] - blocks[0] < 1000
    assert len(store._records) <= BLOCKS + 100


def stored(client: TierClient, *keys: bytes) -> Any:
    client.start(TransferCommands(stores=[StoreCommand(key, (1,)) for key in keys]))
    client.finish_loads()
    return client.take_results()


def test_a_host_tier_tells_what_it_evicted() -> None:
    client = client_of(f"host:{2 * ROW}B")
    assert stored(client, b"a", b"b").stored == {b"a", b"b"}
    told = stored(client, b"c")
    assert (told.stored, told.absent, told.refused) == ({b"c"}, {b"a"}, set())
    # What is evicted in the step in which it was stored was, in the end, not kept.
    told = stored(client, b"d", b"e", b"f")
    assert (told.stored, told.absent, told.refused) == ({b"e", b"f"}, {b"b", b"c"}, {b"d"})
    # What is stored again in the step in which it was evicted is there.
    told = stored(client, b"a", b"f", b"e")
    assert told.stored == {b"f", b"e"}
    client.close()


def test_no_more_keys_are_remembered_than_far_tiers_have_room_for(tmp_path: Any) -> None:
    client = client_of(f"disk:{tmp_path}:{3 * ROW}B")
    client._chunks._stack.close()
    client._chunks._stack = tiers = FarTiers()  # type: ignore[assignment]
    for key in (b"a", b"b", b"c", b"d"):
        assert stored(client, key).stored == {key}
    client.start(TransferCommands(clear=True))
    assert list(tiers.values) == [client._name(b"a")]
