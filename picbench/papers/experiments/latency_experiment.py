"""Time to the first token of single requests: all arms in one engine, in turn in every repeat."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError
from picbench.measure.engine.interleaved import ArmFigures, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.output import provenance
from picbench.output.json_file import write_json
from picbench.papers.budget import QUESTION, START, TimeBudget, expected_latency
from picbench.papers.experiments.experiment_data import ExperimentData, PointArm, PointData
from picbench.papers.paper_settings import Device, LatencyPoint, LatencySettings
from picbench.workloads import models

#: Arms of stock vLLM.
STOCK = ("full", "prefix")

COLD = " cold"

#: Figures of a request.
_METRICS = ("ttft_ms", "linked", "compiled")

#: Separates the names in a figure's key.
_BETWEEN = "\t"

#: Metrics by arm, a list of repeats each.
Figures = dict[str, dict[str, list[float]]]


class LatencyRun:
    """An experiment's file: which points are measured, and which are to be."""

    def __init__(self, settings: LatencySettings, device: Device, path: Path) -> None:
        self._settings = settings
        self._device = device
        self._path = path
        self._done: dict[str, Figures] = {}
        self._facts: dict[str, Any] = {}
        if path.exists():
            self._take_up(json.loads(path.read_bytes()))

    @property
    def missing(self) -> dict[str, LatencyPoint]:
        """Points that are still to be measured."""
        points = self._settings.points.items()
        return {label: point for label, point in points if label not in self._done}

    @property
    def engine_kind(self) -> tuple[str, str]:
        """What engines are the same for: a model, and a type."""
        return self._settings.model, self._settings.dtype

    @property
    def settings(self) -> LatencySettings:
        """What is measured."""
        return self._settings

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Note what measures from now on."""
        self._facts = dict(facts)

    def keep(self, name: str, label: str, found: ArmFigures) -> None:
        """Take a point's figures, which were measured as `name`, into the file."""
        figures: Figures = {arm: {} for arm in self._settings.arms}
        for engine in found.values():
            for key, values in engine.items():
                point, arm, metric = key.split(_BETWEEN)
                if point == name:
                    figures[arm][metric] = [round(value, 3) for value in values]
        self._done[label] = figures
        document = {"settings": self._identity, "facts": self._facts, "points": self._done}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, document, indent=None)

    def expected(self, label: str) -> float:
        """Seconds that a point may take."""
        return expected_latency(self._settings, self._settings.points[label], self._device)

    def data(self, paper: str, experiment: str, varies: str) -> ExperimentData:
        """What was measured, a point's repeat a point."""
        points = [
            PointData(label, repeat + 1, _size(self._settings.points[label]), arms)
            for label in self._settings.points
            if label in self._done
            for repeat, arms in enumerate(_by_repeat(self._done[label]))
        ]
        facts = self._facts
        model = models.resolve(self._settings.model)
        weights = "testbed weights" if model.name == "testbed" else model.label
        caption = (
            f"{facts['gpu']}; vLLM {facts['vllm']}, torch {facts['torch']}; commit "
            f"{facts['commit'][:7]}. {weights}, random tokens, type {self._settings.dtype}; one "
            f"request at a time, arms in turn, {self._settings.repeats} repeats. Chunks are cached "
            "but for full, prefix and cold arms."
        )
        conditions = {
            "caption": caption,
            "model": weights,
            "hardware": facts["gpu"],
            "commit": facts["commit"][:7],
        }
        return ExperimentData(paper, experiment, self._device, varies, conditions, points)

    def _take_up(self, found: Mapping[str, Any]) -> None:
        if found["settings"] != self._identity:
            raise ConfigError(
                f"{self._path}: measured with other settings",
                hint="remove it, or name another folder with `output`",
            )
        self._done, self._facts = found["points"], found["facts"]

    @property
    def _identity(self) -> dict[str, Any]:
        kept = self._settings.model_dump(mode="json")
        return kept | {"device": self._device, "points": None}


def measure_latencies(
    runs: Mapping[str, LatencyRun], device: Device, commit: str | None, budget: TimeBudget
) -> None:
    """Measure what is missing in several experiments, as long as the budget lasts.

    Those with the same model and type are measured on engines that start once. Raises the error of
    an engine that fails.
    """
    kinds = dict.fromkeys(run.engine_kind for run in runs.values() if run.missing)
    for kind in kinds:
        alike = {name: run for name, run in runs.items() if run.engine_kind == kind}
        _measure_alike(alike, device, commit, budget)


def _measure_alike(
    runs: Mapping[str, LatencyRun], device: Device, commit: str | None, budget: TimeBudget
) -> None:
    missing = {
        f"{experiment}: {label}": (run, label)
        for experiment, run in runs.items()
        for label in run.missing
    }
    first, place = next(iter(missing.values()))
    if not budget.allows(first.expected(place), START[device]):
        return
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    for run, _ in missing.values():
        run.begin(facts)
    began = [0.0]

    def go_on(name: str) -> bool:
        run, label = missing[name]
        began.append(monotonic())
        return budget.allows(run.expected(label))

    def keep(name: str, found: ArmFigures) -> None:
        run, label = missing[name]
        run.keep(name, label, found)
        budget.note(run.expected(label), monotonic() - began[-1])

    measures = {
        name: partial(
            serve_point,
            label=name,
            arms=tuple(run.settings.arms),
            point=run.settings.points[label],
        )
        for name, (run, label) in missing.items()
    }
    repeats = {name: run.settings.repeats for name, (run, _) in missing.items()}
    started = engines([run.settings for run in runs.values()], device)
    run_interleaved(started, measures, repeats, keep=keep, go_on=go_on)


def engines(experiments: Sequence[LatencySettings], device: Device) -> dict[str, EngineConfig]:
    """The engines that experiments with the same model and type need.

    One of picbench's, and stock vLLM if an arm is its.
    """
    settings = experiments[0]
    points = [point for found in experiments for point in found.points.values()]
    longest = max(point.chunks * point.tokens for point in points)
    context = longest + QUESTION + 2 * BLOCK_SIZE
    ours = EngineConfig(
        model=str(models.resolve(settings.model).path),
        device=device,
        dtype=settings.dtype,
        context=context,
        batch_tokens=min(8192, max(2048, context)),
        kv_blocks=max(1024, context // BLOCK_SIZE * 5),
        max_requests=8,
        tiers="",
    )
    found = {"picbench": ours}
    if any(arm in STOCK for found in experiments for arm in found.arms):
        found["stock"] = replace(ours, stock=True, algorithm="prefix")
    return found


def serve_point(
    engine: Engine, name: str, *, label: str, arms: Sequence[str], point: LatencyPoint
) -> dict[str, float]:
    """Figures of one repeat, by point, arm and metric: milliseconds, and tokens."""
    served = [arm for arm in arms if (arm in STOCK) == engine.config.stock]
    return {
        _BETWEEN.join((label, arm, metric)): value
        for arm in served
        for metric, value in zip(_METRICS, _serve(engine, name, arm, point), strict=True)
    }


def _serve(engine: Engine, name: str, arm: str, point: LatencyPoint) -> Iterator[float]:
    drawn = f"{name} {arm}"
    chunks = [
        Chunk(tokens=random_tokens(point.tokens, f"{drawn} {n}")) for n in range(point.chunks)
    ]
    if not arm.endswith(COLD) and arm != "full":
        _request(engine, arm, chunks, f"{drawn} before")
        # Orders that begin alike would share what follows from it.
        chunks = [*chunks[1:], chunks[0]] if len(chunks) > 1 else chunks
    result = _request(engine, arm, chunks, drawn)
    yield result.timings.ttft * 1e3
    yield result.counts.linked
    yield result.counts.compiled


def _request(engine: Engine, arm: str, chunks: Sequence[Chunk], name: str) -> Any:
    algorithm = "prefix" if arm in STOCK else arm.removesuffix(COLD)
    question = Text(tokens=random_tokens(QUESTION, f"{name} question"))
    # A head of its own, so that one chunk is not a prefix that was there before.
    head = Text(tokens=random_tokens(BLOCK_SIZE, f"{name} head"))
    request = Request([head, *chunks, question], algorithm)
    [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
    return result


def _size(point: LatencyPoint) -> dict[str, float | None]:
    total = BLOCK_SIZE + point.chunks * point.tokens + QUESTION
    return {"chunks": point.chunks, "chunk_tokens": point.tokens, "mean_tokens": total}


def _by_repeat(figures: Figures) -> Iterator[dict[str, PointArm]]:
    repeats = min(len(values) for arm in figures.values() for values in arm.values())
    for repeat in range(repeats):
        yield {
            arm: PointArm({metric: values[repeat] for metric, values in metrics.items()})
            for arm, metrics in figures.items()
        }
