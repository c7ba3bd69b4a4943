"""The tiers of an engine, nearest first, called in the background."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from picbench.engines.chunk_cache.tiers.envelope import (
    HEADER_BYTES,
    enclose,
    payload_bytes,
    seal,
    stamp,
)
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters, GuardedTier
from picbench.engines.chunk_cache.tiers.tier import Key, Payload

T = TypeVar("T")

Group = Sequence[int]

#: Seconds that an erasure waits for what is under way.
_SETTLES = 5.0


class Ticket(Generic[T]):
    """The answers to a batch, later; what is in no group or was dropped is answered `nothing`.

    `groups` have indices, and the answers at these, in that order.
    """

    def __init__(
        self, size: int, nothing: T, groups: Sequence[tuple[Group, Future[list[T]]]]
    ) -> None:
        self._size = size
        self._nothing = nothing
        self._groups = groups

    def done(self) -> bool:
        """Whether `result` would return at once; never blocks."""
        return all(future.done() for _, future in self._groups)

    def result(self, timeout: float | None = None) -> list[T]:
        """The answers, in order; TimeoutError if they take longer than `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        answers = [self._nothing] * self._size
        for group, future in self._groups:
            left = None if end is None else max(0.0, end - time.monotonic())
            with suppress(CancelledError):
                for index, answer in zip(group, future.result(left), strict=False):
                    answers[index] = answer
        return answers


class EraseWork(Ticket[None]):
    """A deletion that begins once what was under way `before` has ended; asking moves it on.

    The names of tiers that failed, which `begin` adds to its list, are told in the end.
    """

    def __init__(
        self,
        before: Sequence[Any],
        begin: Callable[[list[str]], Ticket[None]],
        tell: Callable[[list[str]], None],
    ) -> None:
        super().__init__(0, None, ())
        self._before, self._begin, self._tell = before, begin, tell
        self._failed: list[str] = []
        self._begun: Ticket[None] | None = None

    def done(self) -> bool:
        """Whether it has ended, which is told again then; never blocks."""
        if self._begun is None and all(task.ended for task in self._before):
            self._begun = self._begin(self._failed)
        ended = self._begun is not None and self._begun.done()
        if ended:
            self._tell(self._failed)
        return ended


class BackgroundPool:
    """A thread pool for one kind of work, which can be drained.

    Work must end by itself: a process that exits waits for what has begun.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = Lock()
        self._pending: set[Future[Any]] = set()
        self._closed = False

    def run(
        self,
        size: int,
        nothing: T,
        groups: Sequence[Group],
        work: Callable[[Group], list[T]],
        after: Callable[[Group], None] = lambda group: None,
    ) -> Ticket[T]:
        """A ticket of `size` answers; `work` returns those of a group of indices, in its order.

        `after` is called once for each group, when its work has ended or was dropped.
        """
        return Ticket(size, nothing, [self._submit(group, work, after) for group in groups])

    def settle(self, timeout: float) -> bool:
        """Wait for what is pending now; whether all has ended."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout).not_done

    def drain(self, timeout: float) -> bool:
        """Take no more work, wait for what is pending, drop the rest; whether all has ended."""
        with self._lock:
            self._closed = True
        ended = self.settle(timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return ended

    def _submit(
        self, group: Group, work: Callable[[Group], list[T]], after: Callable[[Group], None]
    ) -> tuple[Group, Future[list[T]]]:
        with self._lock:
            future = _dropped() if self._closed else self._pool.submit(work, group)
            self._pending.add(future)
        future.add_done_callback(lambda _: after(group))
        future.add_done_callback(self._forget)
        return group, future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


class Budget:
    """A number of bytes that may be in flight; what is larger than all of it is in flight alone."""

    def __init__(self, limit: int) -> None:
        self._lock = Lock()
        self._limit = self._left = limit

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` if so many are left; False otherwise."""
        with self._lock:
            enough = nbytes <= self._left or self._left == self._limit
            self._left -= nbytes if enough else 0
            return enough

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += nbytes


def _dropped() -> Future[Any]:
    future: Future[Any] = Future()
    future.cancel()
    return future


def group_by_size(sizes: Sequence[int], limit: int, indices: Sequence[int]) -> Sequence[Group]:
    """Split indices, in order, into groups of at most `limit` bytes; larger ones are alone."""
    groups: list[list[int]] = []
    filled = 0
    for index in indices:
        if not groups or filled + sizes[index] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += sizes[index]
    return groups


Sealed = tuple[Key, memoryview]


@dataclass(frozen=True, slots=True)
class StackLimits:
    """Bounds of what is in flight.

    `store_bytes`: sealed bytes that wait to be stored or are being stored; beyond it `store`
    refuses. `call_bytes`: what one call to a tier moves at most, a single larger value excepted,
    so that a deadline means the same for every batch. `threads`: for fetches, and as many for
    stores; with `call_bytes` they bound what fetches hold in flight, and further ones wait.
    """

    store_bytes: int = 256 << 20
    call_bytes: int = 64 << 20
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Fetched:
    """A payload and the tier that had it.

    `data` is read-only, of the length that was asked for, and valid for as long as it is held; from
    a host tier it is a view of the tier's own (pinned) memory.
    """

    data: memoryview
    tier: str


class TierStack:
    """Tiers from the nearest to the farthest; calls return tickets at once.

    May be used from any thread. Lookups, fetches and stores have threads of their own, so that none
    waits for a transfer of another kind. No failure of a tier raises: at worst every answer is "not
    there". Keys must cover all that a payload depends on: model, dtype, layout, tenant.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        limits: StackLimits | None = None,
        secret: bytes = b"",
    ) -> None:
        self._tiers, self._secret = tuple(tiers), secret
        self._limits = limits or StackLimits()
        self._budget = Budget(self._limits.store_bytes)
        self._lookups = BackgroundPool("tier-lookup", 1)
        self._fetches = BackgroundPool("tier-fetch", self._limits.threads)
        self._stores = BackgroundPool("tier-store", self._limits.threads)
        self._deletions = BackgroundPool("tier-delete", 1)

    def __len__(self) -> int:
        """The number of tiers."""
        return len(self._tiers)

    def lookup(self, keys: Sequence[Key]) -> Ticket[str | None]:
        """Per key the name of the nearest tier that claims to hold the value, None if none does."""
        groups = [range(len(keys))] if keys and self._tiers else []
        return self._lookups.run(len(keys), None, groups, lambda _: self._find(keys))

    def fetch(self, wanted: Sequence[tuple[Key, int]]) -> Ticket[Fetched | None]:
        """Payloads by key and length in bytes, each from the nearest tier that has it intact.

        None for what is nowhere. What a farther tier had is then copied into the nearest one.
        """
        sizes = [HEADER_BYTES + length for _, length in wanted]
        asked = range(len(wanted)) if self._tiers else ()
        groups = group_by_size(sizes, self._limits.call_bytes, asked)
        return self._fetches.run(
            len(wanted), None, groups, lambda group: self._read([wanted[i] for i in group])
        )

    def store(
        self, items: Sequence[tuple[Key, Payload]], *, copy: bool = True
    ) -> Ticket[tuple[str, ...]]:
        """Write payloads through to every tier; per item the names of those that then hold it.

        With `copy`, payloads are copied before this returns, and the buffers may be reused at
        once. Without, nothing is copied in the caller's thread, and the buffers must stay as they
        are until the ticket is done. What exceeds `store_bytes` in flight is refused: its answer
        is ().
        """
        sizes = [HEADER_BYTES + payload_bytes(payload) for _, payload in items]
        accepted = [i for i, size in enumerate(sizes) if self._tiers and self._budget.take(size)]
        sealings = {i: _sealing(*items[i], self._secret, copy=copy) for i in accepted}
        return self._stores.run(
            len(items),
            (),
            group_by_size(sizes, self._limits.call_bytes, accepted),
            lambda group: self._write([sealings.pop(i)() for i in group]),
            after=lambda group: self._budget.give(sum(sizes[i] for i in group)),
        )

    def delete(self, keys: Sequence[Key], failed: list[str] | None = None) -> Ticket[None]:
        """Delete values from every tier, also those on their way; `failed` gets names of tiers."""
        groups = [range(len(keys))] if keys and self._tiers else []
        told = [] if failed is None else failed
        return self._deletions.run(len(keys), None, groups, lambda _: self._delete(keys, told))

    def counters(self) -> dict[str, Counters]:
        """What each tier has done, by name; makes no call."""
        return {tier.name: tier.counters() for tier in self._tiers}

    def close(self, timeout: float = 5.0) -> bool:
        """Finish or drop what is pending in `timeout` s, close the tiers; whether all ended."""
        end = time.monotonic() + timeout
        # Fetches hand work to stores.
        pools = (self._deletions, self._lookups, self._fetches, self._stores)
        drained = [pool.drain(max(0.0, end - time.monotonic())) for pool in pools]
        for tier in self._tiers:
            tier.close()
        return all(drained)

    def _find(self, keys: Sequence[Key]) -> list[str | None]:
        names: list[str | None] = [None] * len(keys)
        for tier in self._tiers:
            left = [i for i, name in enumerate(names) if name is None]
            for i, there in zip(left, tier.exists([keys[i] for i in left]), strict=True):
                names[i] = tier.name if there else None
        return names

    def _read(self, wanted: Sequence[tuple[Key, int]]) -> list[Fetched | None]:
        found: list[Fetched | None] = [None] * len(wanted)
        for tier in self._tiers:
            left = [i for i, answer in enumerate(found) if answer is None]
            values = _right_length(tier, [wanted[i] for i in left])
            for i, sealed in zip(left, values, strict=True):
                if sealed is not None:
                    found[i] = Fetched(sealed[HEADER_BYTES:], tier.name)
                    self._promote(tier, (wanted[i][0], sealed))
        return found

    def _promote(self, holder: GuardedTier, value: Sealed) -> None:
        """Copy what `holder` had into the nearest tier, unless too much is in flight."""
        nearest, nbytes = self._tiers[0], value[1].nbytes
        if holder is not nearest and self._budget.take(nbytes):
            self._stores.run(
                1,
                False,
                [[0]],
                lambda _: nearest.put([value]),
                after=lambda _: self._budget.give(nbytes),
            )

    def _write(self, values: Sequence[Sealed]) -> list[tuple[str, ...]]:
        kept = [_write_to(tier, values) for tier in self._tiers]
        names = [tier.name for tier in self._tiers]
        return [
            tuple(name for name, row in zip(names, kept, strict=True) if row[i])
            for i in range(len(values))
        ]

    def _delete(self, keys: Sequence[Key], failed: list[str]) -> list[None]:
        # A fetch copies what it found into the nearest tier, by a store.
        settled = [pool.settle(_SETTLES) for pool in (self._fetches, self._stores)]
        failed += [t.name for t in self._tiers if not (t.delete(keys) and all(settled))]
        return [None] * len(keys)


def _sealing(key: Key, payload: Payload, secret: bytes, *, copy: bool) -> Callable[[], Sealed]:
    """A function that seals a payload; with `copy` the payload is copied now."""
    if not copy:
        return lambda: (key, seal(key, payload, secret))
    enclosed = enclose(payload)
    return lambda: (key, stamp(key, enclosed, secret))


def _right_length(tier: GuardedTier, wanted: Sequence[tuple[Key, int]]) -> list[memoryview | None]:
    """Sealed values from a tier; those of another length are discarded as corrupt."""
    values = tier.get([key for key, _ in wanted])
    wrong = {
        key
        for (key, length), sealed in zip(wanted, values, strict=True)
        if sealed is not None and sealed.nbytes != HEADER_BYTES + length
    }
    tier.discard(list(wrong))
    return [
        None if key in wrong else sealed for (key, _), sealed in zip(wanted, values, strict=True)
    ]


def _write_to(tier: GuardedTier, values: Sequence[Sealed]) -> list[bool]:
    """Which values a tier holds afterwards.

    Far tiers are first asked what they lack, since most of what leaves HBM came from them. An
    immediate one is not: it copies fast, and a write marks the value as its most recent.
    """
    if tier.immediate:
        return tier.put(values)
    needed = tier.needs([key for key, _ in values])
    missing = [i for i, needs in enumerate(needed) if needs]
    held = [not needs for needs in needed]
    for i, kept in zip(missing, tier.put([values[i] for i in missing]), strict=True):
        held[i] = kept
    return held
