"""Checks that a batch measured what it was meant to measure."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from picbench.engines.algorithms import Reuse
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.ledger import MemoryUse
from picbench.errors import ConfigError, EngineError, InvalidRun
from picbench.files import hold
from picbench.run.arm import Arm, ArmServer, Fleet, open_fleet
from picbench.run.cache_state import DeclaredCache, fill_requests, summarise_cache
from picbench.run.job import Job, gpu_memory
from picbench.run.progress import LaterProgress, Progress
from picbench.run.remote import Endpoint, PromptText
from picbench.run.resume import StoredRun, refill, take_up
from picbench.run.schedule import ChunkOrder, group_size, interleave, preload, replay, schedule
from picbench.run.server import launch
from picbench.run.workload import Workload, load_workload
from picbench.settings import RunConfig
from picbench.store import provenance
from picbench.store.manifest import (
    FINAL,
    SCHEMA,
    ArmDocument,
    ArrivalDocument,
    Attempt,
    Manifest,
    ModelDocument,
    Status,
    Summary,
    WorkloadDocument,
)
from picbench.store.reader import Run, read_run
from picbench.store.records import ArmBatch, Failure, SampleRow, ServedReply, Tally, to_rows
from picbench.store.summary import BASELINE, ArmSummary, provenance_of, summarise, summarise_memory
from picbench.store.writer import MANIFEST, RunDirectory, log_name
from picbench.workloads.facts import chunk_sets
from picbench.workloads.models import load_tokenizer
from picbench.workloads.sample import Sample


def verify(batch: ArmBatch, arm: Arm, *, warm: bool = False) -> None:
    """Raise InvalidRun where an engine ran other tokens, or reused what its arm may not or must.

    Arms are comparable only on identical token ids, and an arm that reuses nothing is the
    baseline only if its cache never hit. A `warm` batch, before which chunks were preloaded, has
    to hit in arms that reuse chunks. Servers elsewhere count the prompt's tokens when they reply;
    what they reuse is not known.
    """
    if warm and arm.reuse is Reuse.CHUNKS:
        _verify_warm(batch, arm)
    for sample, outcome in zip(batch.samples, batch.result.outcomes, strict=True):
        if isinstance(outcome, Failure | ServedReply):
            continue
        where = f"arm {arm.name}, sample {sample.id}"
        if outcome.prompt_tokens != sample.tokens:
            raise InvalidRun(
                f"{where}: the engine ran other token ids than the workload has",
                hint="report this with the run directory",
            )
        if arm.reuse is Reuse.NOTHING and outcome.counts.reused:
            raise InvalidRun(
                f"{where}: {outcome.counts.reused} tokens came from a cache that must be off",
                hint="look for a VLLM_* variable or configuration that turns caching on",
            )


def _verify_warm(batch: ArmBatch, arm: Arm) -> None:
    results = [o for o in batch.result.outcomes if not isinstance(o, Failure | ServedReply)]
    if results and not any(result.counts.reused for result in results):
        raise InvalidRun(
            f"arm {arm.name}: chunks were preloaded, and round {batch.round} reused none",
            hint="raise `kv_blocks`: the pool may be too small to keep them",
        )


class CacheUpkeep:
    """What arms are put through beside measuring: caches dropped, chunks served ahead, reordering.

    `declared` expects and verifies what it comes to.
    """

    def __init__(self, job: Job, fleet: Fleet, progress: Progress) -> None:
        self._job = job
        self._servers = fleet.servers
        self._progress = progress
        self._orders = {arm.name: ChunkOrder() for arm in job.arms if arm.reorders}
        blocks = {arm.name: _block_size(fleet, arm.name) for arm in job.arms}
        self.declared = DeclaredCache(job.config.cache, job.arms, blocks)

    @property
    def cold(self) -> bool:
        """Whether caches are dropped before each group."""
        return self._job.config.cache == "cold"

    @property
    def group_size(self) -> int:
        """Samples of a group in a closed loop."""
        return group_size(self._job.config.concurrency, together=self.cold)

    @property
    def rounds(self) -> int:
        """Rounds of one repeat."""
        workload = self._job.workload
        return 1 if workload.arrivals else -(-len(workload.samples) // self.group_size)

    @property
    def reusing(self) -> list[str]:
        """Arms that reuse anything of earlier requests."""
        return [arm.name for arm in self._job.arms if arm.reuse is not Reuse.NOTHING]

    def begin(self) -> None:
        """Bring the empty caches of engines that have just started into the state.

        Those that arms share are brought into it at each arm's turn.
        """
        if self._job.shared:
            return
        if self._job.workload.preload:
            count = len(self._job.workload.preload)
            self._progress.say(f"preloading {count} chunks into each arm")
        if self._job.config.cache == "warm":
            count = len(fill_requests(self._job.workload.samples))
            arms = len(self.reusing)
            self._progress.say(f"warming up: {count} chunks into each of {arms} arms")
        self._serve_ahead(tuple(self._servers))

    def prepare(self, arm: str, number: int) -> None:
        """Bring an arm's cache into the state before a round. EngineError if its engine is gone."""
        if self.cold:
            self._servers[arm].reset()
        first = self._job.shared and not number
        if not first and (not number or number % self.rounds):
            return
        self._servers[arm].reset()
        self.declared.begin(arm)
        if arm in self._orders:
            self._orders[arm] = ChunkOrder()
        self._serve_ahead((arm,))

    def rewrite(self, arm: str, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What an arm is sent in place of some samples."""
        order = self._orders.get(arm)
        return [order.arrange(sample) for sample in samples] if order else samples

    def _serve_ahead(self, arms: Collection[str]) -> None:
        workload, concurrency = self._job.workload, self._job.config.concurrency
        if workload.preload:
            servers = {name: self._servers[name] for name in arms}
            preload(servers, workload.preload, concurrency, self.rewrite)
        if self._job.config.cache != "warm":
            return
        samples = fill_requests(workload.samples)
        servers = {name: self._servers[name] for name in arms if name in self.reusing}
        for arm, result in preload(servers, samples, concurrency, self.rewrite).items():
            self.declared.note_fill(arm, samples, result.evicted)


def _block_size(fleet: Fleet, arm: str) -> int:
    found = fleet.engines[arm].get("block_size")
    return found if isinstance(found, int) else BLOCK_SIZE


def make_manifest(
    job: Job,
    engines: Mapping[str, Mapping[str, object]],
    provenance: Mapping[str, object],
    attempts: Sequence[Attempt],
    reason: str | None = None,
) -> Manifest:
    """What was asked for and on what it ran; the last of `attempts` says how far the run is."""
    config = job.config.published()
    return Manifest(
        schema=SCHEMA,
        status=attempts[-1].status,
        began=attempts[0].began,
        ended=attempts[-1].ended,
        reason=reason,
        attempts=attempts,
        fingerprint=job.fingerprint,
        config=config,
        sizes=job.sizes,
        model=_model(job),
        workload=_workload(job),
        cache=_cache(job),
        arms={
            arm.name: ArmDocument(
                algorithm=arm.algorithm,
                stock=arm.stock,
                settings=_settings(job, arm),
                engine=dict(engines[arm.name]),
            )
            for arm in job.arms
        },
        provenance=dict(provenance),
    )


def _settings(job: Job, arm: Arm) -> dict[str, Any]:
    if arm.endpoint is not None:
        return asdict(arm.endpoint)
    return asdict(job.engine(arm)) | {"tiers": job.config.published()["tiers"]}


def make_summary(
    job: Job, arms: Mapping[str, ArmSummary], provenance: Mapping[str, Any], status: Status
) -> Summary:
    """Aggregates by arm."""
    return Summary(
        schema=SCHEMA,
        status=status,
        fingerprint=job.fingerprint,
        model=_model(job),
        workload=_workload(job),
        arms=arms,
        provenance=dict(provenance),
    )


def _cache(job: Job) -> str:
    """The declared state of caches; without one, what engines do by themselves."""
    start = "warm" if job.workload.preload else "cold"
    return job.config.cache or f"{start} at start, kept between requests"


def _workload(job: Job) -> WorkloadDocument:
    workload = job.workload
    return WorkloadDocument(
        **asdict(job.facts),
        metric=workload.metric,
        synthetic=workload.synthetic,
        arrivals=_arrivals(workload.arrivals),
        preloaded_chunks=len(workload.preload),
        request_file=workload.requests,
        origin=workload.origin,
        chat=workload.chat,
        skipped_rows=len(workload.skipped),
        first_skipped=next(iter(workload.skipped), None),
    )


def _arrivals(times: Sequence[float] | None) -> ArrivalDocument | None:
    """How requests arrive, None in a closed loop; each one's time is in its row."""
    return None if times is None else ArrivalDocument(len(times), max(times))


def _model(job: Job) -> ModelDocument:
    model = job.workload.model
    return ModelDocument(model.name, model.weights, model.meaningful, model.restates)


#: Starts the engine of an arm: its name, its settings, the file for its output.
Launch = Callable[[str, EngineConfig, Path], ArmServer]

#: Whether there is time for a job.
Allowed = Callable[[Job], bool]


def _run_files(path: Path) -> Iterator[str]:
    from picbench.figures.run import write_run_files

    return write_run_files(path)


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from, how engines start, and on which GPUs; tests bring their own.

    `memory` gives the bytes of each of so many GPUs, None where engines use none. `files` makes
    tables and figures of a run directory, and yields a line for each that it cannot make.
    """

    load: Callable[[RunConfig], Workload] = load_workload
    launch: Launch = launch
    memory: Callable[[int], int | None] = gpu_memory
    files: Callable[[Path], Iterator[str]] = _run_files


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run: its directory, the arms' summaries and how many requests failed."""

    path: Path
    arms: Mapping[str, ArmSummary]
    failed: int


def execute(job: Job, launch: Launch, progress: Progress) -> Finished:
    """Start the engines, run all rounds, write the run directory.

    Where start-up fails nothing is left behind. From then on, whatever stops the run, all that
    was measured is kept, and the manifest says how the run ended. A run whose directory is there
    goes on; one that has ended is only read. Raises InvalidRun for one that ended so.
    """
    if (job.output / MANIFEST).exists():
        with hold(job.output):
            return _go_on(job, launch, progress)
    directory = RunDirectory.create(job.output)
    with hold(job.output):
        try:
            with _start_engines(job, launch, progress, directory.log) as fleet:
                _say_notes(fleet, progress)
                return Session(job, directory, fleet, progress).run()
        except BaseException:
            if not directory.begun:
                directory.discard()
            raise


def _go_on(job: Job, launch: Launch, progress: Progress) -> Finished:
    """Measure what is missing in the job's directory; without engines where nothing is."""
    run = read_run(job.output)
    if run.manifest["status"] in FINAL:
        return _finished(run, progress)
    stored = _take_up(run, job, progress)
    directory = RunDirectory(run.path)
    if stored.requests == job.requests:
        return Session(job, directory, Fleet({}, stored.engines), progress, stored).run()
    with _start_engines(job, launch, progress, directory.log) as fleet:
        _say_notes(fleet, progress)
        return Session(job, directory, fleet, progress, stored).run()


def _take_up(run: Run, job: Job, progress: Progress) -> StoredRun:
    stored = take_up(run)
    progress.say(f"{run.path}: resuming after {stored.requests} of {job.requests} requests")
    return stored


def _finished(run: Run, progress: Progress) -> Finished:
    if run.manifest["status"] == "invalid":
        raise InvalidRun(f"{run.path}: {run.manifest['reason']}", hint="name a new `output`")
    progress.say(f"{run.path}: has ended and is only shown; name a new directory to measure again")
    arms = run.summary
    return Finished(run.path, arms, sum(arm.failed for arm in arms.values()))


def _always(job: Job) -> bool:
    return True


def execute_all(
    jobs: Sequence[Job],
    launch: Launch,
    progress: Progress,
    logs: Path,
    allowed: Allowed = _always,
) -> Iterator[Finished]:
    """Run jobs one after another, each from a cold cache and into a directory of its own.

    The engines start once, so the jobs must agree on their settings (ConfigError); their output
    goes to `logs`. A run that was stopped goes on, as in `execute`. One with a failed request ends
    them all with EngineError: an engine that is gone would fail those that follow. The first one
    that is not `allowed` ends them too, without an error.
    """
    _check_alike(jobs)
    logs.mkdir(parents=True, exist_ok=True)
    first = jobs[0]
    with _start_engines(first, launch, progress, lambda arm: logs / log_name(arm)) as fleet:
        _say_notes(fleet, progress)
        before = 0
        for job in jobs:
            if not allowed(job):
                return
            for server in fleet.servers.values():
                server.reset()
            progress.say(f"{job.output.name}")
            done = _run_on(fleet, job, LaterProgress(progress, before))
            before += job.requests
            _check_complete(done)
            yield done


def _run_on(fleet: Fleet, job: Job, progress: Progress) -> Finished:
    """Run a job, or what is missing of it, on engines whose caches are empty."""
    if not (job.output / MANIFEST).exists():
        directory = RunDirectory.create(job.output)
        with hold(job.output):
            return Session(job, directory, fleet, progress).run()
    with hold(job.output):
        run = read_run(job.output)
        if run.manifest["status"] in FINAL:
            return _finished(run, progress)
        stored = _take_up(run, job, progress)
        return Session(job, RunDirectory(run.path), fleet, progress, stored).run()


class Session:
    """The measuring part of a run, and its files; `stored` is what there is of it already."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        fleet: Fleet,
        progress: Progress,
        stored: StoredRun | None = None,
    ) -> None:
        self._job = job
        self._directory = directory
        self._fleet = fleet
        self._progress = progress
        self._arms = {arm.name: arm for arm in job.arms}
        self._tallies = {arm.name: Tally() for arm in job.arms}
        self._sets = chunk_sets(job.workload.samples)
        self._provenance = provenance.collect()
        self._stored = stored
        self._attempt = Attempt(_now(), done=stored.requests if stored else 0)
        self._upkeep = CacheUpkeep(job, fleet, progress)
        self._memory: dict[str, Sequence[MemoryUse]] = {}

    def run(self) -> Finished:
        """Run all rounds; the files record how far they got in any case."""
        self._directory.write_workload(self._job.workload.samples, self._sets)
        self._write_manifest()
        status: Status = "interrupted"
        reason = None
        try:
            self._measure()
            status = "partial" if self._failed else "complete"
        except InvalidRun as error:
            status, reason = "invalid", str(error)
            raise
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            arms = self._write_results(status, reason)
            if status not in ("complete", "partial"):
                self._progress.say(f"{status}; results so far are in {self._directory.path}")
        return Finished(self._directory.path, arms, self._failed)

    def _measure(self) -> None:
        done = self._attempt.done
        if self._stored:
            for known in self._stored.batches:
                self._tallies[known.line.arm].add(known.rows, known.result)
        if done == self._job.requests:
            return
        self._upkeep.begin()
        if self._stored:
            self._refill(self._stored)
        self._progress.begin(done)
        for batch in self._batches():
            self._keep(batch)
        self._measure_memory()

    def _refill(self, stored: StoredRun) -> None:
        """Bring caches to where the run was stopped; in an open loop each arm begins without.

        What was served in earlier repeats is gone from all caches.
        """
        workload, upkeep = self._job.workload, self._upkeep
        if workload.arrivals is not None or not stored.batches:
            return
        if not upkeep.cold:
            self._progress.say("serving stored requests again, unmeasured, to restore caches")
        planned = list(self._schedule())
        first = len(stored.batches) - len(stored.batches) % (upkeep.rounds * len(self._arms))
        found = refill(
            self._fleet.servers,
            stored.batches[first:],
            planned[first:],
            concurrency=self._job.config.concurrency,
            arms=() if upkeep.cold else upkeep.reusing,
            rewrite=upkeep.rewrite,
            to_rows=self._rows,
        )
        self._attempt = replace(
            self._attempt,
            replayed=found.requests,
            changed_outputs=found.changed_outputs,
        )
        if found.changed_outputs:
            self._progress.say(
                f"{found.changed_outputs} of {found.requests} replies are others this time: "
                "this engine is not deterministic"
            )

    def _batches(self) -> Iterator[ArmBatch]:
        workload, servers = self._job.workload, self._fleet.servers
        upkeep, repeats = self._upkeep, self._job.config.repeats
        done = len(self._stored.batches) if self._stored else 0
        lost = self._stored.lost if self._stored else {}
        if workload.arrivals is None:
            return interleave(
                servers,
                workload.samples,
                self._job.config.concurrency,
                upkeep.rewrite,
                size=upkeep.group_size,
                repeats=repeats,
                done=done,
                lost=lost,
                prepare=upkeep.prepare,
            )
        # Any number that differs from run to run will do.
        first = int(self._job.fingerprint, 16)
        return replay(
            servers,
            workload.samples,
            workload.arrivals,
            first,
            upkeep.rewrite,
            repeats=repeats,
            done=done,
            lost=lost,
            prepare=upkeep.prepare,
        )

    def _schedule(self) -> Iterator[tuple[int, str, Sequence[Sample]]]:
        size, repeats = self._upkeep.group_size, self._job.config.repeats
        return schedule(self._job.workload.samples, tuple(self._fleet.servers), size, repeats)

    def _rows(self, batch: ArmBatch) -> list[SampleRow]:
        """The rows of a batch that was just served; for each batch once."""
        rows = to_rows(batch, self._job.workload.grader, self._sets)
        expected = self._upkeep.declared.expect(batch)
        repeat = batch.round // self._upkeep.rounds
        return [
            replace(row, expected_reuse=tokens, repeat=repeat)
            for row, tokens in zip(rows, expected, strict=True)
        ]

    def _keep(self, batch: ArmBatch) -> None:
        rows = self._rows(batch)
        self._tallies[batch.arm].add(rows, batch.result)
        try:
            verify(batch, self._arms[batch.arm], warm=bool(self._job.workload.preload))
            self._upkeep.declared.check(batch, rows)
        except InvalidRun:
            # For readers alone: a run that is killed right now must find this again.
            self._directory.append(rows)
            raise
        self._directory.keep(batch, rows)
        self._progress.advance(batch.arm, len(rows))

    def _write_results(self, status: Status, reason: str | None) -> dict[str, ArmSummary]:
        workload = self._job.workload
        arms = summarise(
            self._tallies,
            metric=workload.metric,
            meaningful=workload.model.meaningful,
            objectives=self._job.objectives,
        )
        arms = {name: self._with_caches(name, arm) for name, arm in arms.items()}
        self._directory.write_memory({n: t.snapshots for n, t in self._tallies.items()})
        summary = make_summary(self._job, arms, self._provenance, status)
        self._directory.write_summary(asdict(summary))
        self._attempt = replace(self._attempt, status=status, ended=_now())
        self._write_manifest(reason)
        if status in FINAL:
            self._directory.compact()
        return arms

    def _with_caches(self, name: str, arm: ArmSummary) -> ArmSummary:
        full = self._tallies[BASELINE].rows if BASELINE in self._tallies else []
        state, reuse = self._job.config.cache, self._arms[name].reuse
        engine = self._fleet.engines[name]
        block = engine.get("block_bytes")
        return replace(
            arm,
            provenance=provenance_of(engine),
            cache=summarise_cache(state, reuse, self._tallies[name], full),
            memory=summarise_memory(
                arm.blocks, block if isinstance(block, int) else None, self._memory.get(name, ())
            ),
        )

    def _measure_memory(self) -> None:
        """Ask all engines here that are left what they hold."""
        for name, server in self._fleet.servers.items():
            if self._arms[name].endpoint is not None:
                continue
            try:
                self._memory[name] = server.call(attrgetter("memory_use"))
            except EngineError as error:
                self._progress.say(f"memory is not measured: {error.message}")

    def _write_manifest(self, reason: str | None = None) -> None:
        manifest = make_manifest(
            self._job,
            self._fleet.engines,
            self._provenance,
            [*(self._stored.attempts if self._stored else ()), self._attempt],
            reason,
        )
        self._directory.write_manifest(asdict(manifest))

    @property
    def _failed(self) -> int:
        return sum(tally.failed for tally in self._tallies.values())


def _start_engines(
    job: Job, launch: Launch, progress: Progress, log: Callable[[str], Path]
) -> AbstractContextManager[Fleet]:
    for note in job.notes:
        progress.say(note)
    with ExitStack() as stack:
        for arm in job.arms:
            if arm.endpoint is not None:
                server = stack.enter_context(closing(_connect(job, arm, arm.endpoint)))
                server.ready()  # Before engines start, which takes minutes.
    ours = [arm.name for arm in job.arms if arm.endpoint is None]
    many = "s" if len(ours) > 1 else ""
    what = f"arm{many} in turn" if job.shared else f"engine{many}"
    progress.say(f"starting {len(ours)} {what}: {', '.join(ours)}")
    return open_fleet(
        job.arms,
        lambda arm: (
            launch(arm.name, job.engine(arm), log(arm.name))
            if arm.endpoint is None
            else _connect(job, arm, arm.endpoint)
        ),
        lambda name: progress.say(f"{name} is up"),
    )


def _connect(job: Job, arm: Arm, endpoint: Endpoint) -> ArmServer:
    from picbench.run.remote import RemoteServer

    text_of = PromptText(partial(load_tokenizer, job.workload.model))
    return RemoteServer(arm.name, endpoint, text_of)


def _say_notes(fleet: Fleet, progress: Progress) -> None:
    """Say what engines chose where nothing was given, each note once."""
    noted = [note for engine in fleet.engines.values() for note in _notes(engine)]
    for note in dict.fromkeys(noted):
        progress.say(note)


def _notes(engine: Mapping[str, object]) -> Sequence[str]:
    notes = engine.get("notes")
    return notes if isinstance(notes, list) else ()


def _check_alike(jobs: Sequence[Job]) -> None:
    settings = [[arm.endpoint or job.engine(arm) for arm in job.arms] for job in jobs]
    if any(other != settings[0] for other in settings):
        raise ConfigError(
            "runs on the same engines need the same arms, model, pool and context",
            hint="fix kv_blocks, context and max_running for all of them",
        )


def _check_complete(done: Finished) -> None:
    if done.failed:
        raise EngineError(
            f"{done.failed} requests failed in {done.path}",
            hint="see error in its samples.jsonl, and logs/; the same command resumes from here",
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
