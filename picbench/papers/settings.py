"""What is measured, drawn and judged of a paper, and its printed values: files of settings."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from picbench.errors import ConfigError, closest, first_refusal
from picbench.papers.options import ReproduceConfig
from picbench.run.arm import parse_arms
from picbench.run.traffic_file import TrafficConfig, parse_traffic
from picbench.statistics.intervals import Interval

PAPERS = ("mepic", "epic", "cacheblend", "minipic")

FILES = Path(__file__).with_name("files")

#: The model that an arm without a model is one of, and what pages call its weights.
BASE, TESTBED = "testbed", "testbed weights"

#: Where an experiment is run; each has sizes of its own.
Device = Literal["cpu", "cuda"]

#: What a claim's intervals say of it.
Verdict = Literal["holds", "fails", "undecided"]

#: The kind of a settings file.
Content = TypeVar("Content", bound=BaseModel)

#: Sizes of an experiment on a device.
Sizes = TypeVar("Sizes", bound=BaseModel)


class StrictSettings(BaseModel):
    """Settings without fields that nothing reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bounds(StrictSettings):
    """Where a quantity has to be: it holds between `least` and `most`, fails outside."""

    least: float = -inf
    most: float = inf

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if (self.least, self.most) == (-inf, inf):
            raise ValueError("a claim needs least or most")
        return self

    def room(self, value: float) -> float:
        """The distance to the nearer bound; negative outside."""
        return min(value - self.least, self.most - value)

    def judge(self, found: Interval | None) -> Verdict:
        """Holds if all of the interval is inside, fails if all of it is on one side outside."""
        if found and self.least <= found.low and found.high <= self.most:
            return "holds"
        if found and (found.high < self.least or found.low > self.most):
            return "fails"
        return "undecided"


class ScoreQuantity(Bounds):
    """Scores of `arms`, each less (or, as `ratio`, over) that of the arm after it, row by row.

    An arm of another model than the testbed is ``MODEL/ARM``. Every pair on each of `datasets`
    has to hold (empty: all that were measured).
    """

    kind: Literal["score"]
    arms: list[str] = Field(min_length=2)
    ratio: bool = False
    datasets: list[str] = []


class RunQuantity(Bounds):
    """A metric of an experiment at the points `at` (empty: all), seed by seed.

    The value of `arm`, over that of `over` where that is named. With `against` all of it is divided
    by its value at that point: growth; as `exponent`, its logarithm is divided by that of the
    ratio of both points' prompts. Several names of an arm, or of a point in `against`, are
    alternatives, of which the first that was measured counts.
    """

    kind: Literal["run"]
    experiment: str
    metric: str
    arm: str | list[str]
    over: str | list[str] = []
    at: list[str] = []
    against: str | list[str] = []
    exponent: bool = False


class NotMeasured(StrictSettings):
    """Nothing here can decide it, and `why`."""

    kind: Literal["none"]
    why: str


class Claim(StrictSettings):
    """A trend that a paper prints: where, and in which words or numbers.

    `note` says what a reader has to know about our answer, whatever it is; `device_notes` what they
    have to know about the answer that a device gave.
    """

    claim: str
    source: str
    published: str
    judge: Annotated[ScoreQuantity | RunQuantity | NotMeasured, Field(discriminator="kind")]
    note: str = ""
    device_notes: Mapping[Device, str] = {}

    def model_post_init(self, _: Any) -> None:
        """Texts end up in cells of tables."""
        texts = (self.claim, self.source, self.published, self.note, *self.device_notes.values())
        if any("|" in text for text in texts):
            raise ValueError("a text of a claim has no vertical bar")


class LoadSettings(StrictSettings):
    """Requests that arrive whether others are done or not, and the engines that serve them.

    `common` are settings of the requests of every point, `run` further settings of `picbench run`.
    A point changes any of these, and may have `arms`, `run` and `kv_blocks` of its own.
    """

    model: str
    arms: list[str] = Field(min_length=1)
    kv_blocks: int = Field(ge=1)
    context: int | None = Field(None, ge=16)
    max_running: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)
    run: dict[str, Any] = {}
    common: dict[str, Any] = {}
    points: dict[str, dict[str, Any]] = Field(min_length=1)


class LatencyPoint(StrictSettings):
    """A prompt: how many chunks it has, of how many tokens each."""

    chunks: int = Field(ge=1)
    tokens: int = Field(ge=1)


class LatencySettings(StrictSettings):
    """Single requests of random tokens, all arms in turn in every repeat.

    `full` and `prefix` are stock vLLM. An arm's chunks are cached, those of ``ARM cold`` are not.
    """

    model: str
    arms: list[str] = Field(min_length=1)
    repeats: int = Field(ge=2)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    points: dict[str, LatencyPoint] = Field(min_length=1)


class ScoreSettings(StrictSettings):
    """Rows of data sets under the arms of `picbench measure algorithms`."""

    models: list[str] = Field(min_length=1)
    rows: int = Field(ge=2)
    datasets: list[str] = Field(min_length=1)


class RowSettings(StrictSettings):
    """Rows of a data set on the testbed, and the arms that are compared on them.

    `tokens` are the first ones of each chunk whose attention is looked at.
    """

    dataset: str
    rows: int = Field(ge=2)
    arms: list[str] = Field(min_length=1)
    tokens: int = Field(4, ge=4)


class SizedExperiment(StrictSettings, Generic[Sizes]):
    """What has sizes of its own for each device it is run on."""

    varies: str = ""
    cpu: Sizes | None = None
    cuda: Sizes | None = None

    def on(self, device: Device) -> Sizes | None:
        """The sizes for a device."""
        return self.cuda if device == "cuda" else self.cpu


class RowExperiment(StrictSettings):
    """What arms do row by row, by layer or by the place of a token in its chunk; on the CPU."""

    varies: str
    by: Literal["layer", "token"] = "layer"
    cpu: RowSettings


class Drawing(StrictSettings):
    """One panel, 85 mm wide, in a file of its own: one quantity of an experiment.

    `lines`: `metric` against the points of `experiment`, a line an arm. `scores`: the share of
    `against`'s score that arms keep, against `metric` of a latency experiment, at the point `at`.
    `kept`: the same against the share of chunk tokens that arms link. `dots`: a row a point, an arm
    a marker, with printed values. `time`: occupancy over time, a panel a point. `published` are
    printed values by arm: by point in `lines`, in `scores` the ends (``low``, ``high``) of a range;
    `printed` says what they are, or in `dots` which of the paper's metrics is meant. `points` are
    those of the experiment that are drawn, all by default.
    """

    name: str
    kind: Literal["lines", "scores", "kept", "dots", "bars", "time"]
    label: str
    metric: str = ""
    arms: list[str] = []
    at: str = ""
    points: list[str] = []
    dataset: str = ""
    log: bool = False
    published: dict[str, dict[str, float]] = {}
    printed: str = ""


class Figure(StrictSettings):
    """A figure or table of the paper: its experiment, and what is drawn of it."""

    title: str
    experiment: str
    drawings: list[Drawing] = []


#: Any experiment.
Experiment = (
    SizedExperiment[LoadSettings]
    | SizedExperiment[LatencySettings]
    | SizedExperiment[ScoreSettings]
    | RowExperiment
)


class Settings(StrictSettings):
    """A paper: its experiments by kind, figures and claims."""

    paper: str
    published: str
    loads: dict[str, SizedExperiment[LoadSettings]] = {}
    latencies: dict[str, SizedExperiment[LatencySettings]] = {}
    attentions: dict[str, RowExperiment] = {}
    layers: dict[str, RowExperiment] = {}
    scores: SizedExperiment[ScoreSettings] | None = None
    figures: dict[str, Figure]
    claims: list[Claim] = []

    @property
    def experiments(self) -> Mapping[str, Experiment]:
        """All experiments by name."""
        scores = {"scores": self.scores} if self.scores else {}
        return {**self.loads, **self.latencies, **self.attentions, **self.layers, **scores}


@dataclass(frozen=True, slots=True)
class Point:
    """One workload of an experiment under one seed: one run, with its arms."""

    experiment: str
    device: Device
    label: str
    seed: int
    traffic: TrafficConfig
    arms: tuple[str, ...]
    run: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A name for files."""
        return point_name(self.device, self.experiment, self.label, self.seed)


def point_name(device: str, experiment: str, label: str, seed: int) -> str:
    """What files of a point are called; labels may have what no name can, such as ``8/s``."""
    label = re.sub(r"[^\w.,+ -]", "-", label)
    return f"{device}-{experiment}-{label}-seed{seed}"


def read_settings(paper: str, path: Path | None = None) -> Settings:
    """The settings of a paper, or those of a file; ConfigError for what is wrong in them."""
    if paper not in PAPERS:
        raise ConfigError(f"no paper is called {paper!r}", hint=closest(paper, PAPERS))
    path = path or FILES / f"{paper}.yaml"
    settings = read_yaml(Settings, path)
    known = settings.experiments
    for name, figure in settings.figures.items():
        if figure.experiment not in known:
            raise ConfigError(
                f"`settings` {path}: figures.{name}: no experiment {figure.experiment!r}",
                hint=closest(figure.experiment, known),
            )
    return settings


def read_yaml(kind: type[Content], path: Path) -> Content:
    """What a settings file says; ConfigError for a file that cannot be read or has mistakes."""
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"`settings` {path}: {error.strerror}", hint="`settings=FILE`") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`settings` {path}: {error}", hint="it must be YAML") from error
    except ValidationError as error:
        message = f"`settings` {path}: {first_refusal(error, lower=True)}"
        raise ConfigError(message) from error


def points(settings: Settings, experiment: str, device: Device) -> Iterator[Point]:
    """The runs of a load, seed by seed; none where it has no sizes for the device."""
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
                experiment=experiment,
                device=device,
                label=label,
                seed=seed,
                traffic=parse_traffic(found.common | own | {"seed": seed}),
                arms=named(*arms),
                run=shared | found.run | run | {"kv_blocks": blocks},
            )


def arm_names(specs: Iterable[str]) -> tuple[str, ...]:
    """What runs call arms; ConfigError for one that does not exist."""
    return tuple(arm.name for arm in parse_arms(specs))


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


def presets() -> Mapping[str, Mapping[str, Any]]:
    """Settings for `picbench traffic`: MEPIC's workloads by name."""
    found = read_settings("mepic").loads["workloads"].cpu
    assert found is not None
    return {f"mepic-{name}": found.common | values for name, values in found.points.items()}


def find_preset(name: str) -> Mapping[str, Any]:
    """The preset called `name`; ConfigError with the nearest one."""
    known = presets()
    if name not in known:
        raise ConfigError(f"`preset` {name}: no such preset", hint=closest(name, known))
    return known[name]


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's printed numbers and what they were measured on."""

    paper: str
    hardware: str
    model: str
    content: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What the numbers were measured on."""
        return f"{self.model} on {self.hardware}"

    def rows(self, table: str, label: str) -> Mapping[str, Any]:
        """The values of a table (``table1``) in the row of a workload; empty where there is none.

        Table 2 has, by metric and algorithm, (mean, deviation).
        """
        found: Mapping[str, Any] = self.content.get(table, {}).get("rows", {}).get(label, {})
        return found

    def text(self, figure: str) -> Mapping[str, str]:
        """What the paper's text says about a figure."""
        found: Mapping[str, str] = self.content.get(figure, {}).get("text", {})
        return found


def read_published(name: str) -> Published:
    """Read the file called `name`; ConfigError where it is missing or broken."""
    try:
        content = json.loads((FILES / name).read_bytes())
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(found.name for found in FILES.glob("*.json")))
        raise ConfigError(
            f"`published` {Path(name).name}: cannot be read: {error}", hint=f"there are {known}"
        ) from error
    return Published(content["paper"], content["hardware"], content["model"], content)
