"""The run protocol: interleaved rounds, or whole runs one after another; and how far a run is.

A round sends the same group of samples to every arm in turn, and the next round begins with the
next arm: whatever drifts (clock, temperature, neighbours) hits all arms alike, and only one arm
computes at a time. Within a group requests run in a closed loop.

Requests that arrive at times of their own (an open loop) cannot be cut into groups without
draining the queue that they build up. There each arm serves all of them, and then the next arm.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TextIO

from picbench.engines.algorithms import Auto, Reuse, of_chunks, parse
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.errors import EngineError, InvalidRun
from picbench.run.arm import Fleet
from picbench.run.cache_state import DeclaredCache, fill_requests
from picbench.run.job import Job
from picbench.store.records import (
    ArmBatch,
    Failure,
    GroupResult,
    SampleRow,
    answer_nats,
    compare_steps,
    failure_of,
    likeliest,
    to_rows,
)
from picbench.store.summary import BASELINE
from picbench.store.writer import StoredBatch
from picbench.workloads.facts import chunk_sets
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.sample import Sample

#: Log-probabilities of a token by which arms are compared with `full`: what vLLM gives at most.
TOP = 20

#: Groups are this many times as large as the concurrency, for the loop drains at a group's end.
DEPTH = 4


def schedule(
    samples: Sequence[Sample], arms: Sequence[str], size: int, repeats: int = 1, first: int = 0
) -> Iterator[tuple[int, str, Sequence[Sample]]]:
    """The rounds in the order of execution, groups of `size`, numbered through all repeats.

    In each round the next arm begins, in round 0 arm number `first` (modulo their number), so that
    over several runs none always does.
    """
    for number, start in enumerate([*range(0, len(samples), size)] * repeats):
        begin = (first + number) % len(arms)
        for arm in (*arms[begin:], *arms[:begin]):
            yield number, arm, samples[start : start + size]


def to_request(sample: Sample, algorithm: str | None = None) -> Request:
    """The request of a sample, by token ids alone, so that every arm sees the same ones.

    Without an `algorithm` it is the engine's own.
    """
    segments: list[Text | Chunk] = []
    for segment in sample.segments:
        if segment.kind == "text":
            segments.append(Text(tokens=segment.tokens))
        else:
            document = segment.context + segment.tokens if segment.before else None
            segments.append(Chunk(tokens=segment.tokens, document=document))
    return Request(segments, algorithm, max_tokens=sample.max_tokens)


def reorder(sample: Sample, index: ContextIndex) -> Sample:
    """The sample with each of its chunks once, in an order that earlier prompts began with.

    The `index` knows these, and learns this one. Texts stay where they are; chunks change places
    with those that they stand next to. First come the chunks of the longest sequence, in tokens,
    that followed the same beginning before; after them the others, the most used one first, then
    the one that was seen first. A sample whose chunks are consecutive text stays as it is.
    """
    items = [(s.kind == "chunk", s.tokens, len(s.tokens)) for s in sample.segments]
    if sample.ordered:
        index.note(items)
        return sample
    order = index.arrange(items)
    return replace(sample, segments=tuple(sample.segments[place] for place in order))


class Rounds:
    """Serves the rounds of a job, and brings the arms' caches into their state before.

    `declared` expects and verifies reuse, `sets` are the chunks of each sample.
    """

    def __init__(self, job: Job, fleet: Fleet, say: Callable[[str], object]) -> None:
        self._job, self._servers, self._say = job, fleet.servers, say
        workload = job.workload
        self.sets = chunk_sets(workload.samples)
        self._cold = job.config.cache == "cold"
        self._chunks = fill_requests(workload.samples) if job.config.cache == "warm" else []
        self._indexes = {arm.name: ContextIndex() for arm in job.arms if arm.reorders}
        self._bare = {arm.name for arm in job.arms if arm.bare}
        # Where chunks may be served as text, those that fill a cache have to be chunks.
        algorithms = ((arm.name, parse(arm.algorithm)) for arm in job.arms if not arm.endpoint)
        self._fills = {n: of_chunks(a).spec for n, a in algorithms if isinstance(a, Auto)}
        self._reusing = [arm.name for arm in job.arms if arm.reuse is not Reuse.NOTHING]
        sizes = {arm.name: fleet.engines[arm.name].get("block_size") for arm in job.arms}
        blocks = {a: size if isinstance(size, int) else BLOCK_SIZE for a, size in sizes.items()}
        self.declared = DeclaredCache(job.config.cache, job.arms, blocks)
        size, first = job.config.concurrency, 0
        if workload.arrivals is not None:
            # Any first arm that differs from run to run will do.
            size, first = len(workload.samples), int(job.fingerprint, 16)
        elif size > 1 and not self._cold:  # Requests of a cold group begin together.
            size *= DEPTH
        names = [arm.name for arm in job.arms]
        self._planned = list(schedule(workload.samples, names, size, job.config.repeats, first))
        self._per_repeat = -(-len(workload.samples) // size)

    def begin(self, stored: Sequence[StoredBatch]) -> tuple[int, int]:
        """Bring the caches of engines that have just started to where a run begins or was stopped.

        The `stored` batches are served again, unmeasured. Gives how many requests were, and how
        many got another reply this time. What engines reuse depends on all that they served before
        in this repeat, in the same order and groups, so that nothing less makes the requests that
        follow hit as in a run that was not stopped. In an open loop each arm begins without. Raises
        InvalidRun where a request now reuses other tokens than when it was measured: its engine is
        not in the state in which the run was stopped.
        """
        if not self._job.shared:  # Engines that arms share are filled at each arm's turn.
            if preload := self._job.workload.preload:
                self._say(f"preloading {len(preload)} chunks into each arm")
            if self._job.config.cache == "warm":
                into = f"{len(self._chunks)} chunks into each of {len(self._reusing)} arms"
                self._say(f"warming up: {into}")
            self._fill(self._servers)
        replayed = changed = 0
        if self._job.workload.arrivals is not None or not stored:
            return replayed, changed
        if not self._cold:
            self._say("serving stored requests again, unmeasured, to restore caches")
        first = len(stored) - len(stored) % (self._per_repeat * len(self._job.arms))
        for batch, (number, arm, given) in zip(stored[first:], self._planned[first:], strict=False):
            # Also where nothing is sent: what comes later depends on it.
            sent = self._rewrite(arm, given)
            if self._cold or arm not in self._reusing or batch.line.lost is not None:
                continue
            rows = self.rows(ArmBatch(number, arm, sent, self._send(arm, sent)))
            for before, now in zip(batch.rows, rows, strict=True):
                counters = [(row.error is None, row.tokens, row.hits) for row in (before, now)]
                if counters[0] != counters[1]:
                    raise InvalidRun(
                        f"arm {arm}, sample {now.sample}: served again, it reused "
                        f"{now.tokens.reused} tokens and not {before.tokens.reused} as when it was "
                        "measured, or other blocks",
                        hint="name a new `output` to measure again; tiers that outlive the engine "
                        "must be empty",
                    )
                replies = [(row.output_sha256, row.finish_reason) for row in (before, now)]
                changed += replies[0] != replies[1]
            replayed += len(rows)
        return replayed, changed

    def serve(self, done: int, lost: Mapping[str, str]) -> Iterator[ArmBatch]:
        """Serve all planned rounds but for the first `done`.

        An arm whose engine is gone fails its remaining requests; the others continue. `lost` says
        why engines were gone before.
        """
        gone, arrivals = dict(lost), self._job.workload.arrivals
        fidelity, served = self._job.scoring.fidelity, list[ArmBatch]()
        for number, arm, given in self._planned[done:]:
            sent = given
            if arm not in gone:
                try:
                    self._prepare(arm, number)
                    sent = self._rewrite(arm, given)
                    result = self._send(arm, sent, arrivals)
                    if golds := self._job.workload.golds:
                        result, known = self._force(arm, sent, result, golds, logprobs=1)
                        nats = {sample: answer_nats(reply) for sample, reply in known.items()}
                        result = replace(result, nlls=tuple(nats.get(s.id) for s in sent))
                        firsts = {sample: likeliest(reply) for sample, reply in known.items()}
                        result = replace(result, firsts=tuple(firsts.get(s.id) for s in sent))
                except EngineError as error:
                    gone[arm] = str(error)
            if arm in gone:
                failed = Failure(gone[arm])
                result = GroupResult((failed,) * len(sent), busy=0.0, clean=False)
            served.append(ArmBatch(number, arm, sent, result, arrivals, gone.get(arm)))
            if not fidelity or len(served) == len(self._job.arms):
                yield from self._compare_replies(served, gone) if fidelity else served
                served.clear()

    def rows(self, batch: ArmBatch) -> list[SampleRow]:
        """The rows of a batch that was just served; for each batch once."""
        rows = to_rows(batch, self._job.workload.grader, self.sets)
        expected = self.declared.expect(batch)
        repeat = batch.round // self._per_repeat
        return [
            replace(row, expected_reuse=tokens, repeat=repeat)
            for row, tokens in zip(rows, expected, strict=True)
        ]

    def _prepare(self, arm: str, number: int) -> None:
        """Bring an arm's cache into the state before a round. Raises EngineError if it is gone."""
        again = number % self._per_repeat == 0 and (number > 0 or self._job.shared)
        if self._cold or again:
            self._servers[arm].reset()
        if again:
            self.declared.begin(arm)
            if arm in self._indexes:
                self._indexes[arm] = ContextIndex()
            self._fill((arm,))

    def _fill(self, arms: Collection[str]) -> None:
        """Serve chunks ahead, unmeasured; an arm whose engine is gone reports it in its next batch.

        Raises InvalidRun for a chunk that fails, since the cache would not be as declared.
        """
        preload = self._job.workload.preload
        ahead: list[tuple[str, Sequence[Sample]]] = [
            (a, preload) for a in arms if a not in self._bare
        ]
        ahead += [(arm, self._chunks) for arm in arms if arm in self._reusing]
        for arm, samples in ahead:
            if not samples:
                continue
            try:
                sent = self._rewrite(arm, samples)
                result = self._send(arm, sent, algorithm=self._fills.get(arm))
            except EngineError:
                continue
            for sample, outcome in zip(samples, result.outcomes, strict=True):
                if error := failure_of(outcome):
                    raise InvalidRun(
                        f"arm {arm}: {sample.id} could not be preloaded: {error}",
                        hint="raise `kv_blocks`, or run without preloaded chunks",
                    )
            if samples is self._chunks:
                self.declared.note_fill(arm, samples, result.evicted)

    def _rewrite(self, arm: str, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What an arm is sent in place of some samples."""
        index = self._indexes.get(arm)
        if arm in self._bare:
            return [sample.without_chunks() for sample in samples]
        return samples if index is None else [reorder(sample, index) for sample in samples]

    def _compare_replies(
        self, served: Sequence[ArmBatch], gone: dict[str, str]
    ) -> Iterator[ArmBatch]:
        """A round's batches with the fidelity of each arm to the replies of `full`."""
        [full] = (batch for batch in served if batch.arm == BASELINE)
        replies = {
            sample.id: outcome.tokens
            for sample, outcome in zip(full.samples, full.result.outcomes, strict=True)
            if isinstance(outcome, Result) and failure_of(outcome) is None
        }
        results, known = dict[str, GroupResult](), dict[str, dict[str, Result]]()
        for batch in served:
            arm, results[batch.arm], known[batch.arm] = batch.arm, batch.result, {}
            if arm in gone:
                continue
            try:
                results[arm], known[arm] = self._force(
                    arm, batch.samples, batch.result, replies, logprobs=TOP
                )
            except EngineError as error:  # After it has served its batch.
                gone[arm] = str(error)
        for batch in served:
            own, best = known[batch.arm], known[BASELINE]
            fidelity = [
                compare_steps(best[s.id], own[s.id]) if s.id in own and s.id in best else None
                for s in batch.samples
            ]
            yield replace(batch, result=replace(results[batch.arm], fidelity=tuple(fidelity)))

    def _force(
        self,
        arm: str,
        samples: Sequence[Sample],
        result: GroupResult,
        replies: Mapping[str, Sequence[int]],
        *,
        logprobs: int,
    ) -> tuple[GroupResult, dict[str, Result]]:
        """What an arm says of given replies after it was sent `samples`, by sample.

        The requests come again, with these replies, so that times and counts of the `result` are
        as ever. All that they need was in the cache just before; what they evict is noted.
        """
        asked = [sample for sample in samples if sample.id in replies]
        if not asked:
            return result, {}
        found = self._servers[arm].run(
            [replace(to_request(s), reply=replies[s.id], logprobs=logprobs) for s in asked],
            self._job.running,
        )
        known = {
            sample.id: reply
            for sample, reply in zip(asked, found.outcomes, strict=True)
            if isinstance(reply, Result) and failure_of(reply) is None
        }
        evicted = Counter(result.evicted)
        evicted.update(found.evicted)
        return replace(result, evicted=dict(evicted)), known

    def _send(
        self,
        arm: str,
        samples: Sequence[Sample],
        arrivals: Sequence[float] | None = None,
        algorithm: str | None = None,
    ) -> GroupResult:
        concurrency = self._job.config.concurrency if arrivals is None else None
        requests = [to_request(sample, algorithm) for sample in samples]
        return self._servers[arm].run(requests, concurrency, arrivals)


#: Seconds between lines of progress.
INTERVAL = 10.0


class Progress:
    """Prints a line every few seconds: done, rate, time left; nothing without a `stream`.

    `total` are the requests of all runs that it is shown for; `clock` gives seconds.
    """

    def __init__(
        self, total: int, stream: TextIO | None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._total, self._stream, self._clock = total, stream, clock
        self._done = self._before = 0
        self._began = self._printed = clock()

    def say(self, message: str) -> None:
        """Print a line."""
        if self._stream is not None:
            print(f"picbench: {message}", file=self._stream, flush=True)

    def begin(self, done: int = 0) -> None:
        """Start the clock of a run; `done` of its requests were served before."""
        self._done += done
        self._before = self._done
        self._began = self._printed = self._clock()

    def advance(self, arm: str, requests: int) -> None:
        """Count requests that an arm answered or failed."""
        self._done += requests
        now = self._clock()
        if now - self._printed < INTERVAL and self._done != self._total:
            return
        self._printed, seconds = now, now - self._began
        state = f"{self._done}/{self._total} requests, last by {arm}"
        if seconds > 0:
            rate = (self._done - self._before) / seconds
            left = (self._total - self._done) / rate
            time = f"{minutes(left)} left" if left else f"took {minutes(seconds)}"
            state += f", {rate:.2f} requests/s, {time}"
        self.say(state)


def minutes(seconds: float) -> str:
    """Seconds as ``minutes:seconds``."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02}"
