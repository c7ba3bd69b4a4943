"""A paper's loads are served, and all of its experiments measured, estimated and kept."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from picbench.errors import EngineError
from picbench.files import locked
from picbench.papers import serve_arms
from picbench.papers.arm_scores import ARMS_OF
from picbench.papers.data import START, StoredPoint, joined, other_settings, stored_run
from picbench.papers.prompts import STOCK, TimedPrompt, measure_prompts, measure_rows
from picbench.papers.settings import (
    Device,
    ReproduceConfig,
    RowExperiment,
    ScoreSettings,
    Settings,
    read_published,
)
from picbench.run.arm import SharedEngines, parse_arms, shareable
from picbench.run.job import Job, can_resume, prepare
from picbench.run.runner import TimeBudget, share
from picbench.run.schedule import Progress
from picbench.run.session import Launch, Services, execute, start_engines
from picbench.run.traffic_file import TrafficConfig, TrafficWriter, Written, parse_traffic
from picbench.settings import parse_config
from picbench.store.reader import Run, read_run
from picbench.store.writer import MANIFEST
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Folders below the output: compact data, scores row by row, and points, which are all that a
#: command needs to continue elsewhere.
DATA, SCORES, POINTS = "data", "scores", "points"

#: Prompt tokens a second of requests that run together: two cores of an AMD EPYC with the testbed
#: model, H200 with shapes of 7 and 8 billion weights; and of all arms of scores in one batch.
_COMPUTED, _BATCH = {"cpu": 3_400, "cuda": 41_000}, {"cpu": 2_000, "cuda": 90_000}

#: What a token of a cached chunk takes of the time of one that is computed.
_REUSED = 0.2

#: Prompt tokens of a row under an arm, and seconds of its attention on a CPU.
_ROW, _ATTENTION = 1_500, 5.0

#: Settings by which a run is recognised; its files may have moved.
_DECISIVE = ("algo", "model", "kv_blocks", "context", "max_running", "compile_order", "cache")

#: Opens the display of this many requests.
Display = Callable[[int], Progress]


def changed(settings: Settings, config: ReproduceConfig) -> Settings:
    """The same paper with another model, other numbers of requests, or the first seeds alone."""
    content = settings.model_dump(exclude_unset=True)
    for kind in ("loads", "latencies"):
        for experiment in content.get(kind, {}).values():
            for sizes in filter(None, (experiment.get("cpu"), experiment.get("cuda"))):
                sizes |= {"model": config.model} if config.model else {}
                if kind == "loads":
                    sizes["seeds"] = sizes["seeds"][: config.seeds]
                    for point in sizes["points"].values():
                        point |= {"requests": config.requests} if config.requests else {}
    return Settings.model_validate(content)


@dataclass(frozen=True, slots=True)
class Point:
    """One workload of an experiment under one seed: one run, with its arms."""

    name: str
    device: Device
    label: str
    seed: int
    traffic: TrafficConfig
    arms: tuple[str, ...]
    run: Mapping[str, Any]


def point_name(device: Device, experiment: str, label: str, seed: int) -> str:
    """What files of a point are called; labels may have what no name can, such as ``8/s``."""
    label = re.sub(r"[^\w.,+ -]", "-", label)
    return f"{device}-{experiment}-{label}-seed{seed}"


def arm_names(specs: Iterable[str]) -> tuple[str, ...]:
    """What runs call arms; ConfigError for one that does not exist."""
    return tuple(arm.name for arm in parse_arms(specs))


def points(settings: Settings, experiment: str, device: Device) -> Iterator[Point]:
    """The runs of a load, seed by seed; none where it has no sizes for the device.

    Raises ConfigError for an arm that does not exist.
    """
    found = settings.loads[experiment].on(device)
    if found is None:
        return
    # Each reading of arms reads what is installed, which takes longer than all the rest.
    named = cache(lambda *specs: arm_names(specs))
    shared = found.model_dump(include={"model", "max_running", "context"}) | {"device": device}
    for seed in found.seeds:
        for label, changes in found.points.items():
            own: dict[str, Any] = {"arms": found.arms, "run": {}, "kv_blocks": found.kv_blocks}
            own |= changes
            arms, run, blocks = (own.pop(name) for name in ("arms", "run", "kv_blocks"))
            yield Point(
                name=point_name(device, experiment, label, seed),
                device=device,
                label=label,
                seed=seed,
                traffic=parse_traffic(found.common | own | {"seed": seed}),
                arms=named(*arms),
                run=shared | found.run | run | {"kv_blocks": blocks},
            )


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A point of a load, kept below `output`; its run, with these `settings`, serves `written`."""

    point: Point
    output: Path
    settings: Mapping[str, Any]
    written: Written

    @classmethod
    def plan(
        cls, point: Point, output: Path, writer: TrafficWriter, requests: Path | None = None
    ) -> "LoadPoint":
        """Write the requests of a point, into the file `requests` if not below the output."""
        model = models.resolve(point.run["model"])
        requests = requests or output / "requests" / f"{point.name}.jsonl"
        settings = {
            **point.run,
            "context": point.run["context"] or model.context,
            "algo": point.arms,
            "requests": str(requests),
            "output": str(output / "runs" / point.name),
        }
        return cls(point, output, settings, writer.write(requests, point.traffic, model))

    @property
    def identity(self) -> dict[str, Any]:
        """What tells whether a measured point is the wanted one: its settings and its requests."""
        decisive = {name: self.settings[name] for name in _DECISIVE if name in self.settings}
        return decisive | {"algo": list(self.point.arms), "requests": self.written.fingerprint}

    @property
    def expected(self) -> float:
        """About how many seconds it takes: each arm until all have arrived and are served."""
        arms, facts = self.point.arms, self.written.facts
        return sum(expected_arm(arm, facts, self.point.device) for arm in arms)

    @property
    def _file(self) -> Path:
        return self.output / POINTS / f"{self.point.name}.json"

    @property
    def _run(self) -> Run | None:
        """Its run, as far as it is. Raises ConfigError for one with other settings."""
        directory = Path(self.settings["output"])
        if not (directory / MANIFEST).exists():
            return None
        run = read_run(directory)
        config, rows = run.manifest["config"], run.manifest["workload"]
        found = {name: config.get(name) for name in self.identity}
        if found | {"requests": rows["request_file"]} != self.identity:
            raise other_settings(directory)
        return run

    @property
    def missing(self) -> bool:
        """Whether it is to be measured. Raises ConfigError where it was with other settings."""
        if StoredPoint.find(self._file, self.identity):
            return False
        run = self._run
        return run is None or run.manifest["status"] != "complete"

    def stored(self, commit: str | None = None) -> StoredPoint | None:
        """What is kept of it, as soon as its run is complete; `commit` as in `stored_run`."""
        if found := StoredPoint.find(self._file, self.identity):
            return found
        if (run := self._run) is None or run.manifest["status"] != "complete":
            return None
        of = (self.identity, self.point.label, self.point.seed, self.written.facts)
        found = stored_run(*of, run, commit)
        found.write(self._file)
        return found

    def job(self, services: Services) -> Job | None:
        """The run to serve or to resume; None where it is complete.

        What cannot be resumed is removed: a run in which requests failed, or one of other code.
        """
        if not self.missing:
            return None
        if (run := self._run) and not can_resume(run):
            shutil.rmtree(run.path)
        config, shared = parse_config(self.settings), self.point.device == "cuda"
        return prepare(config, services.load, services.memory, shared=shared)


def expected_arm(arm: str, facts: TrafficFacts, device: str) -> float:
    """About how many seconds an arm takes; what was measured corrects it (`TimeBudget`)."""
    tokens = facts.mean_tokens
    if arm.partition(":")[0] not in STOCK:
        tokens = facts.fresh_tokens + _REUSED * (facts.mean_tokens - facts.fresh_tokens)
    arriving = facts.requests / facts.rate if facts.rate else 0.0
    return max(facts.requests * tokens / _COMPUTED[device], arriving)


def serve_loads(
    runs: Sequence[tuple[LoadPoint, Job]],
    services: Services,
    logs: Path,
    display: Display,
    budget: TimeBudget,
    commit: str | None = None,
) -> None:
    """Serve runs as long as the budget lasts, and keep each point; engines write to `logs`.

    Runs on the same engines come after each other, and of these one seed after another. Arms that
    take turns need not be the same in all runs on an engine, which waits for the next run.
    """
    groups: dict[str, list[tuple[LoadPoint, Job]]] = {}
    for load, job in runs:
        configs = [job.engine(arm) for arm in job.arms]
        if job.shared:
            ours = (shareable(config) for config in configs if not config.stock)
            configs = list(dict.fromkeys(ours)) or configs
        groups.setdefault(repr(configs), []).append((load, job))
    if not groups:
        return
    total = sum(job.requests for _, job in runs)
    progress = display(total)
    with SharedEngines(services.launch) as engines:
        for group in groups.values():
            group.sort(key=lambda run: run[0].point.seed)
            engines.retain(job.engine(arm) for _, job in group for arm in job.arms)
            load, job = group[0]
            begins = budget.allows(load.expected, START[load.point.device])
            for batch in [[run] for run in group] if job.shared else [group]:
                launch = engines.launch if job.shared else services.launch
                if not begins or not _serve(batch, launch, progress, logs, budget, commit):
                    progress.say("time is over; the same command continues from here")
                    return


def _serve(
    runs: Sequence[tuple[LoadPoint, Job]],
    launch: Launch,
    progress: Progress,
    logs: Path,
    budget: TimeBudget,
    commit: str | None,
) -> bool:
    """Serve runs, each from a cold cache, on engines that start once; whether there was time.

    One with a failed request ends them all: an engine that is gone would fail those that follow.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with start_engines(runs[0][1], launch, progress, logs) as fleet:
        for load, job in runs:
            if not budget.allows(load.expected):
                return False
            began = monotonic()
            for server in fleet.servers.values():
                server.reset()
            progress.say(job.output.name)
            arms = execute(job, launch, progress, fleet)
            if failed := sum(arm.failed for arm in arms.values()):
                raise EngineError(
                    f"{failed} requests failed in {job.output}",
                    hint="see error in its samples.jsonl, and logs/; the same command resumes "
                    "from here",
                )
            budget.note(load.expected, monotonic() - began)
            load.stored(commit)
    return True


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's experiments on a device, for some of its figures (``all``: for all of them).

    `scores` says where scores were measured already; None has them measured below `output`.
    `commit` names the code where a checkout cannot. `seconds` are what may be spent (0: no limit);
    no part is begun that would take longer. Of `part` (k, n) every n-th point of loads is measured,
    and all else by the first; what the others have measured by then is in the data, too.
    """

    name: str
    settings: Settings
    figures: Sequence[str]
    device: Device
    output: Path
    scores: Path | None = None
    commit: str | None = None
    seconds: float = 0.0
    part: tuple[int, int] = (1, 1)

    @property
    def experiments(self) -> list[str]:
        """What is needed, in the order of the figures."""
        figures = self.settings.figures.items()
        every = "all" in self.figures
        found = [figure.experiment for name, figure in figures if every or name in self.figures]
        return list(dict.fromkeys(found))

    @property
    def owned(self) -> frozenset[str]:
        """Names of the points of loads that this part measures, whatever the figures."""
        every = (point.name for name in self.settings.loads for point in self.points(name))
        return frozenset(share(list(dict.fromkeys(every)), self.part))

    def points(self, experiment: str) -> list[Point]:
        """The runs of a load."""
        return list(points(self.settings, experiment, self.device))

    def owns(self, experiment: str) -> bool:
        """Whether this part measures an experiment other than a load."""
        return self.part[0] == 1 and experiment in self.experiments

    def prompts(self, experiment: str) -> list[TimedPrompt]:
        """The prompts of a latency experiment."""
        sizes = self.settings.latencies[experiment].on(self.device)
        if sizes is None:
            return []
        found = []
        for label, point in sizes.points.items():
            identity = sizes.model_dump(mode="json", exclude={"points"})
            identity |= point.model_dump() | {"device": self.device}
            names = (
                point_name(self.device, experiment, label, repeat)
                for repeat in range(1, identity["repeats"] + 1)
            )
            files = [self.output / POINTS / f"{name}.json" for name in names]
            found.append(TimedPrompt.plan(f"{experiment}: {label}", label, identity, files))
        return found

    def missing(self, experiments: Mapping[str, RowExperiment]) -> dict[str, RowExperiment]:
        """Of attention, or of counts by layer, what is to be made, whatever the device."""
        own = [name for name in self.experiments if name in experiments and self.owns(name)]
        folder = self.output / DATA
        return {n: experiments[n] for n in own if not (folder / f"cpu-{n}.json").exists()}

    def score_settings(self) -> ScoreSettings | None:
        """The scores that are to be measured; None if there are none, or they are given."""
        found = self.settings.scores
        return found.on(self.device) if found and not self.scores and self.owns("scores") else None

    def run(self, services: Services, display: Display) -> bool:
        """Measure what is missing, as long as there is time, and write compact data.

        Single requests come first, then loads, one seed of all points after another, then scores.
        Returns whether there was time for all. Raises ConfigError before an engine starts where
        something is wrong.
        """
        read_published(self.settings.published)
        logs = self.output / "logs"
        if self.part[1] > 1:
            logs /= f"part-{self.part[0]}"
        writer, owned, budget = TrafficWriter(), self.owned, TimeBudget(self.seconds)
        loads = {
            name: [LoadPoint.plan(point, self.output, writer) for point in self.points(name)]
            for name in self.experiments
            if name in self.settings.loads
        }
        missing = [load for planned in loads.values() for load in planned if load.missing]
        own = [load for load in missing if load.point.name in owned]
        runs = [(load, job) for load in own if (job := load.job(services))]
        latencies = self.settings.latencies
        prompts = {n: self.prompts(n) for n in self.experiments if n in latencies and self.owns(n)}
        every = [prompt for found in prompts.values() for prompt in found]
        measure_prompts(every, self.commit, budget)
        for name, found in prompts.items():
            self._write(name, [one for p in found if not p.missing for one in p.stored()])
        self._measure_rows(budget)
        try:
            if not budget.stopped:
                serve_loads(runs, services, logs, display, budget, self.commit)
        finally:
            with locked(self.output / DATA):
                for name, planned in loads.items():
                    stored = (load.stored(self.commit) for load in planned)
                    self._write(name, [one for one in stored if one is not None])
        if not budget.stopped and (wanted := self.score_settings()) is not None:
            for model in wanted.models:
                serve_arms.measure(
                    serve_arms.ServeSettings(
                        output=self.output / SCORES,
                        commit=self.commit,
                        model=model,
                        dataset=tuple(wanted.datasets),
                        rows=wanted.rows,
                        device=self.device,
                        dtype="bfloat16" if self.device == "cuda" else "float32",
                    )
                )
        return not budget.stopped

    def _write(self, experiment: str, found: Sequence[StoredPoint]) -> None:
        if found:
            varies = self.settings.experiments[experiment].varies
            data = joined(self.name, experiment, self.device, varies, found)
            data.write(self.output / DATA)

    def _measure_rows(self, budget: TimeBudget) -> None:
        """One pass over the rows for all experiments with the same settings."""
        attentions = self.settings.attentions if self.device == "cpu" else {}
        for experiments, seconds in (attentions, _ATTENTION), (self.settings.layers, 0.0):
            left = self.missing(experiments)
            while left:
                sizes = next(iter(left.values())).cpu
                if seconds and not budget.allows(seconds * sizes.rows * len(sizes.arms)):
                    break
                alike = {name: one for name, one in left.items() if one.cpu == sizes}
                for data in measure_rows(self.name, alike, self.commit, counted=not seconds):
                    data.write(self.output / DATA)
                left = {name: one for name, one in left.items() if name not in alike}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left of an experiment or a model: `what` of all that there are, tokens, seconds."""

    name: str
    what: str
    left: int
    total: int
    tokens: int
    seconds: float


def estimate(plan: Reproduction) -> Iterator[Estimate]:
    """An estimate for each experiment that the figures need, in their order."""
    writer, settings = TrafficWriter(), plan.settings
    for name in plan.experiments:
        if name in settings.loads:
            yield _load(name, plan, writer)
        elif not plan.owns(name):
            continue
        elif name in settings.latencies:
            prompts = plan.prompts(name)
            left = [prompt for prompt in prompts if prompt.missing]
            # The first repeat is not kept, and a warm arm serves each prompt twice.
            repeats = [(prompt, len(prompt.files) + 1) for prompt in left]
            tokens = sum(2 * p.tokens * times * len(p.arms) for p, times in repeats)
            seconds = sum(p.seconds * times for p, times in repeats)
            seconds += START[plan.device] * bool(left)
            yield Estimate(name, "points", len(left), len(prompts), tokens, seconds)
        elif name == "scores":
            yield _scores(plan)
        else:
            seen = name in settings.attentions
            rows = (settings.attentions | settings.layers)[name].cpu
            total = rows.rows if plan.device == "cpu" or not seen else 0
            missing = plan.missing(settings.attentions if seen else settings.layers)
            count = total * (name in missing)
            work = count * len(rows.arms) * seen
            yield Estimate(name, "rows", count, total, work * _ROW, work * _ATTENTION)


def _load(experiment: str, plan: Reproduction, writer: TrafficWriter) -> Estimate:
    owned = plan.owned
    found = [point for point in plan.points(experiment) if point.name in owned]
    with TemporaryDirectory(prefix="picbench-") as folder:
        file = Path(folder, "requests.jsonl")
        loads = (LoadPoint.plan(point, plan.output, writer, file) for point in found)
        left = [load for load in loads if load.missing]
    seconds = sum(load.expected for load in left)
    served_tokens = sum(
        load.written.facts.mean_tokens * load.written.facts.requests * len(load.point.arms)
        for load in left
    )
    # On a CPU each arm has an engine of its own, on a GPU arms take turns.
    arms = max((len(load.point.arms) for load in left), default=0)
    seconds += START[plan.device] * (arms if plan.device == "cpu" else bool(left))
    return Estimate(experiment, "runs", len(left), len(found), int(served_tokens), seconds)


def _scores(plan: Reproduction) -> Estimate:
    settings = plan.score_settings()
    if settings is None:
        return Estimate("scores", "rows", 0, 0, 0, 0.0)
    total = settings.rows * len(settings.datasets) * len(settings.models)
    files = (plan.output / SCORES).glob("*.json")
    left = max(0, total - sum(len(json.loads(path.read_bytes())["prompt"]) for path in files))
    tokens = left * max(len(ARMS_OF.get(model, ())) for model in settings.models) * _ROW
    seconds = tokens / _BATCH[plan.device] + START[plan.device] * bool(left)
    return Estimate("scores", "rows", left, total, tokens, seconds)
