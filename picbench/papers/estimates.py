"""How long a paper's experiments will take, before anything runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from picbench.inputs.traffic_file import write_traffic
from picbench.measure.frontier.arm_sets import ARMS_OF
from picbench.output.run_directory import MANIFEST
from picbench.papers.experiments.latency_experiment import QUESTION, STOCK
from picbench.papers.paper_settings import LatencySettings, Point, ScoreSettings, points
from picbench.papers.reproduction import Reproduction
from picbench.workloads import models

#: Prompt tokens a second. CPU: two cores of an AMD EPYC, testbed model, README's demo. CUDA: H200,
#: Llama-3.1-8B's shape, results/gpu/load.md and context.md. Others are taken as `other`.
SPEEDS: Mapping[str, Mapping[str, float]] = {
    "cpu": {"full": 3_400, "prefix": 3_800, "other": 9_600},
    "cuda": {"full": 45_000, "prefix": 47_000, "epic": 72_000, "mepic": 98_000, "other": 60_000},
}

#: Tokens a second of one request at a time, of which nothing is cached.
_ALONE: Mapping[str, float] = {"cpu": 2_700, "cuda": 38_000}

#: Seconds until an engine answers: start, compilation, graphs.
START: Mapping[str, float] = {"cpu": 25, "cuda": 75}

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
    """An estimate for each experiment that the figures need, in their order."""
    for experiment in plan.experiments:
        if experiment in plan.settings.loads:
            found = list(points(plan.settings, experiment, plan.device))
            yield _load(experiment, found, plan)
        elif experiment in plan.settings.latencies:
            latency = plan.latency(experiment)
            settings = getattr(plan.settings.latencies[experiment], plan.device)
            missing = list(latency.missing) if latency else []
            yield _latency(experiment, settings, missing, plan.device)
        else:
            yield _scores(plan.score_settings(), plan)


def _load(experiment: str, found: Sequence[Point], plan: Reproduction) -> Estimate:
    left = [point for point in found if not _complete(plan.output / "runs" / point.name)]
    sizes: dict[str, tuple[int, float]] = {}
    with TemporaryDirectory(prefix="picbench-") as folder:
        for point in left:
            if point.label not in sizes:
                sizes[point.label] = _size(point, Path(folder))
    speeds = SPEEDS[plan.device]
    seconds = 0.0
    for point in left:
        tokens, arriving = sizes[point.label]
        seconds += sum(max(tokens / _speed(speeds, arm), arriving) for arm in point.arms)
    starts = len({(point.arms, repr(sorted(point.run.items()))) for point in left})
    engines = max((len(point.arms) for point in left), default=0)
    return Estimate(
        experiment,
        "runs",
        len(left),
        len(found),
        sum(sizes[point.label][0] * len(point.arms) for point in left),
        seconds + starts * engines * START[plan.device],
    )


def _size(point: Point, folder: Path) -> tuple[int, float]:
    """Prompt tokens of a point's requests, and seconds until the last one arrives."""
    model = models.resolve(point.run["model"])
    facts = write_traffic(folder / "requests.jsonl", point.traffic, model).facts
    arriving = facts.requests / facts.rate if facts.rate else 0.0
    return int(facts.mean_tokens * facts.requests), arriving


def _speed(speeds: Mapping[str, float], arm: str) -> float:
    return speeds.get(arm.partition(":")[0], speeds["other"])


def _complete(directory: Path) -> bool:
    path = directory / MANIFEST
    return path.exists() and json.loads(path.read_bytes())["status"] == "complete"


def _latency(
    experiment: str, settings: LatencySettings | None, missing: Sequence[str], device: str
) -> Estimate:
    if settings is None:
        return Estimate(experiment, "points", 0, 0, 0, 0.0)
    # A warm arm compiles its chunks first, which takes about as long as full recompute.
    sizes = [settings.points[label].chunks * settings.points[label].tokens for label in missing]
    tokens = sum(sizes) + QUESTION * len(sizes)
    serves = (settings.repeats + 1) * len(settings.arms)
    engines = 1 + any(arm in STOCK for arm in settings.arms)
    seconds = tokens * serves * 1.2 / _ALONE[device] + (engines * START[device] if missing else 0)
    total = len(settings.points)
    return Estimate(experiment, "points", len(missing), total, tokens * serves * 2, seconds)


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
