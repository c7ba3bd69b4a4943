"""The chunk store: one record for each chunk that the scheduler has any information about.

The linker and its jobs call the primitives in this order:

    lookup()             on arrival: look up in the tiers the chunks that nothing is known of
    is_mappable()        before a step: may a request map the chunk, or copy it (`is_copyable`)?
    prepare_compile()    if not: a request of the linker's own compiles it, or `prepare_fetch()`
    complete_compile()   that request has finished or was given up, or `complete_fetch()`
    touch()              a request that uses the chunks was scheduled
    complete_transfers() the tiers' results: lookups, stores and lost chunks
    release_stored()     before a step: free the pages of chunks that were compiled to be stored
    pin(), unpin()       keep a chunk in the pool
    evict()              the pool reuses the block of a page
    drop()               forget an idle chunk
    erase()              forget all chunks of a text, in use or not
    reconcile()          forget pages that left the pool without an eviction: after a fault
    reset_pool()         the pool, or with `reset_tiers()` the tiers, were emptied

Chunk and prefix KV share one pool and one order of eviction, the pool's least-recently-used queue
of blocks without references. A chunk moves to the end of it as a whole, so that neither kind of
traffic can starve the other. When the pool evicts one page of an idle chunk, the chunk is not
resident any more, and its other pages are the next to be evicted. Referenced blocks stay.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from picbench.engines.chunk_cache.chunk_record import (
    ChunkRecord,
    ChunkState,
    PagePool,
    content_of,
)
from picbench.engines.chunk_cache.transfers import StoreCommand, TransferCommands, TransferResults
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical

_LOG = logging.getLogger(__name__)

#: At most this many chunks are remembered that are only in tiers.
_MAX_RECORDS = 1 << 15

#: What became of so many compiled chunks counts; of earlier ones it counts half.
_RECENT = 256

#: At most this many evicted chunks are remembered to tell them from new ones.
_MAX_EVICTED = 1 << 12

#: A chunk that was lost this often counts as missing for this many seconds.
_MAX_LOSSES, _BAN_S = 2, 60.0


class ChunkStore:
    """The chunks of one scheduler: looked up, used, pinned and evicted as a whole.

                lookup            present              fetch
        UNKNOWN ------> LOOKUP ------------> REMOTE ----------> FETCHING ---+
           |              | absent             ^ stored                     |
           |              v      compile       |            refused         v
           |           MISSING --------+    STORING -------------------> RESIDENT
           | compile                   v       ^ for copies                 ^
           +----------------------> COMPILING -+----------------------------+

    A chunk that is evicted or lost, or whose compile or fetch is given up, returns to what is known
    of the tiers. Without `tiers` nothing is stored. With `shared_tiers`, other engines may have
    stored chunks, so unknown ones are looked up; otherwise an unknown chunk is a missing one.

    Knowledge of the tiers may be out of date: a load that fails says so, and the chunk counts as
    missing. A chunk that is lost repeatedly counts as missing for a while whatever the tiers say,
    so that a tier that takes values and returns none does not keep a request waiting for ever.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        tiers: bool,
        shared_tiers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared_tiers = shared_tiers
        self.clock = clock
        self.commands = TransferCommands()
        #: Numbers of erasures that workers have done, with the tiers that failed.
        self.erased: dict[int, list[str]] = {}
        #: Whether steps are needed to erase what was forgotten.
        self.erases: Callable[[], bool] = lambda: False
        self._pool = pool
        self._tiers = tiers
        self._pending = 0
        self._records: OrderedDict[Key, ChunkRecord] = OrderedDict()
        # Indices of the records: resident and pinned ones, oldest first, and those of each page.
        self._resident: dict[Key, ChunkRecord] = {}
        self.pinned: dict[Key, ChunkRecord] = {}
        self._owners: dict[Key, set[Key]] = {}
        # Pages that are being compiled, by number of chunks, and pages to be freed, by chunk.
        self._unfinished: Counter[Key] = Counter()
        self._leaving: dict[Key, Sequence[Key]] = {}
        self._evicted: OrderedDict[Key, None] = OrderedDict()
        #: Chunks that began to be compiled, by why.
        self.compiles = Counter(new=0, evicted=0, lost=0)
        self.forget_uses()

    def __len__(self) -> int:
        return len(self._resident)

    def __iter__(self) -> Iterator[ChunkRecord]:
        """The resident chunks."""
        return iter(self._resident.values())

    def records(self) -> Iterable[ChunkRecord]:
        """What is known of all chunks, resident or not."""
        return self._records.values()

    def get(self, key: Key) -> ChunkRecord:
        """The record of a chunk; that of an unknown one is not kept."""
        return self._records.get(key) or ChunkRecord(key)

    def tiers_of(self, key: Key) -> ChunkState:
        """What is known of the tiers: REMOTE, MISSING, LOOKUP or UNKNOWN."""
        tiers = self.get(key).tiers
        missing = tiers is ChunkState.UNKNOWN and not self.shared_tiers
        return ChunkState.MISSING if missing else tiers

    def is_remote(self, key: Key) -> bool:
        """Whether a tier has a chunk, as far as is known."""
        return self.tiers_of(key) is ChunkState.REMOTE

    def forget_uses(self) -> None:
        """Other traffic comes from now on: the share that is kept begins anew."""
        # Of chunks of late: those that a second request used, those that were evicted before.
        self._used_again = self._wasted = 0

    @property
    def kept_share(self) -> float:
        """The share of chunks that are used again before they are evicted; with tiers all are."""
        return (1 + self._used_again) / (1 + self._used_again + self._wasted)

    @property
    def pages(self) -> int:
        """Pages of chunks in the pool, each once."""
        return len(self._owners)

    def lookup(self, canonicals: Iterable[Canonical]) -> None:
        """Look up in the tiers the chunks that nothing is known of."""
        for canonical in canonicals:
            key = canonical.key
            unknown = self.tiers_of(key) is ChunkState.UNKNOWN and self.get(key).owner is None
            if unknown and not self.is_mappable(canonical):
                self._described(canonical)
                self._learn([key], ChunkState.LOOKUP)
                self.commands.lookups.append(key)

    def is_mappable(self, canonical: Canonical) -> bool:
        """Whether a request may map a chunk in the next step: its blocks are in the pool.

        Blocks of a compile that runs in the same step count: a layer writes all KV first.
        """
        record = self._resident.get(canonical.key)
        if record is not None and len(record.pages) == record.size:
            return True
        return canonical.resident(self._pool.resident)

    def is_copyable(self, canonical: Canonical) -> bool:
        """Whether a chunk can be copied from the pool: its blocks were computed before."""
        return self.is_mappable(canonical) and not any(map(self._is_unfinished, canonical.keys))

    def prepare_compile(self, canonical: Canonical, owner: str) -> None:
        """The request `owner` is going to compute a missing chunk."""
        record = self._described(canonical)
        record.enter(ChunkState.COMPILING)
        evicted = "evicted" if canonical.key in self._evicted else "new"
        record.missed = "lost" if record.losses else evicted
        self.compiles[record.missed] += 1
        if record.tiers is ChunkState.MISSING:
            # It is looked up again when it is needed after it was evicted.
            record.tiers = ChunkState.UNKNOWN
        record.owner = owner
        self._unfinished.update(_names(canonical))

    def complete_compile(
        self, canonical: Canonical, blocks: tuple[int, ...], *, success: bool, shared: bool
    ) -> None:
        """The owner's request ended; `blocks` are those of the anchor and the chunk.

        The chunk is resident if it is `shared`, or else if no tier takes it. Again, this does no
        harm.
        """
        record = self._record(canonical.key)
        if record.owner is not None:
            self._finish_pages(_names(canonical))
        record.owner = None
        if success and self._tiers:
            blocks = blocks[canonical.anchor.blocks :]
            self.commands.stores.append(StoreCommand(record.key, blocks))
        if success and self._tiers and not shared:
            record.storing = canonical
        elif success:
            self._add(record, canonical)
        self._settle(record)

    def prepare_fetch(self, canonical: Canonical, owner: str) -> None:
        """The tiers are going to load a remote chunk into blocks of the request `owner`."""
        record = self._records[canonical.key]
        record.enter(ChunkState.FETCHING)
        record.owner = owner

    def complete_fetch(self, canonical: Canonical, *, success: bool) -> None:
        """The owner's request ended. Done again after an exception, it does no harm."""
        record = self._record(canonical.key)
        record.owner = None
        if success:
            self._add(record, canonical)
        self._settle(record)

    def touch(self, canonicals: Iterable[Canonical]) -> None:
        """A request uses chunks: the pages that it does not map are refreshed like the others.

        A page that a chunk lost and another chunk brought back belongs to both.
        """
        now = self.clock()
        for canonical in canonicals:
            record = self._resident.get(canonical.key)
            if record is not None:
                record.hits += 1
                if record.hits == 2:
                    self._used_again += 1
                    if self._used_again + self._wasted > _RECENT:
                        self._used_again, self._wasted = self._used_again // 2, self._wasted // 2
                record.last_use = now
                if len(record.pages) < record.size:
                    names = filter(self._pool.resident, _names(canonical))
                    self._own(record, [n for n in names if not self._is_unfinished(n)])
                self._pool.refresh(canonical.unused)

    def complete_transfers(self, results: TransferResults) -> None:
        """Apply the results of lookups, stores and loads."""
        self._pending = results.pending
        self.erased |= results.erased
        for key in results.lost:
            record = self._record(key)
            record.losses, record.lost_at = record.losses + 1, self.clock()
        found = results.present | results.stored
        banned = set[Key]()
        for record in map(self._record, found):
            if self.clock() - record.lost_at > _BAN_S:
                record.losses = 0
            if record.losses >= _MAX_LOSSES:
                banned.add(record.key)
        self._learn(found - banned, ChunkState.REMOTE)
        # Where only this engine stores, what is not known to be there is missing.
        missing = ChunkState.MISSING if self.shared_tiers else ChunkState.UNKNOWN
        self._learn(results.absent | results.lost | banned, missing)
        for key in results.stored | results.refused:
            self._complete_store(key)

    def release_stored(self) -> None:
        """Free the pages of chunks that were compiled for copies and are in a tier by now."""
        for key, names in list(self._leaving.items()):
            self._pool.discard(name for name in names if name not in self._owners)
            if not any(map(self._pool.in_use, names)):
                del self._leaving[key]

    def pin(self, key: Key) -> bool:
        """Keep a chunk in the pool; False if it is not resident as a whole."""
        record = self.get(key)
        if not record.whole:
            return False
        if key not in self.pinned:
            held = map(self._pool.hold, record.pages)
            record.pins = tuple(block for block in held if block is not None)
            self.pinned[key] = record
        return True

    def unpin(self, key: Key) -> None:
        """Let a chunk be evicted again."""
        record = self.pinned.pop(key, None)
        if record is not None:
            blocks, record.pins = record.pins, ()
            self._pool.release(list(blocks))
            self._settle(record)

    def unpin_for(self, need: int) -> None:
        """Unpin chunks, oldest pin first, until a request of `need` blocks can run."""
        while self.pinned and need > self._pool.usable - len(self.pinned_blocks()):
            key = next(iter(self.pinned))
            _LOG.warning("unpinned chunk %s: a request needs its blocks", self.pinned[key].name)
            self.unpin(key)

    def pinned_blocks(self) -> list[Any]:
        """The blocks that pins reference, each once."""
        pins = (block for record in self.pinned.values() for block in record.pins)
        return list({block.block_id: block for block in pins}.values())

    def evict(self, page: Key) -> None:
        """The pool reuses a page's block: evict every chunk that is not whole without it.

        A chunk in use keeps referenced blocks; it only loses a page that no request maps.
        """
        for key in tuple(self._owners.get(page, ())):
            record = self._resident[key]
            if self._in_use(record):
                record.pages = tuple(p for p in record.pages if p != page)
                self._owners[page].discard(key)
            else:
                self._store_evicted(record)
                self._wasted += record.hits == 1 and not self._tiers
                self._remove(record)
                self._evicted[key] = None
                self._evicted.move_to_end(key)
                if len(self._evicted) > _MAX_EVICTED:
                    self._evicted.popitem(last=False)
        if not self._owners.get(page, True):
            del self._owners[page]

    def drop(self, key: Key) -> bool:
        """Forget an idle chunk; False if it is in use or not resident."""
        record = self.get(key)
        if not record.size or self._in_use(record):
            return False
        self._remove(record)
        return True

    def erase(self, contents: Collection[bytes]) -> tuple[set[Key], set[Key]]:
        """Forget chunks with these contents; their keys, and the names of their pages.

        Pages that another chunk has, too, are not among them. What is on its way arrives.
        """
        found = [record for record in self._records.values() if record.content in contents]
        keys = {record.key for record in found}
        stores = self.commands.stores
        self.commands.stores = [store for store in stores if store.key not in keys]
        names = set[Key]()
        for record in found:
            self.unpin(record.key)
            self._evicted.pop(record.key, None)
            names.update(record.pages, self._leaving.pop(record.key, ()))
            names.update(_names(record.storing) if record.storing else ())
            record.storing = None
            if record.size:
                self._remove(record)
            self._forget_tiers(record)
        return keys, names - self._owners.keys()

    def blocks_of(self, key: Key) -> tuple[int, ...]:
        """The blocks of a chunk's pages, in order; none if it is not resident as a whole."""
        record = self.get(key)
        whole = record.whole and all(map(self._pool.resident, record.pages))
        return tuple(map(self._pool.block_id, record.pages)) if whole else ()

    def reconcile(self, canonicals: Iterable[Canonical]) -> None:
        """Compare what is known of chunks with the pool, and forget pages that are not in it."""
        for canonical in canonicals:
            for page in self.get(canonical.key).pages:
                if not self._pool.resident(page):
                    self.evict(page)

    def reset_pool(self) -> None:
        """The pool was emptied: what steps have not read of it by now is not stored.

        vLLM may have slept, or have loaded other weights, before the next step runs.
        """
        self._owners.clear()
        stores, self.commands.stores = self.commands.stores, []
        for record in [self.get(store.key) for store in stores]:
            record.storing = None
            self._settle(record)
        for record in list(self._resident.values()):
            self._leave_pool(record)

    def reset_tiers(self) -> None:
        """Delete what this engine stored in tiers."""
        self.commands.clear = self._tiers
        for record in list(self._records.values()):
            self._forget_tiers(record)

    def has_pending_work(self) -> bool:
        """Whether commands are unsent or transfers under way."""
        return bool(self.commands or self._pending) or self.erases()

    @property
    def idle(self) -> bool:
        """Whether no chunk is on its way into the pool or the tiers."""
        busy = any(record.owner or record.storing for record in self._records.values())
        return not busy and not self.has_pending_work()

    def _record(self, key: Key) -> ChunkRecord:
        return self._records.setdefault(key, ChunkRecord(key))

    def _described(self, canonical: Canonical) -> ChunkRecord:
        record = self._record(canonical.key)
        record.content = record.content or content_of(canonical)
        record.tokens = sum(page.real for page in canonical.pages)
        return record

    def _settle(self, record: ChunkRecord) -> None:
        """Enter the state of a chunk that is not on its way; forget it if nothing is known."""
        if record.owner is not None:
            return
        if record.size:
            record.enter(ChunkState.RESIDENT)
        elif record.storing is not None:
            record.enter(ChunkState.STORING)
        else:
            record.enter(record.tiers)
            if record.tiers is ChunkState.UNKNOWN and not record.losses and not record.pins:
                self._records.pop(record.key, None)

    def _learn(self, keys: Iterable[Key], tiers: ChunkState) -> None:
        """Note what is known of the tiers; the chunks noted longest ago are forgotten first.

        Tiers that others share are asked again. A host tier says itself what it evicted.
        """
        for key in keys:
            record = self._record(key)
            record.tiers = tiers
            self._records.move_to_end(key)
            self._settle(record)
        room = _MAX_RECORDS + len(self._resident) if self.shared_tiers else len(self._records)
        for key in list(islice(self._records, max(0, len(self._records) - room))):
            self._records.move_to_end(key)
            self._forget_tiers(self._records[key])

    def _forget_tiers(self, record: ChunkRecord) -> None:
        record.tiers, record.losses = ChunkState.UNKNOWN, 0
        self._settle(record)

    def _complete_store(self, key: Key) -> None:
        """A chunk compiled for copies leaves the pool if a tier took it, else it is resident."""
        record = self.get(key)
        if record.storing is None:
            return
        canonical, record.storing = record.storing, None
        if record.tiers is ChunkState.REMOTE:
            self._leaving[key] = _names(canonical)
        elif all(map(self._pool.resident, _names(canonical))):
            # Nothing held its pages while the tiers decided: some may have been evicted, also those
            # that the request for which it was compiled does not need.
            self._add(record, canonical)
        self._settle(record)

    def _add(self, record: ChunkRecord, canonical: Canonical) -> None:
        self._resident.setdefault(record.key, record)
        record.size = len(canonical.pages)
        record.last_use = self.clock()
        self._own(record, _names(canonical))

    def _finish_pages(self, names: Iterable[Key]) -> None:
        """One chunk less has these pages compiled; all the others' stay as they are."""
        for name in names:
            left = self._unfinished[name] - 1
            if left > 0:
                self._unfinished[name] = left
            else:
                self._unfinished.pop(name, None)

    def _is_unfinished(self, page: Key) -> bool:
        """Whether a page is only now being computed.

        The compile of another chunk that begins alike maps a page that a resident chunk owns, and
        computes nothing of it. Were such a page unfinished, two chunks that begin alike could be
        compiled for ever, each because of the other's compile, where steps are scheduled ahead.
        """
        return bool(self._unfinished.get(page)) and page not in self._owners

    def _in_use(self, record: ChunkRecord) -> bool:
        """Whether a request maps a chunk; a page shared with another chunk does not tell."""
        own = [page for page in record.pages if len(self._owners[page]) == 1]
        return any(map(self._pool.in_use, own or record.pages))

    def _store_evicted(self, record: ChunkRecord) -> None:
        """Store a whole chunk whose blocks hold its KV until the step runs."""
        stores = self._tiers and record.tiers is not ChunkState.REMOTE
        if stores and record.whole and all(map(self._pool.resident, record.pages)):
            blocks = tuple(map(self._pool.block_id, record.pages))
            self.commands.stores.append(StoreCommand(record.key, blocks))

    def _remove(self, record: ChunkRecord) -> None:
        pages = record.pages
        for page in pages:
            self._owners[page].discard(record.key)
            if not self._owners[page]:
                del self._owners[page]
        self._leave_pool(record)
        self._pool.discard([page for page in pages if page not in self._owners])

    def _leave_pool(self, record: ChunkRecord) -> None:
        del self._resident[record.key]
        record.pages, record.size, record.hits = (), 0, 0
        self._settle(record)

    def _own(self, record: ChunkRecord, pages: Iterable[Key]) -> None:
        record.pages = tuple(pages)
        for page in record.pages:
            self._owners.setdefault(page, set()).add(record.key)


def _names(canonical: Canonical) -> list[Key]:
    return [page.name for page in canonical.pages]
