"""The tier client of a worker: moves chunk KV between its pool and the tiers."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
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
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.transfer.block_io import BlockStore
from picbench.engines.vllm.transfer.step_clock import StepClock, StreamTimer, WallTimer

T = TypeVar("T")
U = TypeVar("U")

#: Seconds that an idle step waits for transfers instead of spinning.
_WAIT = 0.001

#: At most this many stored chunks are remembered.
_MAX_STORED = 1 << 20


class TierClient:
    """Starts the commands of each step and collects their results.

    `tiers` is in the notation of `EngineConfig.tiers`. A value's name in a tier is a digest of the
    chunk's key and the worker's namespace (weights, dtype, shape of the cache, rank). `faults` are
    reported with the results, also those of others in the worker.
    """

    def __init__(self, tiers: str) -> None:
        # Memory that a GPU reads by DMA has to be pinned; pinning needs a GPU.
        allocate = _pinned if torch.cuda.is_available() else pageable
        specs = parse_tiers(tiers)
        self._stack = open_tiers(specs, allocate=allocate)
        timer = StreamTimer if torch.cuda.is_available() else WallTimer
        self._clock = StepClock(timer) if specs else None
        self._namespace = b""
        # What is under way, with its ticket.
        self._loads: list[tuple[LoadCommand, Ticket[Fetched | None]]] = []
        self._stores: list[tuple[Key, Ticket[tuple[str, ...]]]] = []
        self._lookups: list[tuple[Sequence[Key], Ticket[str | None]]] = []
        self._stored: OrderedDict[Key, None] = OrderedDict()
        self._results = TransferResults()
        self.faults = Faults()
        self._failed: set[str] = set()

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

    def step(self) -> AbstractContextManager[None]:
        """The scope of a step that computes something: its time counts, and that of tiers in it."""
        return self._clock.step() if self._clock else nullcontext()

    def start(self, commands: TransferCommands) -> None:
        """Read the blocks that the step will overwrite, and start transfers and lookups.

        An exception ends the request whose blocks were to be filled. A chunk that could not be
        stored or looked up counts as missing in the tiers.
        """
        attempt = self.faults.succeeds
        if commands.clear:
            attempt("clear tiers", None, self._clear)
        for store in commands.stores:
            if not attempt("store a chunk", None, partial(self._store, store)):
                self._results.refused.add(store.key)
        # After the stores: a copy may overwrite blocks of a chunk that is evicted and stored.
        for request_id, copies in groupby(commands.copies, attrgetter("request_id")):
            pairs = [(c.source, c.target) for c in copies]
            attempt("copy chunks", request_id, partial(self._blocks.copy, pairs))
        for load in commands.loads:
            if not attempt("load chunks", load.request_id, partial(self._load, load)):
                self._fail(load)
        lookup = partial(self._look_up, commands.lookups)
        if commands.lookups and not attempt("look up chunks", None, lookup):
            self._results.absent.update(commands.lookups)

    def give_up(self, commands: TransferCommands) -> None:
        """Report that none of a step's commands succeeded."""
        reason = "picbench failed to start transfers"
        self._results.refused.update(store.key for store in commands.stores)
        self._results.absent.update(commands.lookups)
        for load in commands.loads:
            self.faults.blame(load.request_id, reason)
            self._fail(load)
        for copy in commands.copies:
            self.faults.blame(copy.request_id, reason)

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
        failed, self._failed = self._failed, set()
        for load, ticket in _take_done(self._loads):
            finish = partial(self._finish_load, load, ticket)
            if self.faults.attempt("load chunks", load.request_id, finish, False):
                done.add(load.request_id)
            else:
                failed.add(load.request_id)
        return done, failed

    def take_results(self) -> TransferResults:
        """Results since the last call."""
        results, self._results = self._results, TransferResults()
        results.pending = len(self._stores) + len(self._lookups) + len(self._loads)
        results.faults = self.faults.take()
        if self._clock:
            results.times = self._clock.take()
        return results

    def close(self) -> None:
        """Finish what takes seconds at most, and close the tiers."""
        self._stack.close()

    def _clear(self) -> None:
        self._stack.delete([self._name(key) for key in self._stored])
        self._stored.clear()

    def _look_up(self, keys: Sequence[Key]) -> None:
        self._lookups.append((keys, self._stack.lookup([self._name(key) for key in keys])))

    def _fail(self, load: LoadCommand) -> None:
        """A load failed before it began."""
        self._failed.add(load.request_id)
        self._results.lost.update(chunk.key for chunk in load.chunks)

    def _store(self, store: StoreCommand) -> None:
        with self._timed():
            value = self._blocks.read(store.blocks)
            ticket = self._stack.store([(self._name(store.key), value)], copy=False)
        self._stores.append((store.key, ticket))

    def _load(self, load: LoadCommand) -> None:
        wanted = [(self._name(c.key), self._blocks.nbytes(c.size)) for c in load.chunks]
        with self._timed():
            self._loads.append((load, self._stack.fetch(wanted)))

    def _finish_load(self, load: LoadCommand, ticket: Ticket[Fetched | None]) -> bool:
        """Write the values that were found, and count their blocks if all were found."""
        served: dict[str, int] = {}
        values = ticket.result()
        for chunk, value in zip(load.chunks, values, strict=True):
            if value is None:
                self._results.lost.add(chunk.key)
                continue
            with self._timed():
                self._blocks.write(value.data, chunk.size, chunk.pages, chunk.blocks)
            served[value.tier] = served.get(value.tier, 0) + len(chunk.blocks)
        if not all(values):
            return False
        total = self._results.served.setdefault(load.request_id, {})
        for tier, blocks in served.items():
            total[tier] = total.get(tier, 0) + blocks
        return True

    def _timed(self) -> AbstractContextManager[None]:
        return self._clock.tiers() if self._clock else nullcontext()

    def _finish_stores(self) -> None:
        for key, ticket in _take_done(self._stores):
            none: list[tuple[str, ...]] = [()]
            (tiers,) = self.faults.attempt("store a chunk", None, ticket.result, none)
            (self._results.stored if tiers else self._results.refused).add(key)
            if tiers:
                self._remember(key)

    def _finish_lookups(self) -> None:
        for keys, ticket in _take_done(self._lookups):
            unknown: list[str | None] = [None] * len(keys)
            tiers = self.faults.attempt("look up chunks", None, ticket.result, unknown)
            for key, tier in zip(keys, tiers, strict=True):
                (self._results.absent if tier is None else self._results.present).add(key)

    def _remember(self, key: Key) -> None:
        """Remember what to delete when the tiers are cleared; the oldest is forgotten."""
        self._stored[key] = None
        if len(self._stored) > _MAX_STORED:
            self._stored.popitem(last=False)

    def _name(self, key: Key) -> Key:
        return hashlib.sha256(self._namespace + key).digest()


def _take_done(under_way: list[tuple[T, Ticket[U]]]) -> list[tuple[T, Ticket[U]]]:
    """Remove what is done from a list, and return it."""
    done: list[tuple[T, Ticket[U]]] = []
    waiting: list[tuple[T, Ticket[U]]] = []
    for entry in under_way:
        (done if entry[1].done() else waiting).append(entry)
    under_way[:] = waiting
    return done


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
