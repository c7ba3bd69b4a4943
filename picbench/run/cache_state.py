"""How many tokens of a prompt have KV that other prompts left: what a run expects of its caches."""

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from picbench.engines.algorithms import Reuse, parse
from picbench.errors import ConfigError, InvalidRun
from picbench.run.arm import Arm
from picbench.run.workload import Workload
from picbench.store.records import ArmBatch, SampleRow, Tally
from picbench.store.summary import CacheSummary, DecayWindow, percentiles, ttft_ratio
from picbench.workloads.sample import Sample

#: Different prompts that a steady stream has at least. CacheBlend's gain was seen to go within 60
#: to 90 queries (LMCache/LMCache#4663), so that a shorter stream may end before it shows.
NOVEL = 200

#: Windows of a steady stream, so that each has a fifth of it: 40 requests or more.
WINDOWS = 5

_Tokens = tuple[int, ...]


class SeenKv:
    """The KV that prompts leave in a cache which never evicts anything.

    An arm that reuses chunks finds those that it had before, one that reuses prefixes the whole
    blocks of `block` tokens that some earlier prompt began with.
    """

    def __init__(self, reuse: Reuse, block: int) -> None:
        self._reuse = reuse
        self._block = block
        # A chunk in another document is another chunk, as in `WorkloadFacts`.
        self._chunks: set[tuple[_Tokens, _Tokens]] = set()
        self._prefixes: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Note a prompt that was served."""
        if self._reuse is Reuse.CHUNKS:
            self._chunks.update((chunk.context, chunk.tokens) for chunk in sample.chunks)
        elif self._reuse is Reuse.PREFIX:
            self._prefixes.update(self._blocks(sample.tokens))

    def find(self, sample: Sample) -> int:
        """Tokens of a prompt that the cache has, or has as soon as it is computed once.

        The second kind are chunks that the prompt itself repeats. An engine always computes a
        prompt's last token, so that a prefix ends before it.
        """
        found = 0
        if self._reuse is Reuse.CHUNKS:
            here: set[tuple[_Tokens, _Tokens]] = set()
            for chunk in sample.chunks:
                content = chunk.context, chunk.tokens
                if content in self._chunks or content in here:
                    found += len(chunk.tokens)
                here.add(content)
        elif self._reuse is Reuse.PREFIX:
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
    leads = _in_common(sample.tokens for sample in samples)
    if reuse is Reuse.PREFIX:
        return [leads[sample.tokens] for sample in samples]
    # A chunk that only its own prompt repeats is computed there once.
    distinct = ({chunk.tokens for chunk in sample.chunks} for sample in samples)
    known = _in_common(tokens for chunks in distinct for tokens in chunks)
    totals = []
    for sample in samples:
        here: set[_Tokens] = set()
        start = total = 0
        for segment in sample.segments:
            tokens = segment.tokens
            found = max(0, min(leads[sample.tokens] - start, len(tokens)))
            if segment.kind == "chunk":
                found = max(found, len(tokens) if tokens in here else known[tokens])
                here.add(tokens)
            start += len(tokens)
            total += found
        totals.append(total)
    return totals


def _in_common(sequences: Iterable[_Tokens]) -> dict[_Tokens, int]:
    """The longest beginning that each sequence has in common with another one of them.

    That is all of it where it is there more than once. Of the others, those next to it in sorted
    order have most in common with it.
    """
    times = Counter(sequences)
    longest = {tokens: len(tokens) if count > 1 else 0 for tokens, count in times.items()}
    for pair in pairwise(sorted(times)):
        for tokens in pair:
            longest[tokens] = max(longest[tokens], _lead(*pair))
    return longest


def _lead(one: _Tokens, other: _Tokens) -> int:
    """How many tokens two prompts have in common from their beginnings on."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def found_no_chunk(arm: Arm, workload: Workload, tally: Tally, share: float | None) -> bool:
    """Whether a server that is to reuse chunks found no more of prompts than known beginnings.

    False where no prompt has a chunk from elsewhere. Where no row says what was reused, it is the
    `share` of prompts that the server counts by itself, None if it does not.
    """
    if arm.endpoint is None or parse(arm.endpoint.algo or "full").reuse is not Reuse.CHUNKS:
        return False
    samples = {sample.id: sample for sample in workload.samples}
    sent: list[tuple[Sample, SampleRow | None]] = [(sample, None) for sample in workload.preload]
    sent += [(samples[row.sample], row) for row in tally.rows]
    chunks, known = SeenKv(Reuse.CHUNKS, 1), list[_Tokens]()
    missed, told, prompts, leads = False, False, 0, 0
    for sample, row in sent:
        at = bisect(known, sample.tokens)
        # Of all before it, those next to it in sorted order have most in common with it.
        near = known[max(0, at - 1) : at + 1]
        lead = max((_lead(sample.tokens, other) for other in near), default=0)
        if row is not None and row.error is None:
            if chunks.find(sample) > lead:
                missed = True
                if (row.tokens.reused or 0) > lead:
                    return False
            told |= row.tokens.reused is not None
            prompts, leads = prompts + sample.prompt_tokens, leads + lead
        chunks.add(sample)
        known.insert(at, sample.tokens)
    return missed and (told or (share or 0.0) * prompts <= leads)


def check_declared(
    state: str | None,
    samples: Sequence[Sample],
    *,
    arrivals: Sequence[float] | None,
    preload: Sequence[Sample],
) -> None:
    """Raise ConfigError if these requests cannot be measured in that state."""
    novel = len({sample.tokens for sample in samples})
    for problem, what, hint in (
        (
            state == "cold" and arrivals is not None,
            "requests that arrive on their own overlap, and each finds what others left",
            "leave `rate` out, and draw request files without arrivals",
        ),
        (
            state == "cold" and preload,
            f"the request file has {len(preload)} chunks to preload",
            "use `cache=warm`, or draw requests without preloaded chunks",
        ),
        (
            state == "warm" and not any(sample.chunks for sample in samples),
            "the requests have no chunks to fill a cache with",
            "use another `dataset`",
        ),
        (
            state == "steady" and novel < NOVEL,
            f"{novel} different prompts are too few for a steady stream, which needs {NOVEL}",
            "raise `limit`, or take a `dataset` with more rows",
        ),
    ):
        if problem:
            raise ConfigError(f"`cache={state}`: {what}", hint=hint)


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

    def __init__(self, state: str | None, arms: Collection[Arm], blocks: Mapping[str, int]) -> None:
        self._state, self._blocks = state, blocks
        self._reuse = {arm.name: arm.reuse for arm in arms}
        self._seen: dict[str, SeenKv] = {}
        self._evicted: dict[str, Counter[str]] = {}
        for arm in arms:
            self.begin(arm.name)

    def begin(self, arm: str) -> None:
        """The arm's cache is empty, to begin anew."""
        self._seen[arm] = SeenKv(self._reuse[arm], self._blocks[arm])
        self._evicted[arm] = Counter()

    def note_fill(self, arm: str, samples: Sequence[Sample], evicted: Mapping[str, int]) -> None:
        """Note what an arm served before anything was measured, and the blocks evicted by it."""
        for sample in samples:
            self._seen[arm].add(sample)
        self._evicted[arm].update(evicted)

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

        After the first step of a cold one nothing has ended, so that the pool has no KV that no
        request holds. In a warm one a miss is explained where the arm's pool has evicted blocks of
        what it reuses. Rows that ran apart from their group found what its first attempt left, and
        are passed.
        """
        if batch.lost is not None or self._state not in ("cold", "warm"):
            return
        reuse = self._reuse[batch.arm]
        where = f"arm {batch.arm}"
        report = "report this with the run directory"
        if self._state == "cold" and batch.result.snapshots:
            blocks = batch.result.snapshots[0].blocks
            if idle := blocks["prefix_idle"] + blocks["chunk_idle"]:
                raise InvalidRun(
                    f"{where}, round {batch.round}: the cache is not cold: it was dropped, and "
                    f"{idle:g} blocks of earlier requests are in the pool",
                    hint=report,
                )
        evicted = self._evicted[batch.arm]["chunk" if reuse is Reuse.CHUNKS else "prefix"]
        for row in rows:
            if row.error is not None or not row.timed:
                continue
            if self._state == "cold" and found(row) > (row.expected_reuse or 0):
                raise InvalidRun(
                    f"{where}, sample {row.sample}: the cache is not cold: {found(row)} tokens "
                    "were found in it, where requests of the same group share at most "
                    f"{row.expected_reuse or 0}",
                    hint="empty tiers that outlive the engine, or leave `tiers` out",
                )
            if self._state == "warm" and missed(row, reuse) and not evicted:
                raise InvalidRun(
                    f"{where}, sample {row.sample}: the cache is not warm: {found(row)} of "
                    f"{row.expected_reuse} expected tokens were found, and nothing was evicted",
                    hint=report,
                )


def found(row: SampleRow) -> int:
    """Tokens that a request found in the cache."""
    return row.tokens.reused or 0


def missed(row: SampleRow, reuse: Reuse) -> bool:
    """Whether a request found less in its arm's cache than the fill left there.

    Chunk KV that is missing is compiled for the request, so compile work tells; linked ones are
    recomputed in any case. Chunks that were served as text were not looked for.
    """
    if reuse is Reuse.NOTHING or not row.expected_reuse:
        return False
    if reuse is Reuse.CHUNKS:
        tokens = row.tokens
        nothing = (tokens.reused or 0) + tokens.linked == 0
        return tokens.compile_work > 0 or (nothing and not (row.choice and row.choice.texts))
    return (row.tokens.reused or 0) < row.expected_reuse


def summarise_cache(
    state: str | None, reuse: Reuse, tally: Tally, full: Sequence[SampleRow]
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
        decay=tuple(_windows(tally.rows, full)) if state == "steady" else (),
    )


def _windows(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> Iterator[DecayWindow]:
    """The windows of the stream, each over all repeats of it."""
    repeats = Counter(row.repeat for row in rows)
    streams = [[row for row in rows if row.repeat == repeat] for repeat in repeats]
    length = max(repeats.values(), default=0)
    for first, end in pairwise(length * number // WINDOWS for number in range(WINDOWS + 1)):
        sent = [row for stream in streams for row in stream[first:end]]
        answered = [row for row in sent if row.error is None]
        timed = [row for row in answered if row.timed]
        yield DecayWindow(
            first=first,
            requests=len(sent),
            ttft_ms=percentiles(row.ttft_ms for row in timed),
            ttft_vs_full=ttft_ratio(timed, full),
            prompt_tokens=sum(row.tokens.prompt for row in answered),
            expected_tokens=sum(row.expected_reuse or 0 for row in answered),
            found_tokens=sum(found(row) for row in answered),
        )
