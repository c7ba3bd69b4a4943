"""The tier client of a worker: moves chunk KV between its pool and the tiers."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from math import inf
from operator import attrgetter

import torch
from torch import Tensor

from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.chunk_cache.tiers.notation import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import EraseWork, Ticket
from picbench.engines.chunk_cache.transfers import (
    Erasure,
    LoadCommand,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.transfer.chunk_transfers import (
    ChunkTransfers,
    Served,
    TransferTask,
    advance_all,
)
from picbench.engines.vllm.transfer.copies import PlainCopies
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.step_clock import StepClock, StreamTimer, WallTimer
from picbench.engines.vllm.transfer.stream_copies import StreamCopies, Streams

#: Seconds that an idle step waits for transfers instead of spinning.
_WAIT = 0.001

#: At most this many stored chunks are remembered.
_MAX_STORED = 1 << 20


class TierClient:
    """Starts the commands of each step and collects their results, without waiting for transfers.

    `tiers` is in the notation of `EngineConfig.tiers`. A value's name in a tier is a digest of the
    chunk's key, the worker's namespace (weights, dtype, shape of the cache, rank) and the layout of
    its pool. `faults` are reported with the results, also those of others in the worker.
    """

    def __init__(self, tiers: str) -> None:
        specs = parse_tiers(tiers)
        nearest = specs[:1] if specs and specs[0].kind == Host.kind else []
        self._capacity = sum(map(Host.capacity_of, nearest))
        far = specs[len(nearest) :]
        self._stack = open_tiers(far, taken=[spec.kind for spec in nearest])
        timer = StreamTimer if torch.cuda.is_available() else WallTimer
        self._clock = StepClock(timer) if specs else None
        self.has_tiers = bool(specs)
        self._namespace = b""
        # What is under way.
        self._loads: list[tuple[LoadCommand, list[TransferTask[Served]]]] = []
        self._stores: dict[Key, TransferTask[bool]] = {}
        # Stores among them that were commanded once more: their answer may have been given.
        self._repeated: set[Key] = set()
        self._lookups: list[tuple[Sequence[Key], Ticket[str | None]]] = []
        self._deletions: list[Ticket[None]] = []
        # Keys of the chunks that are in tiers, by name. Far tiers do not say what they evict, but
        # they cannot have more than their rows; the one used longest ago goes first there, too.
        self._stored: OrderedDict[Key, Key] = OrderedDict()
        self._room = sum(spec.capacity or inf for spec in specs) or inf
        self._results = TransferResults()
        self.faults = Faults()
        self._failed: set[str] = set()

    def register_kv_caches(self, layers: Sequence[Tensor]) -> None:
        """Set the pool's tensors, one per layer, [blocks, kv_heads, slots, 2 * head_size] each.

        Allocates the host tier, for seconds on a GPU. Raises ConfigError without so much memory.
        """
        self._pool = PoolRows(layers)
        self._copies = self._copy_engine()
        self._chunks = ChunkTransfers(
            self._copies,
            self._stack,
            self._pool.row_bytes,
            self._capacity,
            self._timed,
            self._note_evicted,
        )

    def set_namespace(self, namespace: bytes) -> None:
        """Set what the KV of this worker depends on besides its tokens."""
        self._namespace = namespace + self._pool.layout

    @property
    def counters(self) -> dict[str, Counters]:
        """What each tier did since the engine started, by name, nearest first."""
        return self._chunks.counters()

    @property
    def workspace_bytes(self) -> int:
        """Memory of the device that copies take."""
        return self._copies.workspace_bytes

    @torch.inference_mode()
    def digest(self, blocks: Sequence[int]) -> bytes:
        """A digest of what blocks of the pool hold; waits for the device."""
        rows = self._pool.empty(len(blocks), device=str(self._pool.device))
        self._pool.gather(self._pool.ids(blocks), rows)
        return hashlib.sha256(rows.cpu().view(-1).numpy().data).digest()

    @torch.inference_mode()
    def time_copies(self, blocks: int) -> tuple[float, float]:
        """Seconds that the pool's first blocks take to host memory, and back; for an idle worker.

        Without tiers on a GPU there is nothing that copies: both are infinite.
        """
        if type(self._copies) is PlainCopies and self._pool.device.type != "cpu":
            return inf, inf
        ids, memory = range(min(blocks, self._pool.blocks)), self._copies.passing_memory(blocks)
        times = []
        for copy in (
            partial(self._copies.store, ids, memory, ids),
            partial(self._copies.load, memory, ids, ids),
        ):
            self._copies.mark()
            self._copies.finish()
            began = time.perf_counter()
            copy()
            self._copies.finish()
            times.append(time.perf_counter() - began)
        return times[0], times[1]

    def step(self) -> AbstractContextManager[None]:
        """The scope of a step that computes something: its time counts, and that of tiers in it."""
        return self._clock.step() if self._clock else nullcontext()

    def start(self, commands: TransferCommands) -> None:
        """Queue what reads blocks that the step will overwrite, and start lookups and fetches.

        What fills blocks goes on in `finish_loads`, after the step was queued. An exception ends
        the request whose blocks were to be filled. A chunk that could not be stored or looked up
        counts as missing in the tiers.
        """
        attempt = self.faults.succeeds
        if commands.clear:
            attempt("clear tiers", None, self._clear)
        for erasure in commands.erasures:
            attempt("erase chunks", None, partial(self._erase, erasure))
        for store in commands.stores:
            if not attempt("store a chunk", None, partial(self._store, store)):
                self._results.refused.add(store.key)
        # After the stores: a copy may overwrite blocks of a chunk that is evicted and stored.
        for request_id, copies in groupby(commands.copies, attrgetter("request_id")):
            pairs = [(c.source, c.target) for c in copies]
            attempt("copy chunks", request_id, partial(self._pool.copy, pairs))
        for load in commands.loads:
            if not attempt("load chunks", load.request_id, partial(self._load, load)):
                self._fail(load)
        if self._loads:
            self._copies.mark()
        lookup = partial(self._look_up, commands.lookups)
        if commands.lookups and not attempt("look up chunks", None, lookup):
            self._results.absent.update(commands.lookups)

    def give_up(self, commands: TransferCommands) -> None:
        """Report that none of a step's commands succeeded; what was started goes on."""
        reason = "picbench failed to start transfers"
        self._results.refused.update(
            store.key for store in commands.stores if store.key not in self._stores
        )
        self._results.absent.update(commands.lookups)
        begun = {load.request_id for load, _ in self._loads}
        for load in commands.loads:
            self.faults.blame(load.request_id, reason)
            if load.request_id not in begun:
                self._fail(load)
        for copy in commands.copies:
            self.faults.blame(copy.request_id, reason)

    def wait(self) -> None:
        """Wait briefly for transfers, in a step that computes nothing."""
        loads = [advance_all(tasks) for _, tasks in self._loads]
        stores = [task.advance() for task in self._stores.values()]
        lookups = [ticket.done() for _, ticket in self._lookups]
        done = [*loads, *stores, *lookups, *(ticket.done() for ticket in self._deletions)]
        if done and not any(done):
            time.sleep(_WAIT)

    def finish_loads(self) -> tuple[set[str], set[str]]:
        """Go on with loads; return the requests whose loads succeeded, and those that failed.

        None of them is returned before the last of its copies has ended.
        """
        self._finish_stores()
        self._finish_lookups()
        self._deletions = [ticket for ticket in self._deletions if not ticket.done()]
        done: set[str] = set()
        failed, self._failed = self._failed, set()
        loads, self._loads = self._loads, []
        for load, tasks in loads:
            if not advance_all(tasks):
                self._loads.append((load, tasks))
                continue
            finish = partial(self._finish_load, load, tasks)
            if self.faults.attempt("load chunks", load.request_id, finish, False):
                done.add(load.request_id)
            else:
                failed.add(load.request_id)
        return done, failed

    def take_results(self) -> TransferResults:
        """Results since the last call."""
        results, self._results = self._results, TransferResults()
        pending = (self._stores, self._lookups, self._loads, self._deletions)
        results.pending = sum(map(len, pending))
        results.faults = self.faults.take()
        if self._clock:
            results.times = self._clock.take()
        return results

    def close(self) -> None:
        """Finish what takes seconds at most, and close the tiers."""
        if hasattr(self, "_chunks"):
            self._chunks.close()
            self._copies.close()
        else:
            self._stack.close()

    def _copy_engine(self) -> PlainCopies:
        """What copies to and from this pool; without tiers nothing is staged on a device."""
        if not self.has_tiers or self._pool.device.type == "cpu":
            return PlainCopies(self._pool)
        copies = StreamCopies(self._pool, Streams(self._pool.device))
        copies.warm_up()
        return copies

    def _clear(self) -> None:
        self._deletions.append(self._chunks.clear(list(self._stored)))
        self._stored.clear()

    def _erase(self, erasure: Erasure) -> None:
        zero = self._pool.empty(1, device=str(self._pool.device)).zero_()
        self._pool.scatter(self._pool.ids(erasure.blocks), zero.expand(len(erasure.blocks), -1, -1))
        before = [*self._stores.values(), *(t for _, tasks in self._loads for t in tasks)]
        begin = partial(self._chunks.erase, list(map(self._name, erasure.keys)))
        tell = lambda failed: self._results.erased.update({erasure.number: failed})  # noqa: E731
        self._deletions.append(EraseWork(before, begin, tell))

    def _look_up(self, keys: Sequence[Key]) -> None:
        near = {key for key in keys if self._chunks.holds(self._name(key))}
        self._results.present.update(near)
        if far := [key for key in keys if key not in near]:
            self._lookups.append((far, self._chunks.look_up([self._name(key) for key in far])))

    def _fail(self, load: LoadCommand) -> None:
        """A load failed before it began."""
        self._failed.add(load.request_id)
        self._results.lost.update(chunk.key for chunk in load.chunks)

    def _store(self, store: StoreCommand) -> None:
        """Queue the reading of a chunk; if it is being stored, it is answered when that ends."""
        if store.key in self._stores:
            self._repeated.add(store.key)
            return
        stored = partial(self._note_stored, store.key)
        task = TransferTask(self._chunks.store(self._name(store.key), store.blocks, stored))
        task.advance()
        self._stores[store.key] = task

    def _load(self, load: LoadCommand) -> None:
        names = [self._name(chunk.key) for chunk in load.chunks]
        stages = self._chunks.load(list(zip(names, load.chunks, strict=True)))
        self._loads.append((load, [TransferTask(each) for each in stages]))

    def _finish_load(self, load: LoadCommand, tasks: Sequence[TransferTask[Served]]) -> bool:
        """Note the tiers of a load if all of its chunks were found."""
        found = [task.result() for task in tasks]
        served = {chunk.key: tier for chunk, tier in found if tier is not None}
        for chunk, tier in found:
            if tier is None:
                self._results.lost.add(chunk.key)
            elif (name := self._name(chunk.key)) in self._stored:
                self._stored.move_to_end(name)
        if not all(tier for _, tier in found):
            return False
        self._results.served.setdefault(load.request_id, {}).update(served)
        return True

    def _timed(self) -> AbstractContextManager[None]:
        return self._clock.tiers() if self._clock else nullcontext()

    def _finish_stores(self) -> None:
        for key, task in list(self._stores.items()):
            if task.advance():
                del self._stores[key]
                if not self.faults.attempt("store a chunk", None, task.result, False):
                    if key not in self._results.stored:
                        self._results.refused.add(key)
                elif key in self._repeated:
                    self._note_stored(key)
                self._repeated.discard(key)

    def _finish_lookups(self) -> None:
        lookups, self._lookups = self._lookups, []
        for keys, ticket in lookups:
            if not ticket.done():
                self._lookups.append((keys, ticket))
                continue
            unknown: list[str | None] = [None] * len(keys)
            tiers = self.faults.attempt("look up chunks", None, ticket.result, unknown)
            for key, tier in zip(keys, tiers, strict=True):
                (self._results.absent if tier is None else self._results.present).add(key)

    def _note_stored(self, key: Key) -> None:
        """A tier has a chunk. Remember what to delete when the tiers are cleared."""
        self._results.stored.add(key)
        self._results.absent.discard(key)
        name = self._name(key)
        self._stored[name] = key
        self._stored.move_to_end(name)
        if len(self._stored) > min(_MAX_STORED, self._room / self._pool.row_bytes):
            self._stored.popitem(last=False)

    def _note_evicted(self, name: Key) -> None:
        """The host tier has no room for a chunk any more; unless others have it, none has it."""
        if len(self._stack) or name not in self._stored:
            return
        key = self._stored.pop(name)
        told = key in self._results.stored
        (self._results.refused if told else self._results.absent).add(key)
        self._results.stored.discard(key)

    def _name(self, key: Key) -> Key:
        return hashlib.sha256(self._namespace + key).digest()
