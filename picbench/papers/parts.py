"""Parts of a paper's experiments: single prompts, runs of loads, rows; how each is measured."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request
from picbench.errors import EngineError
from picbench.papers import data
from picbench.papers.data import StoredPoint
from picbench.papers.settings import BASE, TESTBED, LatencyPoint
from picbench.run import runner
from picbench.run.arm import Fleet, shareable
from picbench.run.job import Job, can_resume, prepare
from picbench.run.schedule import Progress
from picbench.run.session import Services, execute
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.store.reader import read_run
from picbench.store.writer import MANIFEST
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Tokens of the question of a single request, arms of stock vLLM, and how an arm ends whose chunks
#: are not in the cache.
QUESTION, STOCK, COLD = 32, ("full", "prefix"), " cold"

#: Prompt tokens a second of requests that run together, and what a token of a cached chunk takes of
#: the time of one that is computed. CPU: two cores of an AMD EPYC, testbed model; CUDA: H200,
#: shapes of 7 and 8 billion weights.
_TOGETHER, _REUSED = {"cpu": 3_400, "cuda": 41_000}, 0.2


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
    """A part of an experiment: points, runs or rows (`what`), some of them `done`.

    Each round of a point is kept in one of `files`, with the settings that decide its numbers, its
    `identity`. `commit` names the code where a checkout cannot. For estimates: `tokens` of a
    round's prompts, the number of `rounds`, and of `engines` to start.
    """

    experiment: str
    what: str
    total: int = 1
    done: int
    tokens: float
    rounds: int = 1
    engines: int = 1
    label: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()
    commit: str | None = None

    @property
    def left(self) -> int:
        """How many are to be measured."""
        return max(0, self.total - self.done)


def stored(files: Iterable[Path], identity: Mapping[str, Any]) -> list[StoredPoint]:
    """The rounds of a point that are measured. Raises ConfigError for those of other settings."""
    found = (StoredPoint.find(file, identity) for file in files)
    return [one for one in found if one is not None]


@dataclass(frozen=True, kw_only=True)
class RowsPart(PaperPart):
    """Rows; `work` measures those that are missing, and starts what it needs."""

    work: Callable[[], object]

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Measure the rows, and write what was measured."""
        self.work()
        return {}


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


def serve_prompt(engine: Engine, name: str, *, arm: str, size: LatencyPoint) -> dict[str, float]:
    """Figures of one request of a size under an arm: milliseconds, and tokens."""
    name = f"{name} {arm}"
    given = runner.random_chunks(size.chunks, size.tokens, name)

    def ask(name: str) -> Any:
        # A head of its own, so that one chunk is not a prefix that was there before.
        head = runner.random_text(BLOCK_SIZE, f"{name} head")
        question = runner.random_text(QUESTION, f"{name} question")
        algorithm = "prefix" if arm in STOCK else arm.removesuffix(COLD)
        request = Request([head, *given, question], algorithm)
        [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
        return result

    if not arm.endswith(COLD) and arm != "full":
        ask(f"{name} before")
        # Orders that begin alike would share what follows from it.
        given = [*given[1:], given[0]]
    found = ask(name)
    ttft, counts = found.timings.ttft, found.counts
    return {"ttft_ms": ttft * 1e3, "linked": counts.linked, "compiled": counts.compiled}


def plan_prompts(prompts: Iterable[TimedPrompt]) -> Iterator[runner.ExperimentPlan]:
    """Prompts to serve, those for the same model and type together."""
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
        yield runner.ExperimentPlan(
            name="prompts", facts={}, engines=engines, cells=group, rounds=most, few=most
        )


@dataclass(frozen=True, kw_only=True)
class LoadPoint(PaperPart):
    """A point of a load under a seed: a run with these `settings`; `facts` of its requests."""

    seed: int
    settings: Mapping[str, Any]
    facts: TrafficFacts
    serving: Serving

    @cached_property
    def job(self) -> Job:
        """The run to serve or to resume. Raises ConfigError where its folder has another one.

        What cannot be resumed is removed: a run in which requests failed, or one of other code.
        """
        output, services = Path(self.settings["output"]), self.serving.services
        if (output / MANIFEST).exists():
            run = read_run(output)
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
                hint="see error in its samples.jsonl, and logs/; the same command resumes from "
                "here",
            )
        about = (self.identity, self.label, self.seed, self.facts)
        data.stored_run(*about, read_run(job.output), self.commit).write(self.files[0])
        return {}


def expected_arm(arm: str, facts: TrafficFacts, device: str) -> float:
    """About how many seconds an arm takes until all requests have arrived and are served."""
    tokens = facts.mean_tokens
    if arm.partition(":")[0] not in STOCK:
        tokens = facts.fresh_tokens + _REUSED * (facts.mean_tokens - facts.fresh_tokens)
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
