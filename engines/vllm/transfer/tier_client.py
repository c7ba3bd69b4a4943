"""The tier client of a worker: moves chunk KV between its pool and the tiers."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from picbench.engines.chunk_cache.tiers.background import Ticket
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.chunk_cache.tiers.kinds import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import Fetched
from picbench.engines.chunk_cache.tiers.tier import Usage, pageable
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    LoadCommand,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.vllm.transfer.block_io import BlockStore

#: Seconds that an idle step waits for transfers instead of spinning.
_WAIT = 0.001

#: At most this many stored chunks are remembered.
_MAX_STORED = 1 << 20


@dataclass(slots=True)
class Loading:
    """A load under way."""

    load: LoadCommand
    ticket: Ticket[Fetched | None]


@dataclass(slots=True)
class Storing:
    """A store under way."""

    key: Key
    ticket: Ticket[tuple[str, ...]]


@dataclass(slots=True)
class LookingUp:
    """A lookup under way."""

    keys: Sequence[Key]
    ticket: Ticket[str | None]


@dataclass(slots=True)
class _Results:
    """Results to be sent next; see `TransferResults`."""

    present: set[Key] = field(default_factory=set)
    absent: set[Key] = field(default_factory=set)
    stored: set[Key] = field(default_factory=set)
    refused: set[Key] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)
    served: dict[str, dict[str, int]] = field(default_factory=dict)


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
        self._loads: list[Loading] = []
        self._stores: list[Storing] = []
        self._lookups: list[LookingUp] = []
        self._stored: OrderedDict[Key, None] = OrderedDict()
        self._results = _Results()

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
            self._lookups.append(LookingUp(commands.lookups, self._stack.lookup(names)))

    def wait(self) -> None:
        """Wait briefly for transfers, in a step that computes nothing."""
        under_way = [x.ticket.done() for x in self._loads]
        under_way += [x.ticket.done() for x in self._stores]
        under_way += [x.ticket.done() for x in self._lookups]
        if under_way and not any(under_way):
            time.sleep(_WAIT)

    def finish_loads(self) -> tuple[set[str], set[str]]:
        """Write loaded blocks; return the requests whose loads succeeded, and those that failed."""
        self._finish_stores()
        self._finish_lookups()
        done: set[str] = set()
        failed: set[str] = set()
        for loading in [loading for loading in self._loads if loading.ticket.done()]:
            self._loads.remove(loading)
            target = done if self._finish_load(loading) else failed
            target.add(loading.load.request_id)
        return done, failed

    def take_results(self) -> TransferResults:
        """Results since the last call."""
        results, self._results = self._results, _Results()
        return TransferResults(
            present=frozenset(results.present),
            absent=frozenset(results.absent),
            stored=frozenset(results.stored),
            refused=frozenset(results.refused),
            lost=frozenset(results.lost),
            served=results.served,
            pending=len(self._stores) + len(self._lookups) + len(self._loads),
        )

    def close(self) -> None:
        """Finish what takes seconds at most, and close the tiers."""
        self._stack.close()

    def _store(self, store: StoreCommand) -> None:
        value = self._blocks.read(store.blocks)
        ticket = self._stack.store([(self._name(store.key), value)], copy=False)
        self._stores.append(Storing(store.key, ticket))

    def _load(self, load: LoadCommand) -> None:
        wanted = [(self._name(c.key), self._blocks.nbytes(c.size)) for c in load.chunks]
        self._loads.append(Loading(load, self._stack.fetch(wanted)))

    def _finish_load(self, loading: Loading) -> bool:
        chunks = loading.load.chunks
        values = loading.ticket.result()
        for chunk, fetched in zip(chunks, values, strict=True):
            if fetched is None:
                self._results.lost.add(chunk.key)
            else:
                self._blocks.write(fetched.data, chunk.size, chunk.pages, chunk.blocks)
        if not all(values):
            return False
        self._count_served(loading.load.request_id, zip(chunks, values, strict=True))
        return True

    def _count_served(
        self, request_id: str, loaded: Iterable[tuple[ChunkLoad, Fetched | None]]
    ) -> None:
        served = self._results.served.setdefault(request_id, {})
        for chunk, fetched in loaded:
            if fetched is not None:
                served[fetched.tier] = served.get(fetched.tier, 0) + len(chunk.blocks)

    def _finish_stores(self) -> None:
        for storing in [s for s in self._stores if s.ticket.done()]:
            self._stores.remove(storing)
            (tiers,) = storing.ticket.result()
            (self._results.stored if tiers else self._results.refused).add(storing.key)
            if tiers:
                self._remember(storing.key)

    def _finish_lookups(self) -> None:
        for lookup in [x for x in self._lookups if x.ticket.done()]:
            self._lookups.remove(lookup)
            for key, tier in zip(lookup.keys, lookup.ticket.result(), strict=True):
                (self._results.absent if tier is None else self._results.present).add(key)

    def _remember(self, key: Key) -> None:
        """Remember what to delete when the tiers are cleared; the oldest is forgotten."""
        self._stored[key] = None
        if len(self._stored) > _MAX_STORED:
            self._stored.popitem(last=False)

    def _name(self, key: Key) -> Key:
        return hashlib.sha256(self._namespace + key).digest()


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
