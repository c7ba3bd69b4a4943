"""How many tokens of a prompt have KV that other prompts left: what a run expects of its caches."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from picbench.engines.algorithms import Reuse
from picbench.errors import ConfigError, InvalidRun
from picbench.run.arm import Arm
from picbench.store.records import ArmBatch, SampleRow, Tally
from picbench.store.summary import CacheSummary, DecayWindow, percentiles, ttft_ratio
from picbench.workloads.sample import Sample, SampleSegment

_Tokens = tuple[int, ...]

#: A chunk in another document is another chunk, as in `WorkloadFacts`.
_Chunk = tuple[_Tokens, _Tokens]


class SeenKv:
    """The KV that prompts leave in a cache which never evicts anything.

    An arm that reuses chunks finds those that it had before, one that reuses prefixes the whole
    blocks of `block` tokens that some earlier prompt began with.
    """

    def __init__(self, reuse: Reuse, block: int) -> None:
        self._reuse = reuse
        self._block = block
        self._chunks: set[_Chunk] = set()
        self._prefixes: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Note a prompt that was served."""
        if self._reuse is Reuse.CHUNKS:
            self._chunks.update(map(_content, sample.chunks))
        elif self._reuse is Reuse.PREFIX:
            self._prefixes.update(self._blocks(sample.tokens))

    def find(self, sample: Sample) -> int:
        """Tokens of a prompt that the cache has, or has as soon as it is computed once.

        The second kind are chunks that the prompt itself repeats. An engine always computes a
        prompt's last token, so that a prefix ends before it.
        """
        if self._reuse is Reuse.CHUNKS:
            return self._find_chunks(sample)
        if self._reuse is Reuse.PREFIX:
            return self._find_prefix(sample)
        return 0

    def _find_chunks(self, sample: Sample) -> int:
        here: set[_Chunk] = set()
        found = 0
        for chunk in map(_content, sample.chunks):
            if chunk in self._chunks or chunk in here:
                found += len(chunk[1])
            here.add(chunk)
        return found

    def _find_prefix(self, sample: Sample) -> int:
        found = 0
        for prefix in self._blocks(sample.tokens[:-1]):
            if prefix not in self._prefixes:
                break
            found += self._block
        return found

    def _blocks(self, tokens: _Tokens) -> Iterator[int]:
        """A hash of each beginning of whole blocks, the shortest first."""
        prefix = 0
        for end in range(self._block, len(tokens) + 1, self._block):
            prefix = hash((prefix, tokens[end - self._block : end]))
            yield prefix


def count_shared(samples: Sequence[Sample], reuse: Reuse) -> list[int]:
    """Tokens of each prompt that it can at most have from others that are served at the same time.

    These are the beginning that it has in common with another one and, where chunks are reused,
    what its chunks have in common with those of the others from their beginnings on, and chunks
    that it repeats. The order in which an engine serves them is not known, so that all count.
    """
    if reuse is Reuse.NOTHING:
        return [0] * len(samples)
    prompts = _Beginnings([sample.tokens for sample in samples])
    shared = [prompts.longest(sample.tokens) for sample in samples]
    if reuse is Reuse.PREFIX:
        return shared
    # A chunk that only its own prompt repeats is computed there once.
    beginnings = _Beginnings([tokens for sample in samples for tokens in _distinct(sample)])
    return [
        _count_in_chunks(sample, lead, beginnings)
        for sample, lead in zip(samples, shared, strict=True)
    ]


def _distinct(sample: Sample) -> set[_Tokens]:
    return {chunk.tokens for chunk in sample.chunks}


def _count_in_chunks(sample: Sample, lead: int, beginnings: "_Beginnings") -> int:
    """Tokens of a prompt in its first `lead`, or in chunks at places that others have as well."""
    here: set[_Tokens] = set()
    start = total = 0
    for segment in sample.segments:
        tokens = segment.tokens
        found = max(0, min(lead - start, len(tokens)))
        if segment.kind == "chunk":
            known = len(tokens) if tokens in here else beginnings.longest(tokens)
            found = max(found, known)
            here.add(tokens)
        start += len(tokens)
        total += found
    return total


class _Beginnings:
    """Finds what sequences have in common with others from their beginnings on."""

    def __init__(self, sequences: Sequence[_Tokens]) -> None:
        self._times = Counter(sequences)
        self._sorted = sorted(self._times)

    def longest(self, tokens: _Tokens) -> int:
        """The longest beginning in common with another one of the sequences.

        That is all of it where the sequence is there more than once. Of the others, those next to
        it in sorted order have most in common with it.
        """
        if self._times[tokens] > 1:
            return len(tokens)
        place = bisect_left(self._sorted, tokens)
        near = (*self._sorted[max(0, place - 1) : place], *self._sorted[place + 1 : place + 2])
        return max((_in_common(tokens, other) for other in near), default=0)


def _in_common(first: _Tokens, second: _Tokens) -> int:
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def _content(chunk: SampleSegment) -> _Chunk:
    return chunk.context, chunk.tokens


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
    """Raise ConfigError if these requests cannot be measured in that state."""
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


#: Windows of a steady stream, so that each has a fifth of it: 40 requests or more.
WINDOWS = 5


def summarise_cache(
    state: CacheState | None, reuse: Reuse, tally: Tally, full: Sequence[SampleRow]
) -> CacheSummary | None:
    """The summary of an arm's cache, None without a declared state.

    `full` are the rows of the arm that the windows of a steady stream are compared with.
    """
    if state is None:
        return None
    answered = [row for row in tally.rows if row.error is None]
    return CacheSummary(
        expected_tokens=sum(row.expected_reuse or 0 for row in answered),
        found_tokens=sum(found(row) for row in answered),
        missed_requests=sum(missed(row, reuse) for row in answered) if state == "warm" else None,
        evicted_blocks=dict(tally.evicted),
        decay=_windows(tally.rows, full) if state == "steady" else (),
    )


def _windows(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> tuple[DecayWindow, ...]:
    """The windows of the stream, each over all repeats of it."""
    repeats = Counter(row.repeat for row in rows)
    streams = [[row for row in rows if row.repeat == repeat] for repeat in repeats]
    length = max(repeats.values(), default=0)
    ends = [length * number // WINDOWS for number in range(WINDOWS + 1)]
    return tuple(
        _window([row for stream in streams for row in stream[first:end]], first, full)
        for first, end in pairwise(ends)
    )


def _window(rows: Sequence[SampleRow], first: int, full: Sequence[SampleRow]) -> DecayWindow:
    answered = [row for row in rows if row.error is None]
    timed = [row for row in answered if row.timed]
    return DecayWindow(
        first=first,
        requests=len(rows),
        ttft_ms=percentiles(row.ttft_ms for row in timed),
        ttft_vs_full=ttft_ratio(timed, full),
        prompt_tokens=sum(row.tokens.prompt for row in answered),
        expected_tokens=sum(row.expected_reuse or 0 for row in answered),
        found_tokens=sum(found(row) for row in answered),
    )
