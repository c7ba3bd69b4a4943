"""The tier client of a worker: moves chunk KV between its pool and the tiers."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from picbench.engines.chunk_cache.tiers.background import Ticket
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.chunk_cache.tiers.kinds import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import Fetched
from picbench.engines.chunk_cache.tiers.tier import Usage, pageable
from picbench.engines.chunk_cache.transfers import (
    LoadCommand,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.vllm.transfer.block_io import BlockStore

T = TypeVar("T")
U = TypeVar("U")

#: Seconds that an idle step waits for transfers instead of spinning.
_WAIT = 0.001

#: At most this many stored chunks are remembered.
_MAX_STORED = 1 << 20


class TierClient:
    """Starts the commands of each step and collects their results.

    `tiers` is in the notation of `EngineConfig.tiers`. A value's name in a tier is a digest of the
    chunk's key and the worker's namespace (weights, dtype, shape of the cache, rank).
    """

    def __init__(self, tiers: str) -> None:
        # Memory that a GPU reads by DMA has to be pinned; pinning needs a GPU.
        allocate = _pinned if torch.cuda.is_available() else pageable
        self._stack = open_tiers(parse_tiers(tiers), allocate=allocate)
        self._namespace = b""
        # What is under way, with its ticket.
        self._loads: list[tuple[LoadCommand, Ticket[Fetched | None]]] = []
        self._stores: list[tuple[Key, Ticket[tuple[str, ...]]]] = []
        self._lookups: list[tuple[Sequence[Key], Ticket[str | None]]] = []
        self._stored: OrderedDict[Key, None] = OrderedDict()
        self._results = TransferResults()

    def register_kv_caches(self, layers: Sequence[Tensor]) -> None:
        """Set the pool's tensors, one per layer, [blocks, kv_heads, slots, 2 * head_size] each."""
        self._blocks = BlockStore(layers)

    def set_namespace(self, namespace: bytes) -> None:
        """Set what the KV of this worker depends on besides its tokens."""
        self._namespace = namespace

    @property
    def counters(self) -> dict[str, Counters]:
        """What each tier did since the engine started, by name."""
        return self._stack.counters()

    @property
    def usage(self) -> dict[str, Usage | None]:
        """What each tier holds, by name; None for one that does not answer."""
        return self._stack.usage()

    def start(self, commands: TransferCommands) -> None:
        """Read the blocks that the step will overwrite, and start transfers and lookups."""
        if commands.clear:
            self._stack.delete([self._name(key) for key in self._stored])
            self._stored.clear()
        for store in commands.stores:
            self._store(store)
        # After the stores: a copy may overwrite blocks of a chunk that is evicted and stored.
        self._blocks.copy([(c.source, c.target) for c in commands.copies])
        for load in commands.loads:
            self._load(load)
        if commands.lookups:
            names = [self._name(key) for key in commands.lookups]
            self._lookups.append((commands.lookups, self._stack.lookup(names)))

    def wait(self) -> None:
        """Wait briefly for transfers, in a step that computes nothing."""
        under_way: list[tuple[Any, Ticket[Any]]] = [*self._loads, *self._stores, *self._lookups]
        done = [ticket.done() for _, ticket in under_way]
        if done and not any(done):
            time.sleep(_WAIT)

    def finish_loads(self) -> tuple[set[str], set[str]]:
        """Write loaded blocks; return the requests whose loads succeeded, and those that failed."""
        self._finish_stores()
        self._finish_lookups()
        done: set[str] = set()
        failed: set[str] = set()
        for load, values in _take_done(self._loads):
            (done if self._finish_load(load, values) else failed).add(load.request_id)
        return done, failed

    def take_results(self) -> TransferResults:
        """Results since the last call."""
        results, self._results = self._results, TransferResults()
        results.pending = len(self._stores) + len(self._lookups) + len(self._loads)
        return results

    def close(self) -> None:
        """Finish what takes seconds at most, and close the tiers."""
        self._stack.close()

    def _store(self, store: StoreCommand) -> None:
        value = self._blocks.read(store.blocks)
        ticket = self._stack.store([(self._name(store.key), value)], copy=False)
        self._stores.append((store.key, ticket))

    def _load(self, load: LoadCommand) -> None:
        wanted = [(self._name(c.key), self._blocks.nbytes(c.size)) for c in load.chunks]
        self._loads.append((load, self._stack.fetch(wanted)))

    def _finish_load(self, load: LoadCommand, values: Sequence[Fetched | None]) -> bool:
        """Write the values that were found, and count their blocks if all were found."""
        served: dict[str, int] = {}
        for chunk, value in zip(load.chunks, values, strict=True):
            if value is None:
                self._results.lost.add(chunk.key)
                continue
            self._blocks.write(value.data, chunk.size, chunk.pages, chunk.blocks)
            served[value.tier] = served.get(value.tier, 0) + len(chunk.blocks)
        if not all(values):
            return False
        total = self._results.served.setdefault(load.request_id, {})
        for tier, blocks in served.items():
            total[tier] = total.get(tier, 0) + blocks
        return True

    def _finish_stores(self) -> None:
        for key, (tiers,) in _take_done(self._stores):
            (self._results.stored if tiers else self._results.refused).add(key)
            if tiers:
                self._remember(key)

    def _finish_lookups(self) -> None:
        for keys, tiers in _take_done(self._lookups):
            for key, tier in zip(keys, tiers, strict=True):
                (self._results.absent if tier is None else self._results.present).add(key)

    def _remember(self, key: Key) -> None:
        """Remember what to delete when the tiers are cleared; the oldest is forgotten."""
        self._stored[key] = None
        if len(self._stored) > _MAX_STORED:
            self._stored.popitem(last=False)

    def _name(self, key: Key) -> Key:
        return hashlib.sha256(self._namespace + key).digest()


def _take_done(under_way: list[tuple[T, Ticket[U]]]) -> list[tuple[T, Sequence[U]]]:
    """Remove what is done from a list, and return it with its results."""
    done: list[tuple[T, Sequence[U]]] = []
    for entry in list(under_way):
        subject, ticket = entry
        if ticket.done():
            under_way.remove(entry)
            done.append((subject, ticket.result()))
    return done


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
