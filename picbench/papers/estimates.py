"""How long a paper's experiments will take, before anything runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from picbench.inputs.traffic_file import TrafficWriter, Written
from picbench.measure.algorithms.arm_sets import ARMS_OF
from picbench.output.run_directory import MANIFEST
from picbench.papers.budget import (
    QUESTION,
    START,
    Room,
    expected_arm,
    expected_attention,
    expected_load,
    latency_serves,
)
from picbench.papers.experiments.load_experiment import identity_of
from picbench.papers.experiments.point_store import StoredPoint
from picbench.papers.paper_settings import Point, ScoreSettings, points
from picbench.papers.reproduction import Reproduction
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Prompt tokens of a row under an arm, and tokens a second of all arms in one batch.
_ROW, _BATCH = 1_500, {"cpu": 2_000, "cuda": 90_000}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left of an experiment: units of work of all that there are, tokens, seconds."""

    experiment: str
    what: str
    left: int
    total: int
    tokens: int
    seconds: float


def estimate(plan: Reproduction) -> Iterator[Estimate]:
    """An estimate for each experiment that the figures need, in their order.

    Engines start once for all experiments that are served by the same ones, which counts as a part
    of the first of these.
    """
    kinds: set[object] = set()
    owned, writer = plan.owned, TrafficWriter()
    for experiment in plan.experiments:
        if not (plan.is_first_part or experiment in plan.settings.loads):
            continue
        if experiment in plan.settings.loads:
            every = points(plan.settings, experiment, plan.device)
            found = [point for point in every if point.name in owned]
            yield _load(experiment, found, plan, kinds, writer)
        elif experiment in plan.settings.latencies:
            yield _latency(experiment, plan, kinds)
        elif experiment in plan.settings.attentions:
            yield _attention(experiment, plan)
        elif experiment in plan.settings.layers:
            yield _layers(experiment, plan)
        else:
            yield _scores(plan.score_settings(), plan)


def _attention(experiment: str, plan: Reproduction) -> Estimate:
    """Attention; that of one pass counts as a part of the first experiment."""
    settings, left = plan.settings.attentions[experiment].cpu, plan.missing_attention
    if plan.device != "cpu":
        return Estimate(experiment, "rows", 0, 0, 0, 0.0)
    rows = settings.rows if experiment in left else 0
    seconds = expected_attention(settings) if experiment == next(iter(left), None) else 0.0
    tokens = rows * len(settings.arms) * _ROW
    return Estimate(experiment, "rows", rows, settings.rows, tokens, seconds)


def _layers(experiment: str, plan: Reproduction) -> Estimate:
    """Counts, which are made in no time."""
    rows = plan.settings.layers[experiment].cpu.rows
    return Estimate(experiment, "rows", rows * (experiment in plan.missing_layers), rows, 0, 0.0)


def _load(
    experiment: str,
    found: Sequence[Point],
    plan: Reproduction,
    kinds: set[object],
    writer: TrafficWriter,
) -> Estimate:
    sizes: dict[str, TrafficFacts] = {}
    with TemporaryDirectory(prefix="picbench-") as folder:
        file = Path(folder, "requests.jsonl")
        left = [point for point in found if not _complete(plan, point, writer, file)]
        for point in left:
            if point.label not in sizes:
                sizes[point.label] = _write(point, writer, file).facts
    wanted = {_engines(point) for point in left}
    starts = len(wanted - kinds) * START[plan.device]
    kinds |= wanted
    engines = max((len(point.arms) for point in left), default=0) if plan.device == "cpu" else 1
    seconds = sum(expected_load(point, sizes[point.label]) for point in left)
    return Estimate(
        experiment,
        "runs",
        len(left),
        len(found),
        int(sum(_tokens(sizes[point.label]) * len(point.arms) for point in left)),
        seconds * _factor(plan, experiment) + starts * engines,
    )


def _engines(point: Point) -> object:
    """What points are served by the same engines; on a GPU arms take turns."""
    arms = () if point.device == "cuda" else point.arms
    return arms, repr(sorted(point.run.items()))


def _factor(plan: Reproduction, experiment: str) -> float:
    """By how much the points of an experiment that are measured took longer than expected."""
    expected = took = 0.0
    for name in sorted(plan.store.folder.glob(f"{plan.device}-{experiment}-*.json")):
        stored = StoredPoint.read(name)
        served = TrafficFacts(**{"users": 1, **stored.point.facts})  # type: ignore[arg-type]
        room = Room.of(stored.identity)
        for arm, found in stored.point.arms.items():
            expected += expected_arm(arm, served, plan.device, room)
            took += found.metrics["makespan_s"] or 0.0
    return took / expected if expected else 1.0


def _tokens(facts: TrafficFacts) -> float:
    return facts.mean_tokens * facts.requests


def _write(point: Point, writer: TrafficWriter, file: Path) -> Written:
    return writer.write(file, point.traffic, models.resolve(point.run["model"]))


def _complete(plan: Reproduction, point: Point, writer: TrafficWriter, file: Path) -> bool:
    """Whether the point is measured; ConfigError for one with other settings or requests."""
    if plan.store.has(point.name):
        written = _write(point, writer, file)
        return plan.store.find(point.name, identity_of(point, written)) is not None
    path = plan.output / "runs" / point.name / MANIFEST
    return path.exists() and json.loads(path.read_bytes())["status"] == "complete"


def _latency(experiment: str, plan: Reproduction, kinds: set[object]) -> Estimate:
    run = plan.latency(experiment)
    if run is None:
        return Estimate(experiment, "points", 0, 0, 0, 0.0)
    missing, settings = run.missing, run.settings
    tokens = sum(point.chunks * point.tokens + QUESTION for point in missing.values())
    seconds = sum(run.expected(label) for label in missing)
    if missing and run.engine_kind not in kinds:
        kinds.add(run.engine_kind)
        seconds += START[plan.device]
    total, served = len(settings.points), 2 * tokens * latency_serves(settings)
    return Estimate(experiment, "points", len(missing), total, served, seconds)


def _scores(settings: ScoreSettings | None, plan: Reproduction) -> Estimate:
    if settings is None:
        return Estimate("scores", "rows", 0, 0, 0, 0.0)
    total = settings.rows * len(settings.datasets) * len(settings.models)
    done = sum(
        len(json.loads(path.read_bytes())["prompt"]) for path in plan.score_folder.glob("*.json")
    )
    left = max(0, total - done)
    arms = max(len(ARMS_OF.get(model, ())) for model in settings.models)
    tokens = left * arms * _ROW
    seconds = tokens / _BATCH[plan.device] + (START[plan.device] if left else 0)
    return Estimate("scores", "rows", left, total, tokens, seconds)
