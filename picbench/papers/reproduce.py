"""A paper's experiments: what is measured of them, estimated and kept."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, groupby, product
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.files import locked
from picbench.papers import data, serve_arms
from picbench.papers.arm_scores import ARMS_OF, Case
from picbench.papers.data import START
from picbench.papers.parts import (
    QUESTION,
    STOCK,
    LoadPoint,
    PaperPart,
    RowsPart,
    Serving,
    TimedPrompt,
    expected_arm,
    plan_loads,
    plan_prompts,
    serve_prompt,
    stored,
)
from picbench.papers.settings import ReproduceConfig, Settings, read_published
from picbench.run import runner
from picbench.run.arm import ArmServer, SharedEngines, parse_arms
from picbench.run.schedule import Progress
from picbench.run.session import Services
from picbench.run.traffic_file import TrafficWriter, parse_traffic
from picbench.store.writer import log_name
from picbench.workloads import models

#: Folders below the output: compact data, scores row by row, and points, which are all that a
#: command needs to continue elsewhere.
DATA, SCORES, POINTS = "data", "scores", "points"

#: Prompt tokens a second of single requests, and of all arms of scores in one batch. CPU: two cores
#: of an AMD EPYC, testbed model; CUDA: H200, shapes of 7 and 8 billion weights.
_ALONE, _BATCH = {"cpu": 2_700, "cuda": 38_000}, {"cpu": 2_000, "cuda": 90_000}

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


def arm_names(specs: Iterable[str]) -> tuple[str, ...]:
    """What runs call arms; ConfigError for one that does not exist."""
    return tuple(arm.name for arm in parse_arms(specs))


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

    def files(self, experiment: str, label: str, numbers: Iterable[int]) -> list[Path]:
        """Files of a point; labels may have what no name can, such as ``8/s``."""
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
            files = self.files(experiment, label, range(1, sizes.repeats + 1))
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
                done=int(len(stored(files, identity)) == len(files)),
                tokens=2 * tokens,
                rounds=sizes.repeats + 1,  # The first one is not kept.
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
            files, arms = self.files(experiment, label, [seed]), named(*specs)
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
                done=len(stored(files, identity)),
                tokens=facts.mean_tokens * facts.requests * len(arms),
                # On a CPU each arm has an engine of its own, on a GPU arms take turns.
                engines=len(arms) if device == "cpu" else 1,
                label=label,
                identity=identity,
                files=files,
                commit=self.config.commit,
                seed=seed,
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
            serve_arms.measure_rows(*about, counted=counted).write(self.output / DATA)

        looks = 0 if counted else found.cpu.rows * len(found.cpu.arms)
        done = (self.output / DATA / f"cpu-{experiment}.json").exists()
        yield RowsPart(
            name=experiment,
            experiment=experiment,
            seconds=looks * _ATTENTION,
            what="rows",
            total=found.cpu.rows,
            tokens=looks * _ROW,
            engines=0,
            done=found.cpu.rows if done else 0,
            work=measure,
        )

    def scores(self) -> Iterator[RowsPart]:
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
            names = (Case(model, dataset).name for dataset in sizes.datasets)
            files = [self.output / SCORES / f"{name}.json" for name in names]
            total = sizes.rows * len(files)
            done = sum(len(json.loads(f.read_bytes())["prompt"]) for f in files if f.exists())
            tokens = max(0, total - done) * len(ARMS_OF.get(model, ())) * _ROW
            yield RowsPart(
                name=f"scores of {model}",
                experiment="scores",
                seconds=tokens / _BATCH[device],
                rank=1,
                what="rows",
                total=total,
                tokens=tokens,
                done=done,
                work=partial(serve_arms.measure, settings),
            )

    def run(self, services: Services, display: Display) -> bool:
        """Measure what is missing, as long as there is time, and write compact data.

        Single requests come first, then loads, one seed of all points after another, then rows.
        Returns whether there was time for all. Raises ConfigError before an engine starts where
        something is wrong.
        """
        read_published(self.settings.published)
        serving, budget = Serving(services=services), runner.TimeBudget(self.config.seconds or 0.0)
        parts = self.parts(self.output / "requests", serving)
        left = [part for part in self.own(parts) if part.left]
        loads = [part for part in left if isinstance(part, LoadPoint)]
        prompts = [part for part in left if isinstance(part, TimedPrompt)]
        others = [part for part in left if isinstance(part, RowsPart)]
        for prompt in prompts:
            # How long a repeat took is not kept with it.
            measured = len(stored(prompt.files, prompt.identity))
            serving.seconds[prompt.name] = [prompt.seconds] * measured
        serving.progress = display(sum(load.job.requests for load in loads))
        plans = [
            *plan_prompts(prompts),
            *plan_loads(loads),
            runner.ExperimentPlan(name="rows", facts={}, engines={}, cells=others, rounds=1),
        ]
        try:
            self._measure(plans, serving, budget)
        finally:
            with locked(self.output / DATA):
                for name, found in groupby(parts, attrgetter("experiment")):
                    points = [(part.files, stored(part.files, part.identity)) for part in found]
                    whole = [kept for files, kept in points if len(kept) == len(files)]
                    if rounds := list(chain.from_iterable(whole)):
                        varies = self.settings.experiments[name].varies
                        about = (self.name, name, self.config.device, varies)
                        data.joined(*about, rounds).write(self.output / DATA)
        return not budget.stopped

    def _measure(
        self,
        plans: Iterable[runner.ExperimentPlan],
        serving: Serving,
        budget: runner.TimeBudget,
    ) -> None:
        """Measure plan by plan until there is no time; engines write below the output."""
        device, (part, of) = self.config.device, self.config.part
        logs, say = self.output / "logs" / (f"part-{part}" if of > 1 else ""), serving.progress.say

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
    with TemporaryDirectory(prefix="picbench-") as folder:
        own = plan.own(plan.parts(Path(folder), Serving()))
    for name, found in groupby(own, attrgetter("experiment")):
        parts = list(found)
        left = [part for part in parts if part.left]
        tokens = sum(part.tokens * part.rounds for part in left)
        seconds = sum(part.seconds * part.rounds for part in left)
        seconds += START[plan.config.device] * max((part.engines for part in left), default=0)
        counts = (sum(part.left for part in left), sum(part.total for part in parts))
        yield Estimate(name, parts[0].what, *counts, int(tokens), seconds)
