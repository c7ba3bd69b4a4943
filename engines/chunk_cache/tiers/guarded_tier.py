"""One tier with a deadline, a circuit breaker, checksums and counters."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from threading import BoundedSemaphore, Lock, Thread
from typing import TypeVar

from picbench.engines.chunk_cache.tiers.envelope import unseal
from picbench.engines.chunk_cache.tiers.tier import Buffer, Key, Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses during an outage in seconds: `first`, doubled after each failed probe to `longest`."""

    first: float = 0.5
    longest: float = 30.0

    def pause(self, failures: int) -> float:
        """The pause after so many failures in a row, one or more."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 32))


class Breaker:
    """A circuit breaker: closed, open after a failure, half-open for one probe after a pause."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._open_until = 0.0
        self._probing = False

    @property
    def failing(self) -> bool:
        """Whether there is an outage."""
        with self._lock:
            return self._failures > 0

    def admit(self) -> bool:
        """Whether a call may be made now; its outcome must be reported: `succeed` or `fail`."""
        with self._lock:
            if not self._failures:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeed(self) -> bool:
        """Report an answer; returns whether it ends an outage."""
        with self._lock:
            recovered = self._failures > 0
            self._failures = 0
            self._probing = False
            return recovered

    def fail(self) -> bool:
        """Report a failure; returns whether it begins an outage."""
        with self._lock:
            if self._failures and not self._probing:
                return False  # the call began before the outage did and is not a probe
            self._failures += 1
            self._probing = False
            self._open_until = self._clock() + self._backoff.pause(self._failures)
            return self._failures == 1


class Timebox:
    """Runs calls with deadlines on daemon threads, one a call, at most `limit` at a time.

    A call that outlives its deadline keeps its thread until it returns, and its result is dropped.
    With `limit` such calls, further ones wait for a thread until their own deadline. Unlike an
    executor's threads, daemon threads do not keep the process from exiting. Starting one takes tens
    of microseconds, little compared with a transfer.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._free = BoundedSemaphore(limit)

    def run(self, call: Callable[[], T], deadline: float) -> T:
        """What `call` returns or raises; TimeoutError after `deadline` seconds."""
        end = time.monotonic() + deadline
        if not self._free.acquire(timeout=deadline):
            raise TimeoutError(f"all threads of {self._name} are stuck")
        future: Future[T] = Future()
        thread = Thread(target=self._call, args=(call, future), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._free.release()
            raise
        return future.result(max(0.0, end - time.monotonic()))

    def _call(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._free.release()
            future.set_exception(error)
        else:
            self._free.release()
            future.set_result(result)


#: How many keys that reads did not find are remembered.
_REMEMBERED = 4096

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a tier has done. Values are counted one by one, errors and timeouts by the call.

    `corrupt` values count as misses, too; `skipped` ones were not asked for because the tier was
    failing. `bytes_read` and `bytes_written` are of sealed values that arrived and were kept.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    errors: int = 0
    timeouts: int = 0
    corrupt: int = 0
    skipped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def failures(self) -> int:
        """Errors, time-outs and broken values, each of which also counted as a miss."""
        return self.errors + self.timeouts + self.corrupt


class GuardedTier:
    """A tier whose calls never raise, never outlast a deadline and only return intact values.

    A call that fails is answered as if the tier held nothing and kept nothing. The first failure
    begins an outage: one warning, then no calls but a probe after each pause, until one succeeds.
    A write that fails (a full disk, a read-only replica) begins an outage of writes alone: what the
    tier has is still read.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        deadline: float = 2.0,
        backoff: Backoff | None = None,
        threads: int = 8,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = tier.name
        self.immediate = tier.immediate
        self._tier = tier
        self._deadline = deadline
        self._secret = secret
        self._reads = Breaker(backoff or Backoff(), clock)
        self._writes = Breaker(backoff or Backoff(), clock)
        self._timebox = Timebox(f"tier {tier.name}", threads)
        self._lock = Lock()
        self._said_full = False
        self._unread: OrderedDict[Key, None] = OrderedDict()
        self._counts = dict.fromkeys((field.name for field in fields(Counters)), 0)

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the tier says that it holds a value, per key."""
        return self._ask_each(lambda: self._tier.exists(keys), [False] * len(keys))

    def needs(self, keys: Sequence[Key]) -> list[bool]:
        """Whether a value should be written, per key: it is not there, or a read did not find it.

        The second case covers tiers that claim values which they cannot return.
        """
        held = self.exists(keys)
        with self._lock:
            return [not h or key in self._unread for key, h in zip(keys, held, strict=True)]

    def put(self, items: Sequence[tuple[Key, memoryview]]) -> list[bool]:
        """Keep sealed values; whether each was kept."""
        kept = self._ask_each(lambda: self._tier.put(items), [False] * len(items), writes=True)
        sizes = [value.nbytes for (_, value), stays in zip(items, kept, strict=True) if stays]
        self._count(stored=len(sizes), refused=len(kept) - len(sizes), bytes_written=sum(sizes))
        with self._lock:
            for (key, _), stays in zip(items, kept, strict=True):
                if stays:
                    self._unread.pop(key, None)
        failing = self._reads.failing or self._writes.failing
        if not (all(kept) or failing or self._said_full):
            self._said_full = True
            text = "tier %s is full: it does not keep what is written (said once, see `refused`)"
            _LOG.warning(text, self.name)
        return kept

    def get(self, keys: Sequence[Key]) -> list[memoryview | None]:
        """Intact sealed values, None per key that has none."""
        nothing: list[Buffer | None] = [None] * len(keys)
        found, own = self._ask_each(lambda: self._tier.get(keys), nothing), self._secret
        values = [
            None if v is None or unseal(k, v, own) is None else memoryview(v).toreadonly().cast("B")
            for k, v in zip(keys, found, strict=True)
        ]
        sizes = [value.nbytes for value in values if value is not None]
        self._count(hits=len(sizes), misses=len(keys) - len(sizes), bytes_read=sum(sizes))
        self._note_unread([k for k, value in zip(keys, values, strict=True) if value is None])
        self.discard(
            [k for k, f, v in zip(keys, found, values, strict=True) if f is not None and v is None]
        )
        return values

    def discard(self, corrupt: Sequence[Key]) -> None:
        """Delete corrupt values and count them."""
        if not corrupt:
            return
        with self._lock:
            first = not self._counts["corrupt"]
            self._counts["corrupt"] += len(corrupt)
        if first:
            _LOG.warning(
                "tier %s returned a value that is not what was stored under its key; such values "
                "are deleted and recomputed (said once, see the counter 'corrupt')",
                self.name,
            )
        self.delete(corrupt)

    def delete(self, keys: Sequence[Key]) -> bool:
        """Delete values; whether the tier answers."""

        def delete() -> bool:
            self._tier.delete(keys)
            return True

        self._note_unread(keys)
        return self._ask(delete, False, writes=True)

    def counters(self) -> Counters:
        """What the tier has done so far; makes no call."""
        with self._lock:
            return Counters(**self._counts)

    def close(self) -> None:
        """Close the tier, if it answers in time."""
        self._ask(self._tier.close, None)

    def _ask_each(
        self, call: Callable[[], list[T]], unknown: list[T], *, writes: bool = False
    ) -> list[T]:
        """The tier's answer to a batch; `unknown` where there is none of the right length."""

        def checked() -> list[T]:
            answer = call()
            if len(answer) != len(unknown):
                raise ValueError(f"{len(answer)} answers to {len(unknown)} questions")
            return answer

        return self._ask(checked, unknown, writes=writes) if unknown else []

    def _ask(self, call: Callable[[], T], unknown: T, *, writes: bool = False) -> T:
        """The tier's answer within the deadline; `unknown` if there is none."""
        # While the whole tier fails, a write is a probe like any other call.
        breaker = self._writes if writes and not self._reads.failing else self._reads
        if not breaker.admit():
            self._count(skipped=len(unknown) if isinstance(unknown, list) else 1)
            return unknown
        try:
            answer = call() if self.immediate else self._timebox.run(call, self._deadline)
        except TimeoutError as error:
            self._fail(breaker, f"no answer in {self._deadline:g} s ({error})", timeouts=1)
        except Exception as error:
            self._fail(breaker, f"{type(error).__name__}: {error}", errors=1)
        else:
            if breaker.succeed():
                writes = breaker is self._writes
                again = "can be written to again" if writes else "answers again"
                _LOG.info("tier %s %s", self.name, again)
            return answer
        return unknown

    def _fail(self, breaker: Breaker, reason: str, **amounts: int) -> None:
        self._count(**amounts)
        if not breaker.fail():
            return
        message = (
            "tier %s fails: %s. Requests go on without it, and it is tried again after "
            "pauses. Start or repair it, or take it out of `tiers`"
        )
        if breaker is self._writes:
            message = (
                "tier %s cannot be written to: %s. What it has is still read, and writes are tried "
                "again after pauses. Free or repair it, or take it out of `tiers`"
            )
        _LOG.warning(message, self.name, reason)

    def _note_unread(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                self._unread[key] = None
                self._unread.move_to_end(key)
            while len(self._unread) > _REMEMBERED:
                self._unread.popitem(last=False)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount
