"""Scores of models under all arms: what is left, how long it takes, and the measurement."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.errors import ConfigError
from picbench.measure.algorithms import serve_arms
from picbench.measure.algorithms.scored_part import Case
from picbench.papers.accuracy.accuracy_settings import AccuracySettings
from picbench.papers.accuracy.model_files import NamedModel, find_model, name_of
from picbench.papers.paper_settings import Device, arm_names
from picbench.papers.reproduction import SCORES
from picbench.workloads import datasets
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import HUB

_NEEDLE = "needle"


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """Rows of a model that are left of all that there are, prompt tokens, seconds."""

    model: str
    left: int
    total: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AccuracyRun:
    """All arms on rows of all data sets, model by model; a file for each model and data set.

    `data` is where rows are (None: LongBench on the hub, bundled rows for a testbed), `texts` a
    folder with texts for needle's rows, `commit` names the code where a checkout cannot.
    """

    settings: AccuracySettings
    models: Sequence[str]
    device: Device
    output: Path
    data: str | None = None
    texts: str | None = None
    commit: str | None = None

    def estimates(self, start: float) -> list[ModelEstimate]:
        """What is left, by model; an engine starts in `start` seconds. Needs no model's files."""
        return [self._estimate(NamedModel(name_of(spec), spec), start) for spec in self.models]

    def run(self) -> None:
        """Measure what is missing. All models are found before anything is measured.

        Raises ConfigError for a model or data that cannot be had.
        """
        found = [find_model(spec) for spec in self.models]
        names = [model.name for model in found]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"`models`: two are called {max(names, key=names.count)}", hint="rename a folder"
            )
        for model in found:
            serve_arms.measure(self.serving(model), self.commit, self.output / SCORES)

    def serving(self, model: NamedModel) -> serve_arms.ServeSettings:
        """How a model's rows are served."""
        size = self.settings.engines[self.device]
        return serve_arms.ServeSettings(
            model=model.spec,
            name=model.name,
            datasets=tuple(self.settings.datasets),
            rows=self.settings.rows,
            algo=arm_names(self.settings.arms),
            device=self.device,
            dtype=size.dtype,
            kv_blocks=size.kv_blocks,
            max_requests=size.max_requests,
            data=self._data(model),
            longest=self._longest(model),
        )

    def _longest(self, model: NamedModel) -> int | None:
        """The longest prompt with its reply. Pads of some arms take an eighth of positions."""
        if model.trained_here:
            return None  # Bundled rows were made to fit it.
        wanted = self.settings.longest
        return wanted if model.positions is None else min(wanted, model.positions * 7 // 8)

    def _data(self, model: NamedModel) -> Mapping[str, str]:
        data = self.data or (BUNDLED if model.trained_here else HUB)
        needle = self.texts or (BUNDLED if data == HUB else data)
        wanted = dict.fromkeys(self.settings.datasets, data)
        return wanted | ({_NEEDLE: needle} if _NEEDLE in wanted else {})

    def _estimate(self, model: NamedModel, start: float) -> ModelEstimate:
        speed = self.settings.speeds[self.device]
        arms, rows = len(self.settings.arms), self.settings.rows
        left, tokens, seconds = 0, 0, 0.0
        for dataset, data in self._data(model).items():
            missing = max(0, rows - self._done(model, dataset))
            prompt = self._tokens(dataset, data) * missing * arms
            reply = datasets.find(dataset).max_tokens * missing * arms
            left += missing
            tokens += prompt
            seconds += prompt / speed.prompt + reply / speed.reply
        total = rows * len(self.settings.datasets)
        return ModelEstimate(model.name, left, total, tokens, seconds + (start if left else 0))

    def _tokens(self, dataset: str, data: str) -> int:
        """About how many tokens a prompt has."""
        known = self.settings.tokens["bundled" if data == BUNDLED else "hub"]
        return known.get(dataset) or self.settings.longest // 2

    def _done(self, model: NamedModel, dataset: str) -> int:
        path = self.output / SCORES / f"{Case(model.name, dataset).name}.json"
        return len(json.loads(path.read_bytes())["prompt"]) if path.exists() else 0
