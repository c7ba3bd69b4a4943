"""The cache state that a run declares: what it asks of requests, and how it is verified.

cold    every arm's cache is dropped before each group. A group has as many requests as are in
        flight at a time, so that all of them begin together: what they share with each other is
        allowed, what earlier groups left is not.
warm    every distinct chunk is served once before anything is measured. From then on a request that
        has to compute a chunk again makes the run invalid, unless the arm's pool has evicted some.
steady  a stream of prompts that all differ, on caches that are never dropped.

Without a declared state caches begin empty, or with preloaded chunks, and are kept.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from picbench.arms.arm import Arm
from picbench.engines.algorithms import Reuse
from picbench.errors import ConfigError, InvalidRun
from picbench.output.sample_row import SampleRow
from picbench.run.caches.seen_kv import SeenKv, count_shared
from picbench.run.protocol import ArmBatch
from picbench.workloads.sample import Sample

CacheState = Literal["cold", "warm", "steady"]

#: Different prompts that a steady stream has at least. CacheBlend's gain was seen to go within 60
#: to 90 queries (LMCache/LMCache#4663), so that a shorter stream may end before it shows.
NOVEL = 200

#: Kinds of idle blocks, which hold KV of requests that have ended.
_IDLE = ("prefix_idle", "chunk_idle")


def check_declared(
    state: CacheState | None,
    samples: Sequence[Sample],
    *,
    arrivals: Sequence[float] | None,
    preload: Sequence[Sample],
) -> None:
    """ConfigError where these requests cannot be measured in that state."""
    if state == "cold" and arrivals is not None:
        raise ConfigError(
            "`cache=cold`: requests that arrive on their own overlap, and each finds what others "
            "left",
            hint="leave `rate` out, and draw request files without arrivals",
        )
    if state == "cold" and preload:
        raise ConfigError(
            f"`cache=cold`: the request file has {len(preload)} chunks to preload",
            hint="use `cache=warm`, or draw requests without preloaded chunks",
        )
    if state == "warm" and not any(sample.chunks for sample in samples):
        raise ConfigError(
            "`cache=warm`: the requests have no chunks to fill a cache with",
            hint="use another `dataset`",
        )
    novel = len({sample.tokens for sample in samples})
    if state == "steady" and novel < NOVEL:
        raise ConfigError(
            f"`cache=steady`: {novel} different prompts are too few for a steady stream, which "
            f"needs {NOVEL}",
            hint="raise `limit`, or take a `dataset` with more rows",
        )


def fill_requests(samples: Sequence[Sample]) -> list[Sample]:
    """A request for each distinct chunk: the first text of its prompt, the chunk, the last text.

    Whole prompts are not served: prefix caching would then know the measured ones to their ends,
    which is what makes warm benchmarks of it worthless. The texts are there for algorithms that
    compile a chunk after the first one, or treat a chunk at the end of a prompt as a question.
    """
    requests: dict[object, Sample] = {}
    for sample in samples:
        first, last = sample.segments[0], sample.segments[-1]
        head = (first,) if first.kind == "text" else ()
        tail = (last,) if last.kind == "text" and len(sample.segments) > 1 else ()
        for chunk in sample.chunks:
            key = (tuple(text.tokens for text in head), chunk.context, chunk.tokens)
            if key not in requests:
                name = f"fill-{len(requests)}"
                segments = (*head, chunk, *tail)
                requests[key] = Sample(name, sample.dataset, segments, (), max_tokens=1)
    return list(requests.values())


class DeclaredCache:
    """Expects and verifies the reuse of a run's requests; `blocks` are tokens of a block, by arm.

    Every batch that an arm serves is to be passed to `expect` once, in order, also one that is only
    served again to bring caches to where they were.
    """

    def __init__(
        self, state: CacheState | None, arms: Collection[Arm], blocks: Mapping[str, int]
    ) -> None:
        self._state = state
        self._blocks = blocks
        self._reuse = {arm.name: arm.reuse for arm in arms}
        self._seen = {arm.name: SeenKv(arm.reuse, blocks[arm.name]) for arm in arms}
        self._evicted: dict[str, Counter[str]] = {arm.name: Counter() for arm in arms}

    def note_fill(self, arm: str, samples: Sequence[Sample], evicted: Mapping[str, int]) -> None:
        """Note what an arm served before anything was measured, and the blocks evicted by it."""
        for sample in samples:
            self._seen[arm].add(sample)
        self._evicted[arm].update(evicted)

    def begin(self, arm: str) -> None:
        """The arm's cache was dropped, to begin anew."""
        self._seen[arm] = SeenKv(self._reuse[arm], self._blocks[arm])
        self._evicted[arm].clear()

    def expect(self, batch: ArmBatch) -> list[int | None]:
        """Tokens of each prompt that a cache in the declared state has; None without a state.

        In a cold one these are at most what requests of the batch share. In a warm one they are
        what the fill left, and in a steady one what all earlier requests did.
        """
        self._evicted[batch.arm].update(batch.result.evicted)
        if self._state is None:
            return [None] * len(batch.samples)
        if self._state == "cold":
            return [*count_shared(batch.samples, self._reuse[batch.arm])]
        seen = self._seen[batch.arm]
        expected: list[int | None] = []
        for sample in batch.samples:
            expected.append(seen.find(sample))
            if self._state == "steady":
                seen.add(sample)
        return expected

    def check(self, batch: ArmBatch, rows: Sequence[SampleRow]) -> None:
        """Raise InvalidRun where a batch was not served in the declared state.

        Rows that ran apart from their group found what its first attempt left, and are passed.
        """
        if batch.lost is not None:
            return
        if self._state == "cold":
            _check_empty(batch)
        for row in rows:
            if row.error is not None or not row.timed:
                continue
            if self._state == "cold":
                _check_cold(row)
            elif self._state == "warm" and missed(row, self._reuse[batch.arm]):
                self._check_evicted(row)

    def _check_evicted(self, row: SampleRow) -> None:
        """A miss is explained where the arm's pool has evicted blocks of what it reuses."""
        kind = "chunk" if self._reuse[row.arm] is Reuse.CHUNKS else "prefix"
        if not self._evicted[row.arm][kind]:
            raise InvalidRun(
                f"arm {row.arm}, sample {row.sample}: the cache is not warm: "
                f"{found(row)} of {row.expected_reuse} expected tokens were found, and nothing "
                "was evicted",
                hint="report this with the run directory",
            )


def found(row: SampleRow) -> int:
    """Tokens that a request found in the cache: reused, and not compiled for it."""
    return max(0, (row.tokens.reused or 0) - row.tokens.compiled)


def missed(row: SampleRow, reuse: Reuse) -> bool:
    """Whether a request found less in its arm's cache than the fill left there.

    Chunk KV that is missing is compiled for the request and then counts as reused, so that it is
    the compiled tokens that tell; linked ones are recomputed in any case.
    """
    if reuse is Reuse.NOTHING or not row.expected_reuse:
        return False
    if reuse is Reuse.CHUNKS:
        tokens = row.tokens
        return tokens.compiled > 0 or (tokens.reused or 0) + tokens.linked == 0
    return (row.tokens.reused or 0) < row.expected_reuse


def _check_empty(batch: ArmBatch) -> None:
    """The pool after the first step has no KV that no request holds: nothing has ended yet."""
    snapshots = batch.result.snapshots
    idle = sum(snapshots[0].blocks[kind] for kind in _IDLE) if snapshots else 0
    if idle:
        raise InvalidRun(
            f"arm {batch.arm}, round {batch.round}: the cache is not cold: it was dropped, and "
            f"{idle:g} blocks of earlier requests are in the pool",
            hint="report this with the run directory",
        )


def _check_cold(row: SampleRow) -> None:
    shared = row.expected_reuse or 0
    if found(row) > shared:
        raise InvalidRun(
            f"arm {row.arm}, sample {row.sample}: the cache is not cold: {found(row)} tokens were "
            f"found in it, where requests of the same group share at most {shared}",
            hint="empty tiers that outlive the engine, or leave `tiers` out",
        )
