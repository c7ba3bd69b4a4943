"""A run: engines started, rounds served and verified, files written; and its resumption."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.engines.algorithms import Reuse
from picbench.engines.config import EngineConfig
from picbench.engines.ledger import MemoryUse
from picbench.errors import EngineError, IncomparableRuns, InvalidRun
from picbench.run.arm import Arm, ArmServer, Fleet, open_fleet
from picbench.run.cache_state import found_no_chunk, summarise_cache
from picbench.run.job import Job, changed, gpu_memory
from picbench.run.remote import RemoteServer
from picbench.run.schedule import Progress, Rounds
from picbench.run.server import Server
from picbench.run.workload import Workload, load_workload
from picbench.settings import RunConfig
from picbench.store import provenance, writer
from picbench.store.reader import read_run
from picbench.store.records import ArmBatch, Failure, ServedReply, Tally
from picbench.store.summary import BASELINE, ArmSummary, summarise, summarise_memory
from picbench.store.writer import Attempt, RunDirectory, Status, StoredBatch
from picbench.tables.run import unlike_lines
from picbench.workloads.models import check_weights, load_tokenizer

#: Starts the engine of an arm: its name, its settings, the file for its output.
Launch = Callable[[str, EngineConfig, Path], ArmServer]


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from, how engines start, and on which GPUs; tests bring their own.

    `memory` gives the bytes of each of so many GPUs, None where engines use none. `files` makes
    tables and figures of a run directory, and yields a line for each that it cannot make; None is
    `picbench.figures.run.write_run_files`.
    """

    load: Callable[[RunConfig], Workload] = load_workload
    launch: Launch = Server
    memory: Callable[[int], int | None] = gpu_memory
    files: Callable[[Path], Iterator[str]] | None = None


def execute(
    job: Job, launch: Launch, progress: Progress, fleet: Fleet | None = None
) -> Mapping[str, ArmSummary]:
    """Start the engines if there is no `fleet`, run all rounds, write the run directory.

    Gives the arms' summaries. Where start-up fails nothing is left behind. From then on, whatever
    stops the run, all that was measured is kept, and the manifest says how the run ended. A run
    whose directory is there is resumed, without engines where nothing is missing; one that has
    ended is only read. Raises InvalidRun for one that ended so, and IncomparableRuns for one that
    began in another environment.
    """
    resumed = (job.output / writer.MANIFEST).exists()
    directory = RunDirectory(job.output) if resumed else RunDirectory.create(job.output)
    engines: Mapping[str, Mapping[str, object]] = {}
    attempts: list[Attempt] = []
    batches: list[StoredBatch] = []
    with writer.hold(job.output):
        if resumed:
            run = read_run(job.output)
            status, reason = run.manifest["status"], run.manifest["reason"]
            if status == "invalid":
                raise InvalidRun(f"{run.path}: {reason}", hint="name a new `output`")
            if status in writer.FINAL:
                shown = "has ended and is only shown; name a new directory to measure again"
                progress.say(f"{run.path}: {shown}")
                return run.summary
            if differ := changed(run):
                raise IncomparableRuns(
                    f"{run.path}: began with other {', '.join(differ)}",
                    hint="name a new `output` to measure again",
                )
            engines = {name: arm["engine"] for name, arm in run.manifest["arms"].items()}
            attempts = TypeAdapter(list[Attempt]).validate_python(run.manifest["attempts"])
            batches = writer.read_batches(run.path)
            if job.scoring.fidelity:  # Arms are compared when a round has ended.
                batches = batches[: len(batches) - len(batches) % len(job.arms)]
            writer.cut(run.path, batches)
        done = sum(batch.line.rows for batch in batches)
        if resumed:
            progress.say(f"{job.output}: resuming after {done} of {job.requests} requests")
        if done == job.requests:
            fleet = Fleet({}, engines)
        try:
            with (
                start_engines(job, launch, progress, job.output / "logs")
                if fleet is None
                else nullcontext(fleet)
            ) as started:
                return _Session(job, directory, started, progress, attempts, batches).run()
        except BaseException:
            if not (job.output / writer.MANIFEST).exists():
                directory.discard()
            raise


@contextmanager
def start_engines(job: Job, launch: Launch, progress: Progress, logs: Path) -> Iterator[Fleet]:
    """The engines of all arms of a job, whose output goes to `logs`.

    Says what was chosen where nothing was given, each note once.
    """
    for note in job.notes:
        progress.say(note)
    tokenizer = partial(load_tokenizer, job.workload.model)
    ours = job.engines
    starts: dict[str, Callable[[], ArmServer]] = {}
    for name, config in ours.items():
        starts[name] = partial(launch, name, config, logs / writer.log_name(name))
    for arm in job.arms:
        if arm.endpoint is not None:
            starts[arm.name] = partial(RemoteServer, arm.name, arm.endpoint, tokenizer)
            with closing(starts[arm.name]()) as server:
                server.ready()  # Before engines start, which takes minutes.
    if ours:
        check_weights(job.workload.model)
    many = "s" if len(ours) > 1 else ""
    what = f"arm{many} in turn" if job.shared else f"engine{many}"
    if ours:
        progress.say(f"starting {len(ours)} {what}: {', '.join(ours)}")
    with open_fleet(starts, lambda name: progress.say(f"{name} is up")) as fleet:
        noted = [engine.get("notes") for engine in fleet.engines.values()]
        notes = dict.fromkeys(chain.from_iterable(n for n in noted if isinstance(n, list)))
        for note in (*notes, *unlike_lines(fleet.engines)):
            progress.say(note)
        servers = {arm.name: fleet.servers[arm.engine] for arm in job.arms}
        yield Fleet(servers, {arm.name: fleet.engines[arm.engine] for arm in job.arms})


class _Session:
    """The measuring part of a run, and its files; `stored` is what there is of it already."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        fleet: Fleet,
        progress: Progress,
        attempts: Sequence[Attempt],
        stored: Sequence[StoredBatch],
    ) -> None:
        self._job, self._directory = job, directory
        self._fleet, self._progress = fleet, progress
        self._attempts, self._stored = attempts, stored
        self._done = sum(batch.line.rows for batch in stored)
        self._attempt = Attempt(_now(), done=self._done)
        self._arms = {arm.name: arm for arm in job.arms}
        self._tallies = {name: Tally() for name in self._arms}
        self._rounds = Rounds(job, fleet, progress.say)
        self._provenance = provenance.collect()
        self._memory: dict[str, Sequence[MemoryUse]] = {}

    def run(self) -> Mapping[str, ArmSummary]:
        """Run all rounds; the files record how far they got in any case."""
        self._directory.write_workload(self._job.workload.samples, self._rounds.sets)
        self._write_manifest()
        status: Status = "interrupted"
        reason = None
        try:
            self._measure()
            failed = sum(tally.failed for tally in self._tallies.values())
            status = "partial" if failed else "complete"
        except InvalidRun as error:
            status, reason = "invalid", str(error)
            raise
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            arms = self._summarise()
            tallies = self._tallies.items()
            self._directory.write_memory({name: tally.snapshots for name, tally in tallies})
            common = about(self._job, self._provenance)
            summary = writer.Summary(**common, status=status, arms=arms)
            self._directory.write(writer.SUMMARY, asdict(summary))
            self._attempt = replace(self._attempt, status=status, ended=_now())
            self._write_manifest(reason)
            if status in writer.FINAL:
                self._directory.compact()
            if status not in ("complete", "partial"):
                self._progress.say(f"{status}; results so far are in {self._directory.path}")
        return arms

    def _measure(self) -> None:
        lost = {}
        for known in self._stored:
            self._tallies[known.line.arm].add(known.rows, known.result)
            if known.line.lost is not None:
                lost[known.line.arm] = known.line.lost
        if self._done == self._job.requests:
            self._progress.begin(self._done)
            return
        replayed, changed = self._rounds.begin(self._stored)
        self._attempt = replace(self._attempt, replayed=replayed, changed_outputs=changed)
        if changed:
            self._progress.say(
                f"{changed} of {replayed} replies are others this time: "
                "this engine is not deterministic"
            )
        self._progress.begin(self._done)
        for batch in self._rounds.serve(len(self._stored), lost):
            self._keep(batch)
        for name in (arm.name for arm in self._job.arms if arm.endpoint is None):
            try:
                self._memory[name] = self._fleet.servers[name].call(attrgetter("memory_use"))
            except EngineError as error:
                self._progress.say(f"memory is not measured: {error.message}")

    def _keep(self, batch: ArmBatch) -> None:
        rows = self._rounds.rows(batch)
        self._tallies[batch.arm].add(rows, batch.result)
        try:
            verify(batch, self._arms[batch.arm], warm=bool(self._job.workload.preload))
            self._rounds.declared.check(batch, rows)
        except InvalidRun:
            # For readers alone: a run that is killed right now must find this again.
            self._directory.append(rows)
            raise
        self._directory.keep(batch, rows)
        self._progress.advance(batch.arm, len(rows))

    def _summarise(self) -> dict[str, ArmSummary]:
        job, tallies = self._job, self._tallies
        found = summarise(
            tallies,
            metric=job.workload.metric,
            meaningful=job.workload.model.meaningful,
            objectives=job.objectives,
            engines=self._fleet.engines,
        )
        full = tallies[BASELINE].rows if BASELINE in tallies else []
        for arm in job.arms:
            own, tally = found[arm.name], tallies[arm.name]
            block = self._fleet.engines[arm.name].get("block_bytes")
            size = block if isinstance(block, int) else None
            held = self._memory.get(arm.name, ())
            found[arm.name] = replace(
                own,
                cache=summarise_cache(job.config.cache, arm.reuse, tally, full),
                memory=summarise_memory(own.blocks, size, held),
                without_reuse=found_no_chunk(arm, job.workload, tally, own.reused_share),
            )
        return found

    def _write_manifest(self, reason: str | None = None) -> None:
        """What was asked for, on what it ran, and how far the run is."""
        job, config, arms = self._job, self._job.config.published(), {}
        for arm in job.arms:
            settings = asdict(arm.endpoint or job.engine(arm))
            if arm.endpoint is None:
                settings["tiers"] = config["tiers"]
            engine = dict(self._fleet.engines[arm.name])
            arms[arm.name] = writer.ArmDocument(arm.algorithm, arm.stock, settings, engine)
        start = "warm" if job.workload.preload else "cold"
        attempts = [*self._attempts, self._attempt]
        made = writer.Manifest(
            **about(job, self._provenance),
            status=self._attempt.status,
            began=attempts[0].began,
            ended=self._attempt.ended,
            reason=reason,
            attempts=attempts,
            config=config,
            sizes=job.sizes,
            cache=job.config.cache or f"{start} at start, kept between requests",
            arms=arms,
        )
        self._directory.write(writer.MANIFEST, asdict(made))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def verify(batch: ArmBatch, arm: Arm, *, warm: bool = False) -> None:
    """Raise InvalidRun where an engine ran other tokens, or reused what its arm may not or must.

    Arms are comparable only on identical token ids, and an arm that reuses nothing is the
    baseline only if its cache never hit. A `warm` batch, before which chunks were preloaded, has
    to hit in arms that reuse chunks. Remote servers count the prompt's tokens when they reply;
    what they reuse is not known.
    """
    pairs = zip(batch.samples, batch.result.outcomes, strict=True)
    results = [(sample, o) for sample, o in pairs if not isinstance(o, Failure | ServedReply)]
    filled = warm and arm.reuse is Reuse.CHUNKS
    used = (result.counts.reused or ((r := result.choice) and r.texts) for _, result in results)
    if filled and results and not any(used):
        raise InvalidRun(
            f"arm {arm.name}: chunks were preloaded, and round {batch.round} reused none",
            hint="raise `kv_blocks`: the pool may be too small to keep them",
        )
    for sample, result in results:
        where = f"arm {arm.name}, sample {sample.id}"
        if result.prompt_tokens != sample.tokens:
            raise InvalidRun(
                f"{where}: the engine ran other token ids than the workload has",
                hint="report this with the run directory",
            )
        if arm.reuse is Reuse.NOTHING and result.counts.reused:
            raise InvalidRun(
                f"{where}: {result.counts.reused} tokens came from a cache that must be off",
                hint="look for a VLLM_* variable or configuration that turns caching on",
            )


def about(job: Job, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What manifest.json and summary.json both say of a run."""
    workload, times, model = job.workload, job.workload.arrivals, job.workload.model
    return {
        "schema": writer.SCHEMA,
        "fingerprint": job.fingerprint,
        "model": writer.ModelDocument(model.name, model.weights, model.meaningful, model.restates),
        "workload": writer.WorkloadDocument(
            **asdict(job.facts),
            metric=workload.metric,
            synthetic=workload.synthetic,
            arrivals=None if times is None else writer.ArrivalDocument(len(times), max(times)),
            preloaded_chunks=len(workload.preload),
            request_file=workload.requests,
            origin=workload.origin,
            chat=workload.chat,
            skipped_rows=len(workload.skipped),
            first_skipped=next(iter(workload.skipped), None),
        ),
        "provenance": dict(provenance),
    }
