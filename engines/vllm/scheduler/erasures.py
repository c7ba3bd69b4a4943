"""What is cached of documents: listed, and erased by their ids.

A document's chunks are those of prompts that name it (`RequestArgs.names`), and all others of the
same tokens, of whatever tenant and algorithm. They are forgotten at once, with all computed blocks,
since these depend on what was before them. Requests go on with the blocks that they have. What they
leave is erased again when all that were under way have ended.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any

from picbench.engines.chunk_cache.chunk_record import content_of
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.tiers.tier import TierSpec
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

#: A chunk of a document: the digest of its tokens, and its key.
Entry = tuple[bytes, Key]


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
        self._answers: dict[int, tuple[Future[Any], str, set[Entry], int]] = {}
        # Requests that have to end, and what is erased again then.
        self._later: list[tuple[set[str], set[Entry]]] = []
        store.erases = lambda: bool(self._later or store.erased)

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
        self._documents.setdefault(document, set()).add((content_of(canonical), canonical.key))
        self._documents.move_to_end(document)
        if len(self._documents) > _MAX_DOCUMENTS:
            self._documents.popitem(last=False)

    def chunks(self) -> dict[str, Any]:
        """The chunks, the last used first, where they are, and how many are there."""
        documents = defaultdict[bytes, set[str]](set)
        for name, entries in self._documents.items():
            for content, _ in entries:
                documents[content].add(name)
        counts = Counter[str]()
        found, about = list[dict[str, Any]](), dict[str, Any]()
        for record in sorted(self._store.records(), key=lambda record: -record.last_use):
            remote = self._tiers if self._store.is_remote(record.key) else "none"
            tier = "pool" if record.size else remote
            counts[tier] += 1
            about = {"key": record.name, "state": str(record.state), "tokens": record.tokens}
            about |= {"tier": tier, "pinned": bool(record.pins)}
            about["documents"] = sorted(documents.get(record.content, ()))
            found.append(about)
        return {"counts": dict(counts), "chunks": found[:_LISTED]}

    def erase(self, document: str) -> "Future[Any]":
        """Erase a document; answers with how many chunks went, and the tiers that failed."""
        number, answer = next(self._numbers), Future[Any]()
        entries = set(self._documents.get(document, ()))
        self._answers[number] = answer, document, entries, self._forget(entries, number)
        return answer

    def before_schedule(self) -> None:
        """Answer what workers have done, and erase again what ended requests have left."""
        while self._store.erased:
            number, failed = self._store.erased.popitem()
            if number in self._answers:
                answer, document, entries, chunks = self._answers.pop(number)
                if not failed and (left := self._documents.pop(document, set()) - entries):
                    self._documents[document] = left
                answer.set_result({"chunks": chunks, "failed": sorted(failed)})
        waiting, self._later = self._later, []
        for users, entries in waiting:
            if users := users.intersection(self._alive()):
                self._later.append((users, entries))
            else:
                self._forget(entries, next(self._numbers), again=True)

    def _forget(self, entries: set[Entry], number: int, *, again: bool = False) -> int:
        self._linker.release_held()
        keys, pages = self._store.erase({content for content, _ in entries})
        keys |= {key for _, key in entries}
        blocks = tuple(self._pool.erase(pages))
        self._store.commands.erasures.append(Erasure(number, tuple(keys), blocks))
        if not again and (users := set(self._alive())):
            self._later.append((users, entries))
        return len(keys)
