"""What is cached of documents: listed, and erased by their ids.

A document's chunks are those of prompts that name it (`RequestArgs.names`), and all others of the
same tokens, of whatever tenant and algorithm. They are forgotten at once, with all computed blocks,
since these depend on what was before them. Requests go on with the blocks that they have. What they
leave is erased again when all that were under way have ended. Engines that share a redis tell each
other what to erase: one that a document was never sent to knows its chunks from there.
"""

import hashlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from picbench.engines.chunk_cache.chunk_record import content_of
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.tiers.backends.redis import Redis
from picbench.engines.chunk_cache.tiers.tier import TierSpec, pageable
from picbench.engines.chunk_cache.transfers import Erasure
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical
from picbench.engines.vllm.frontend.request_args import parsed_args
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.pool import Pool

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: At most so many documents are remembered, the last ones, and so many chunks listed.
_MAX_DOCUMENTS, _LISTED = 1 << 16, 10_000

#: Seconds after which engines look whether others have erased anything.
_POLL_S = 0.2

#: A chunk of a document: the digest of its tokens, and its key, and the length of both.
Entry = tuple[bytes, Key]
_CONTENT, _ENTRY = 16, 49


class ErasureLog:
    """What engines of one redis tell each other of documents, by a thread that waits for redis.

    Whatever there is to erase is passed to `receive`: chunks, and for a `number` tiers that failed.
    """

    def __init__(
        self,
        tiers: Sequence[Redis],
        receive: Callable[[set[Entry], int | None, list[str]], None],
    ) -> None:
        self._tiers: dict[Redis, bytes | None] = dict.fromkeys(tiers)
        self._receive = receive
        self._own: set[bytes] = set()
        self._asked = SimpleQueue[tuple[str, set[Entry], int | None] | None]()
        Thread(target=self._run, name="erasures", daemon=True).start()

    def ask(self, document: str, entries: set[Entry], number: int | None = None) -> None:
        """Have chunks noted of a document, or with the `number` of an erasure have it erased."""
        self._asked.put((document, entries, number))

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _run(self) -> None:
        while True:
            with suppress(Empty):
                asked = self._asked.get(timeout=_POLL_S)
                if asked is None:
                    return
                self._tell(*asked)
            self._poll()

    def _tell(self, document: str, entries: set[Entry], number: int | None) -> None:
        every, failed = {content + key for content, key in entries}, list[str]()
        name = hashlib.sha256(document.encode()).digest()
        for tier in self._tiers:
            try:
                if number is None:
                    tier.note(name, every)
                else:
                    entry, chunks = tier.erase(name, every)
                    self._own.add(entry)
                    every |= chunks
            except Exception:
                failed.append(tier.name)
        if number is not None:
            self._receive(_entries(b"".join(every)), number, failed)

    def _poll(self) -> None:
        for tier, after in self._tiers.items():
            # The worker's own calls tell of outages.
            with suppress(Exception):
                told = dict(tier.erased(after))
                self._tiers[tier] = max(told, default=after)
                others = b"".join(told[entry] for entry in told.keys() - self._own)
                self._own -= told.keys()
                if others:
                    self._receive(_entries(others), None, [])


def _entries(joined: bytes) -> set[Entry]:
    every = (joined[i : i + _ENTRY] for i in range(0, len(joined), _ENTRY))
    return {(entry[:_CONTENT], entry[_CONTENT:]) for entry in every}


class Erasures:
    """The documents of one scheduler; `alive` are its requests, `tiers` those that it stores in."""

    def __init__(
        self,
        store: ChunkStore,
        pool: Pool,
        linker: Linker,
        alive: Callable[[], Collection[str]],
        tiers: Sequence[TierSpec],
    ) -> None:
        self._store, self._pool, self._linker, self._alive = store, pool, linker, alive
        self._tiers = " or ".join(spec.text for spec in tiers)
        self._documents: OrderedDict[str, set[Entry]] = OrderedDict()
        self._numbers = count()
        self._answers: dict[int, tuple[Future[Any], str, set[Entry], int, list[str]]] = {}
        # Requests that have to end, and what is erased again then.
        self._later: list[tuple[set[str], set[Entry]]] = []
        # What the log has received, and what has the engine look at it.
        self._received: deque[tuple[set[Entry], int | None, list[str]]] = deque()
        self.wake: Callable[[], None] = lambda: None
        shared = [Redis.open(spec, pageable) for spec in tiers if spec.kind == Redis.kind]
        self.log = ErasureLog(shared, self._receive) if shared else None
        store.erases = lambda: bool(self._later or store.erased or self._received)

    def note(self, request: "Request") -> None:
        """Note of which documents the chunks of a planned request are."""
        args, link = parsed_args(request), self._linker.link_of(request.request_id)
        if args is None or link is None or not args.names:
            return
        chunks = {canonical.key: canonical for canonical in link.plan.canonicals}
        for name, key in zip(args.names, link.keys_by_span(len(args.spans)), strict=True):
            if name is not None and key in chunks:
                self.name(name, chunks[key])

    def name(self, document: str, canonical: Canonical) -> None:
        """A chunk is one of a document's."""
        entry = content_of(canonical), canonical.key
        if self.log and entry not in self._documents.get(document, ()):
            self.log.ask(document, {entry})
        self._documents.setdefault(document, set()).add(entry)
        self._documents.move_to_end(document)
        if len(self._documents) > _MAX_DOCUMENTS:
            self._documents.popitem(last=False)

    def chunks(self) -> dict[str, Any]:
        """The chunks, the last used first, where they are, and how many are there."""
        documents = defaultdict[bytes, set[str]](set)
        for name, entries in self._documents.items():
            for content, _ in entries:
                documents[content].add(name)
        found, counts = list[dict[str, Any]](), Counter[str]()
        for record in sorted(self._store.records(), key=lambda record: -record.last_use):
            if not (record.size or self._store.is_remote(record.key)):
                continue
            tier = "pool" if record.size else self._tiers
            counts[tier] += 1
            size = {"tokens": record.tokens, "pinned": bool(record.pins)}
            names = sorted(documents.get(record.content, ()))
            about = {"key": record.name, "state": str(record.state), "tier": tier}
            found.append({**about, **size, "documents": names})
        return {"counts": dict(counts), "chunks": found[:_LISTED]}

    def erase(self, document: str) -> "Future[Any]":
        """Erase a document; answers with how many chunks went, and the tiers that failed."""
        number, answer = next(self._numbers), Future[Any]()
        entries = set(self._documents.get(document, ()))
        # Where others may know more of it, what they know is erased as soon as they have told.
        own = next(self._numbers) if self.log else number
        self._answers[number] = answer, document, entries, self._forget(entries, own), []
        if self.log:
            self.log.ask(document, entries, number)
        return answer

    def before_schedule(self) -> None:
        """Answer what workers have done, and erase again what ended requests have left."""
        while self._received:
            entries, told, silent = self._received.popleft()
            self._forget(entries, next(self._numbers) if told is None else told)
            if told in self._answers:
                self._answers[told][-1].extend(silent)
        while self._store.erased:
            number, failed = self._store.erased.popitem()
            if number in self._answers:
                answer, document, entries, chunks, silent = self._answers.pop(number)
                failed = sorted({*failed, *silent})
                if not failed and (left := self._documents.pop(document, set()) - entries):
                    self._documents[document] = left
                answer.set_result({"chunks": chunks, "failed": failed})
        waiting, self._later = self._later, []
        for users, entries in waiting:
            if users := users.intersection(self._alive()):
                self._later.append((users, entries))
            else:
                self._forget(entries, next(self._numbers), again=True)

    def _receive(self, entries: set[Entry], number: int | None, failed: list[str]) -> None:
        self._received.append((entries, number, failed))
        self.wake()

    def _forget(self, entries: set[Entry], number: int, *, again: bool = False) -> int:
        self._linker.release_held()
        keys, pages = self._store.erase({content for content, _ in entries})
        keys |= {key for _, key in entries}
        blocks = tuple(self._pool.erase(pages))
        self._store.commands.erasures.append(Erasure(number, tuple(keys), blocks))
        if not again and (users := set(self._alive())):
            self._later.append((users, entries))
        return len(keys)
