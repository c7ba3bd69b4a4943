"""The worker's half of the chunk cache: moves chunk KV between the pool and the tiers."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from picbench.engines.chunk_cache.tiers.guard.guarded_tier import Counters
from picbench.engines.chunk_cache.tiers.guard.ticket import Ticket
from picbench.engines.chunk_cache.tiers.spec import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import Fetched
from picbench.engines.chunk_cache.tiers.tier import Usage, pageable
from picbench.engines.chunk_cache.transfers import (
    LoadCommand,
    LoadedChunk,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.vllm.transfer.block_io import BlockStore

#: Seconds that a step without a forward pass waits for transfers, instead of spinning.
_PATIENCE = 0.001

#: Stored chunks that are remembered at most.
_MOST = 1 << 20


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
class Asking:
    """A lookup under way."""

    keys: Sequence[Key]
    ticket: Ticket[str | None]


@dataclass(slots=True)
class _Found:
    """What is to be reported next."""

    present: set[Key] = field(default_factory=set)
    absent: set[Key] = field(default_factory=set)
    stored: set[Key] = field(default_factory=set)
    refused: set[Key] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)
    served: dict[str, dict[str, int]] = field(default_factory=dict)


class TierClient:
    """Carries out a step's orders; `tiers` is in the notation of ``--tiers``.

    Values in tiers are named by the chunk's key within the engine's namespace: what the KV depends
    on beside the tokens (weights, dtype, shape of the cache, rank).
    """

    def __init__(self, tiers: str) -> None:
        # Memory that a GPU reads by DMA has to be pinned; pinning needs a GPU.
        allocate = _pinned if torch.cuda.is_available() else pageable
        self._stack = open_tiers(parse_tiers(tiers), allocate=allocate)
        self._namespace = b""
        self._loading: list[Loading] = []
        self._storing: list[Storing] = []
        self._asking: list[Asking] = []
        self._kept: OrderedDict[Key, None] = OrderedDict()
        self._found = _Found()

    def register(self, layers: Sequence[Tensor]) -> None:
        """Take the pool's tensors, one a layer, (blocks, kv_heads, slots, 2 * head_size) each."""
        self._blocks = BlockStore(layers)

    def belong(self, namespace: bytes) -> None:
        """Name what the KV of this worker depends on beside its tokens."""
        self._namespace = namespace

    @property
    def counters(self) -> dict[str, Counters]:
        """What each tier did since the engine started, by name."""
        return self._stack.counters()

    @property
    def usage(self) -> dict[str, Usage | None]:
        """What each tier holds, by name; None for one that does not answer."""
        return self._stack.usage()

    def carry_out(self, orders: TransferCommands) -> None:
        """Read what a step will overwrite, and start what takes longer."""
        if orders.clear:
            self._stack.delete([self._name(key) for key in self._kept])
            self._kept.clear()
        for store in orders.stores:
            self._store(store)
        # Behind the stores: a chunk that is evicted may lie in the blocks that are copied into.
        self._blocks.copy([(c.source, c.target) for c in orders.copies])
        for load in orders.loads:
            self._load(load)
        if orders.lookups:
            names = [self._name(key) for key in orders.lookups]
            self._asking.append(Asking(orders.lookups, self._stack.lookup(names)))

    def wait(self) -> None:
        """In a step that computes nothing: give transfers a moment instead of spinning."""
        under_way = [x.ticket.done() for x in self._loading]
        under_way += [x.ticket.done() for x in self._storing]
        under_way += [x.ticket.done() for x in self._asking]
        if under_way and not any(under_way):
            time.sleep(_PATIENCE)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads succeeded, and those whose loads failed, since the last call."""
        self._collect_answers()
        done: set[str] = set()
        failed: set[str] = set()
        for loading in [loading for loading in self._loading if loading.ticket.done()]:
            self._loading.remove(loading)
            target = done if self._arrive(loading) else failed
            target.add(loading.load.request_id)
        return done, failed

    def report(self) -> TransferResults:
        """What the tiers answered since the last call."""
        found, self._found = self._found, _Found()
        return TransferResults(
            present=frozenset(found.present),
            absent=frozenset(found.absent),
            stored=frozenset(found.stored),
            refused=frozenset(found.refused),
            lost=frozenset(found.lost),
            served=found.served,
            pending=len(self._storing) + len(self._asking) + len(self._loading),
        )

    def close(self) -> None:
        """Finish what can be finished within seconds, and close the tiers."""
        self._stack.close()

    def _store(self, store: StoreCommand) -> None:
        value = self._blocks.read(store.blocks)
        ticket = self._stack.store([(self._name(store.key), value)], copy=False)
        self._storing.append(Storing(store.key, ticket))

    def _load(self, load: LoadCommand) -> None:
        wanted = [(self._name(p.key), self._blocks.nbytes(p.size)) for p in load.parts]
        self._loading.append(Loading(load, self._stack.fetch(wanted)))

    def _arrive(self, loading: Loading) -> bool:
        parts = loading.load.parts
        results = loading.ticket.result()
        for part, fetched in zip(parts, results, strict=True):
            if fetched is None:
                self._found.lost.add(part.key)
            else:
                self._blocks.write(fetched.data, part.size, part.pages, part.blocks)
        if not all(results):
            return False
        self._serve(loading.load.request_id, zip(parts, results, strict=True))
        return True

    def _serve(self, request_id: str, parts: Iterable[tuple[LoadedChunk, Fetched | None]]) -> None:
        served = self._found.served.setdefault(request_id, {})
        for part, fetched in parts:
            if fetched is not None:
                served[fetched.tier] = served.get(fetched.tier, 0) + len(part.blocks)

    def _collect_answers(self) -> None:
        for storing in [s for s in self._storing if s.ticket.done()]:
            self._storing.remove(storing)
            (tiers,) = storing.ticket.result()
            (self._found.stored if tiers else self._found.refused).add(storing.key)
            if tiers:
                self._keep(storing.key)
        for asking in [a for a in self._asking if a.ticket.done()]:
            self._asking.remove(asking)
            for key, tier in zip(asking.keys, asking.ticket.result(), strict=True):
                (self._found.absent if tier is None else self._found.present).add(key)

    def _keep(self, key: Key) -> None:
        """Remember what to delete when the tiers are cleared; the oldest are forgotten."""
        self._kept[key] = None
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def _name(self, key: Key) -> Key:
        return hashlib.sha256(self._namespace + key).digest()


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
