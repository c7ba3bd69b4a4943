"""A paper's experiments: prompts and loads served, rows looked at; measured, estimated and kept."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.errors import EngineError
from picbench.files import locked
from picbench.papers import data, layers, serve_arms
from picbench.papers.arm_scores import ARMS_OF, Case
from picbench.papers.data import START, Estimate, StoredPoint
from picbench.papers.serve_arms import QUESTION, STOCK, serve_prompt
from picbench.papers.settings import BASE, TESTBED, ReproduceConfig, Settings, read_published
from picbench.run import runner
from picbench.run.arm import ArmServer, Fleet, SharedEngines, parse_arms, shareable
from picbench.run.job import Job, can_resume, prepare
from picbench.run.schedule import Progress
from picbench.run.session import Services, execute
from picbench.run.traffic_file import TrafficWriter, parse_traffic
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.store.reader import read_run
from picbench.store.writer import MANIFEST, log_name
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Folders below the output: compact data, scores, and points, all that one needs to continue.
DATA, SCORES, POINTS = "data", "scores", "points"

#: Prompt tokens a second: of single requests, of many, and of scores' arms in one batch. CPU: two
#: cores of an AMD EPYC, testbed model; CUDA: H200, shapes of 7 and 8 billion weights.
_ALONE, _TOGETHER = {"cpu": 2_700, "cuda": 38_000}, {"cpu": 3_400, "cuda": 41_000}
_BATCH = {"cpu": 2_000, "cuda": 90_000}

#: Prompt tokens of a row under an arm, and seconds of its attention on a CPU.
_ROW, _ATTENTION = 1_500, 5.0

#: Settings by which a run is recognised; its files may have moved.
_DECISIVE = ("algo", "model", "kv_blocks", "context", "max_running", "compile_order", "cache")


def arm_names(specs: Iterable[str]) -> tuple[str, ...]:
    """What runs call arms; ConfigError for one that does not exist."""
    return tuple(arm.name for arm in parse_arms(specs))


@dataclass(slots=True)
class Serving(runner.RoundsRecord):
    """What serves parts, and what the engines are that are up; parts have files of their own."""

    services: Services = field(default_factory=Services)
    progress: Progress = field(default_factory=partial(Progress, 0, None))
    described: runner.Described = field(default_factory=dict)

    def begin(self, engines: runner.Engines, described: runner.Described, seconds: float) -> None:
        """Keep what the engines are, for the manifests of runs."""
        self.described = described


@dataclass(frozen=True, kw_only=True)
class PaperPart(runner.Cell):
    """A part of an experiment: points, runs or rows (`what`), of which some are `left` to measure.

    Each round of a point is kept in one of `files`, with the settings that decide its numbers, its
    `identity`. `commit` names the code where a checkout cannot. For estimates: `tokens` of a
    round's prompts, and the number of `engines` to start.
    """

    experiment: str
    what: str
    total: int = 1
    left: int
    tokens: float
    engines: int = 1
    label: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()
    commit: str | None = None

    def measured(self) -> list[StoredPoint]:
        """All rounds of a point; none as long as some are missing."""
        found = StoredPoint.read(self.files, self.identity)
        return found if len(found) == len(self.files) else []


@dataclass(frozen=True, kw_only=True)
class RowsPart(PaperPart):
    """Rows; `work` measures those that are missing, and starts what it needs."""

    work: Callable[[], object]

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Measure the rows, and write what was measured."""
        self.work()
        return {}


@dataclass(frozen=True, kw_only=True)
class ScorePart(PaperPart):
    """Rows that are scored as these settings say; see `serve_arms.plan_scores`."""

    settings: serve_arms.ServeSettings


class TimedPrompt(PaperPart):
    """Single requests of one size under all arms in turn, in every round."""

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve a repeat, and write it."""
        figures, wanted = super().serve(engines, number), self.identity
        facts = provenance.facts(*provenance.ENGINE, device=wanted["device"], commit=self.commit)
        model = models.resolve(wanted["model"])
        weights = TESTBED if model.name == BASE else model.label
        caption = (
            f"{facts['gpu']}; vLLM {facts['vllm']}, torch {facts['torch']}; commit "
            f"{facts['commit'][:7]}. {weights}, random tokens, type {wanted['dtype']}; one "
            f"request at a time, arms in turn, {wanted['repeats']} repeats. Chunks are cached "
            "but for full, prefix and cold arms."
        )
        size = {"chunks": wanted["chunks"], "chunk_tokens": wanted["tokens"]}
        size["mean_tokens"] = BLOCK_SIZE + size["chunks"] * size["chunk_tokens"] + QUESTION
        arms = {}
        for arm, found in figures.items():
            arms[arm] = data.PointArm({name: round(value, 3) for name, value in found.items()})
        about = data.conditions(caption, weights, facts["gpu"], facts["commit"])
        point = data.PointData(self.label, number, size, arms)
        StoredPoint(wanted, about, point).write(self.files[number - 1])
        return figures


def plan_prompts(prompts: Iterable[TimedPrompt]) -> Iterator[runner.ExperimentPlan]:
    """What is left of prompts; those for the same model and type are served together."""
    groups: dict[tuple[str, str, str], list[TimedPrompt]] = {}
    for prompt in prompts:
        of = prompt.identity
        groups.setdefault((of["model"], of["device"], of["dtype"]), []).append(prompt)
    for (model, device, dtype), group in groups.items():
        sizes = (prompt.identity["chunks"] * prompt.identity["tokens"] for prompt in group)
        context = max(sizes) + QUESTION + 2 * BLOCK_SIZE
        config = EngineConfig(
            model=str(models.resolve(model).path),
            device=device,
            dtype=dtype,
            context=context,
            batch_tokens=min(8192, max(2048, context)),
            kv_blocks=max(1024, context // BLOCK_SIZE * 5),
            max_requests=8,
            tiers="",
        )
        engines = {"picbench": config}
        if any(arm in STOCK for prompt in group for arm in prompt.arms):
            engines["stock"] = replace(config, stock=True, algorithm="prefix")
        most = max(len(prompt.files) for prompt in group)
        left = [prompt for prompt in group if prompt.left]
        yield runner.ExperimentPlan(
            name="prompts", facts={}, engines=engines, cells=left, rounds=most, few=most
        )


@dataclass(frozen=True, kw_only=True)
class LoadPoint(PaperPart):
    """A run with these `settings`, whose requests have these `facts`; its `rank` is its seed."""

    settings: Mapping[str, Any]
    facts: TrafficFacts
    serving: Serving

    @cached_property
    def job(self) -> Job:
        """The run to serve or to resume. Raises ConfigError where its folder has another one."""
        output, services = Path(self.settings["output"]), self.serving.services
        if (output / MANIFEST).exists():
            run = read_run(output)
            # Requests of it failed, or it began with other code.
            if run.manifest["status"] != "complete" and not can_resume(run):
                shutil.rmtree(output)
        config = parse_config(self.settings)
        return prepare(config, services.load, services.memory, shared=config.device == "cuda")

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve the run from a cold cache, and keep its point.

        Raises EngineError if a request fails.
        """
        job, serving = self.job, self.serving
        servers = {arm.name: engines[arm.name] for arm in job.arms}
        for server in servers.values():
            server.reset()
        fleet = Fleet(servers, {name: serving.described[name] for name in servers})
        arms = execute(job, serving.services.launch, serving.progress, fleet)
        if failed := sum(arm.failed for arm in arms.values()):
            raise EngineError(
                f"{failed} requests failed in {job.output}",
                hint="see error in its samples.jsonl, and logs/; the same command resumes it",
            )
        about = (self.identity, self.label, self.rank, self.facts)
        data.stored_run(*about, read_run(job.output), self.commit).write(self.files[0])
        return {}


def expected_arm(arm: str, facts: TrafficFacts, device: str) -> float:
    """About how many seconds an arm takes until all requests have arrived and are served.

    A token of a cached chunk takes a fifth of the time of one that is computed.
    """
    tokens = facts.mean_tokens
    if arm.partition(":")[0] not in STOCK:
        tokens = facts.fresh_tokens + 0.2 * (facts.mean_tokens - facts.fresh_tokens)
    arriving = facts.requests / facts.rate if facts.rate else 0.0
    return max(facts.requests * tokens / _TOGETHER[device], arriving)


def plan_loads(loads: Iterable[LoadPoint]) -> Iterator[runner.ExperimentPlan]:
    """Runs to serve, those on the same engines together.

    Where arms take turns on an engine, they need not be the same in all runs on it.
    """
    groups: dict[tuple[EngineConfig, ...], list[LoadPoint]] = {}
    for load in loads:
        configs = [load.job.engine(arm) for arm in load.job.arms]
        if load.job.shared:
            ours = (shareable(config) for config in configs if not config.stock)
            configs = list(dict.fromkeys(ours)) or configs
        groups.setdefault(tuple(configs), []).append(load)
    for group in groups.values():
        engines = {arm.name: load.job.engine(arm) for load in group for arm in load.job.arms}
        yield runner.ExperimentPlan(name="loads", facts={}, engines=engines, cells=group, rounds=1)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's experiments as `config` says, below `output`.

    Of its part (k, n) every n-th point of loads is measured, and all else by the first; what the
    others have measured by then is in the data, too.
    """

    name: str
    settings: Settings
    config: ReproduceConfig
    output: Path
    writer: TrafficWriter = field(default_factory=TrafficWriter)

    def parts(self, requests: Path, serving: Serving) -> list[PaperPart]:
        """The parts of experiments that the figures need, in their order.

        Requests of loads are written to a folder. The first share alone measures all but loads.
        """
        settings, wanted, first = self.settings, self.config.figures, self.config.part[0] == 1
        figures = settings.figures.items()
        named = (one.experiment for name, one in figures if "all" in wanted or name in wanted)
        found: list[PaperPart] = []
        for name in dict.fromkeys(named):
            if name in settings.loads:
                found += self.loads(name, requests, serving)
            elif first and name in settings.latencies:
                found += self.prompts(name)
            elif first:
                found += self.scores() if name == "scores" else self.rows(name)
        return found

    def own(self, parts: Iterable[PaperPart]) -> list[PaperPart]:
        """What this share measures of all parts."""
        loads = [part for part in parts if isinstance(part, LoadPoint)]
        mine = {load.name for load in runner.share(loads, self.config.part)}
        return [part for part in parts if part.name in mine or not isinstance(part, LoadPoint)]

    def _files(self, experiment: str, label: str, numbers: Iterable[int]) -> list[Path]:
        # Labels may have what no name can, such as ``8/s``.
        name = f"{self.config.device}-{experiment}-" + re.sub(r"[^\w.,+ -]", "-", label)
        return [self.output / POINTS / f"{name}-seed{number}.json" for number in numbers]

    def prompts(self, experiment: str) -> Iterator[TimedPrompt]:
        """The prompts of a latency experiment, none where it has no sizes for the device."""
        device = self.config.device
        sizes = self.settings.latencies[experiment].on(device)
        if sizes is None:
            return
        shared = sizes.model_dump(mode="json", exclude={"points"}) | {"device": device}
        for rank, (label, point) in enumerate(sizes.points.items()):
            arms = {}
            for arm in sizes.arms:
                serve = partial(serve_prompt, arm=arm, size=point)
                arms[arm] = runner.ServedArm("stock" if arm in STOCK else "picbench", serve, serve)
            identity = shared | point.model_dump()
            files = self._files(experiment, label, range(1, sizes.repeats + 1))
            # A warm arm compiles its chunks first, which takes about as long as full recompute.
            tokens = (point.chunks * point.tokens + QUESTION) * len(arms)
            yield TimedPrompt(
                name=f"{experiment}: {label}",
                arms=arms,
                seconds=tokens * 1.2 / _ALONE[device],
                rank=rank,
                most=sizes.repeats,
                experiment=experiment,
                what="points",
                left=int(len(StoredPoint.read(files, identity)) < len(files)),
                tokens=2 * tokens,
                label=label,
                identity=identity,
                files=files,
                commit=self.config.commit,
            )

    def loads(self, experiment: str, requests: Path, serving: Serving) -> Iterator[LoadPoint]:
        """The points of a load, seed by seed; none where it has no sizes for the device.

        Raises ConfigError for an arm that does not exist.
        """
        device = self.config.device
        sizes = self.settings.loads[experiment].on(device)
        if sizes is None:
            return
        # Each reading of arms reads what is installed, which takes longer than all the rest.
        named = cache(lambda *specs: arm_names(specs))
        for seed, label in product(sizes.seeds, sizes.points):
            own: dict[str, Any] = {"arms": sizes.arms, "run": {}, "kv_blocks": sizes.kv_blocks}
            own |= sizes.points[label]
            specs, run, blocks = (own.pop(name) for name in ("arms", "run", "kv_blocks"))
            settings = sizes.model_dump(include={"model", "max_running", "context"})
            settings |= sizes.run | run | {"device": device, "kv_blocks": blocks}
            files, arms = self._files(experiment, label, [seed]), named(*specs)
            name, model = files[0].stem, models.resolve(settings["model"])
            traffic = parse_traffic(sizes.common | own | {"seed": seed})
            written = self.writer.write(requests / f"{name}.jsonl", traffic, model)
            settings |= {
                "context": settings["context"] or model.context,
                "algo": arms,
                "requests": str(requests / f"{name}.jsonl"),
                "output": str(self.output / "runs" / name),
            }
            identity = {name: settings[name] for name in _DECISIVE if name in settings}
            identity |= {"algo": list(arms), "requests": written.fingerprint}
            facts = written.facts
            yield LoadPoint(
                name=name,
                seconds=sum(expected_arm(arm, facts, device) for arm in arms),
                rank=seed,
                most=1,
                experiment=experiment,
                what="runs",
                left=1 - len(StoredPoint.read(files, identity)),
                tokens=facts.mean_tokens * facts.requests * len(arms),
                # On a CPU each arm has an engine of its own, on a GPU arms take turns.
                engines=len(arms) if device == "cpu" else 1,
                label=label,
                identity=identity,
                files=files,
                commit=self.config.commit,
                settings=settings,
                facts=facts,
                serving=serving,
            )

    def rows(self, experiment: str) -> Iterator[RowsPart]:
        """Rows whose attention is looked at, which needs a CPU, or whose work is counted."""
        counted = experiment in self.settings.layers
        found = (self.settings.layers if counted else self.settings.attentions)[experiment]
        if not counted and self.config.device != "cpu":
            return

        def measure() -> None:
            about = (self.name, experiment, found, self.config.commit)
            layers.measure_rows(*about, counted=counted).write(self.output / DATA)

        total = found.cpu.rows
        looks = 0 if counted else total * len(found.cpu.arms)
        yield RowsPart(
            name=experiment,
            experiment=experiment,
            seconds=looks * _ATTENTION,
            what="rows",
            total=total,
            tokens=looks * _ROW,
            engines=0,
            left=0 if (self.output / DATA / f"cpu-{experiment}.json").exists() else total,
            work=measure,
        )

    def scores(self) -> Iterator[ScorePart]:
        """The rows that are to be scored, by model; none where scores are given."""
        device = self.config.device
        sizes = self.settings.scores.on(device) if self.settings.scores else None
        if sizes is None or self.config.scores:
            return
        for model in sizes.models:
            settings = serve_arms.ServeSettings(
                output=self.output / SCORES,
                commit=self.config.commit,
                model=model,
                dataset=tuple(sizes.datasets),
                rows=sizes.rows,
                device=device,
                dtype="bfloat16" if device == "cuda" else "float32",
            )
            files = [self.output / SCORES / f"{Case(model, d).name}.json" for d in sizes.datasets]
            done = sum(len(json.loads(f.read_bytes())["prompt"]) for f in files if f.exists())
            left = max(0, sizes.rows * len(files) - done)
            tokens = left * len(ARMS_OF.get(model, ())) * _ROW
            yield ScorePart(
                name=f"scores of {model}",
                experiment="scores",
                seconds=tokens / _BATCH[device],
                what="rows",
                total=sizes.rows * len(files),
                tokens=tokens,
                left=left,
                settings=settings,
            )

    def run(self, services: Services, display: Callable[[int], Progress]) -> bool:
        """Measure what is missing, as long as there is time, and write compact data.

        Single requests come first, then loads, seed after seed, then rows.
        Returns whether there was time for all. Raises ConfigError before an engine starts where
        something is wrong.
        """
        read_published(self.settings.published)
        serving = Serving(services=services)
        parts = self.parts(self.output / "requests", serving)
        own = self.own(parts)
        prompts = [part for part in own if isinstance(part, TimedPrompt)]
        loads = [part for part in own if isinstance(part, LoadPoint) and part.left]
        others = [part for part in own if isinstance(part, RowsPart) and part.left]
        scored = [part.settings for part in own if isinstance(part, ScorePart) and part.left]
        for prompt in prompts:
            # How long a repeat took is not kept with it.
            measured = len(StoredPoint.read(prompt.files, prompt.identity))
            serving.seconds[prompt.name] = [prompt.seconds] * measured
        serving.progress = display(sum(load.job.requests for load in loads))
        plans = [
            *plan_prompts(prompts),
            *plan_loads(loads),
            runner.ExperimentPlan(name="rows", facts={}, engines={}, cells=others, rounds=1),
            *map(serve_arms.plan_scores, scored),
        ]
        try:
            return self._measure(plans, serving)
        finally:
            with locked(self.output / DATA):
                for name, found in groupby(parts, attrgetter("experiment")):
                    if rounds := [one for part in found for one in part.measured()]:
                        varies = self.settings.experiments[name].varies
                        about = (self.name, name, self.config.device, varies)
                        data.joined(*about, rounds).write(self.output / DATA)

    def _measure(self, plans: Sequence[runner.ExperimentPlan], serving: Serving) -> bool:
        """Measure plan by plan; whether there was time for all. Engines write below the output."""
        device, (part, of), say = self.config.device, self.config.part, serving.progress.say
        logs = self.output / "logs" / (f"part-{part}" if of > 1 else "")
        budget = runner.TimeBudget(self.config.seconds or 0.0)

        def launch(name: str, config: EngineConfig, log: Path) -> ArmServer:
            logs.mkdir(parents=True, exist_ok=True)
            return serving.services.launch(name, config, logs / log_name(log.stem))

        with SharedEngines(launch) as shared:
            for plan in plans:
                if plan.done(serving):
                    continue
                least = min(cell.seconds for cell in plan.cells)
                if not budget.allows(least, START[device] if plan.engines else 0.0):
                    say("time is over; the same command continues from here")
                    break
                shared.retain(plan.engines.values())
                turns = plan.name == "loads" and device == "cuda"
                runner.run(plan, serving, say, budget, shared.launch if turns else launch)
                budget.stopped = not plan.done(serving)
        return not budget.stopped


def estimate(plan: Reproduction) -> Iterator[Estimate]:
    """An estimate for each experiment that the figures need, in their order."""
    with TemporaryDirectory(prefix="picbench-") as folder:
        own = plan.own(plan.parts(Path(folder), Serving()))
    for name, found in groupby(own, attrgetter("experiment")):
        parts = list(found)
        left = [part for part in parts if part.left]
        # The first round of prompts is not kept.
        rounds = [(part, max(1, len(part.files) + bool(part.arms))) for part in left]
        tokens = sum(part.tokens * number for part, number in rounds)
        seconds = sum(part.seconds * number for part, number in rounds)
        seconds += START[plan.config.device] * max((part.engines for part in left), default=0)
        counts = (sum(part.left for part in left), sum(part.total for part in parts))
        yield Estimate(name, parts[0].what, *counts, int(tokens), seconds)
