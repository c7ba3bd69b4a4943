"""What is run for a paper's figures: the settings file beside this module, or a user's own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.arms.arm import parse_arms
from picbench.errors import ConfigError
from picbench.inputs.traffic_file import TrafficConfig, parse_traffic
from picbench.workloads.names import closest

#: Which experiment each table and figure is made from.
FIGURES = {
    "table1": "workloads",
    "table2": "workloads",
    "fig6": "workloads",
    "fig7": "rate",
    "fig8": "chunks",
}

PAPERS = ("mepic",)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Experiment(_Strict):
    """Workloads that differ in one thing: what it is, and the settings of each."""

    varies: str
    points: dict[str, dict[str, Any]] = Field(min_length=1)


class Settings(_Strict):
    """A settings file. `common` holds for every point unless the point says otherwise."""

    paper: str
    published: str
    model: str
    arms: list[str] = Field(min_length=2)
    subject: str
    reference: str
    kv_blocks: int = Field(ge=1)
    context: int | None = Field(None, ge=16)
    max_running: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)
    common: dict[str, Any]
    experiments: dict[str, Experiment]


@dataclass(frozen=True, slots=True)
class Point:
    """One workload of an experiment under one seed: one run, with all arms."""

    experiment: str
    label: str
    seed: int
    traffic: TrafficConfig

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.experiment}-{self.label}-seed{self.seed}"


def read_settings(paper: str, path: Path | None = None) -> Settings:
    """The settings of a paper, or those of a file; ConfigError for what is wrong in them."""
    if paper not in PAPERS:
        raise ConfigError(f"no paper is called {paper!r}", hint=closest(paper, PAPERS))
    path = path or Path(__file__).with_name(f"{paper}.yaml")
    try:
        settings = Settings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"`settings` {path}: {error.strerror}", hint="`settings=FILE`") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`settings` {path}: {error}", hint="it must be YAML") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"`settings` {path}: {where}: {first['msg'].lower()}") from error
    return _with_canonical_arms(settings)


def points(settings: Settings, experiment: str) -> Iterator[Point]:
    """The runs of an experiment, seed by seed."""
    found = settings.experiments.get(experiment)
    if found is None:
        raise ConfigError(
            f"the settings have no experiment {experiment!r}", hint="add it, or omit `settings`"
        )
    for seed in settings.seeds:
        for label, changes in found.points.items():
            traffic = parse_traffic(settings.common | changes | {"seed": seed})
            yield Point(experiment, label, seed, traffic)


def with_requests(settings: Settings, requests: int) -> Settings:
    """The same settings with another number of requests at every point."""
    experiments = {
        name: Experiment(
            varies=found.varies,
            points={
                label: values | {"requests": requests} for label, values in found.points.items()
            },
        )
        for name, found in settings.experiments.items()
    }
    return settings.model_copy(update={"experiments": experiments})


def presets(paper: str = "mepic") -> Mapping[str, Mapping[str, Any]]:
    """Settings for `picbench traffic`: a paper's workloads by name."""
    settings = read_settings(paper)
    found = settings.experiments["workloads"].points
    return {f"{paper}-{name}": settings.common | values for name, values in found.items()}


def find_preset(name: str) -> Mapping[str, Any]:
    """The preset called `name`; ConfigError with the nearest one."""
    known = presets()
    if name not in known:
        raise ConfigError(f"`preset` {name}: no such preset", hint=closest(name, known))
    return known[name]


def _with_canonical_arms(settings: Settings) -> Settings:
    names = {spec: parse_arms([spec])[0].name for spec in settings.arms}
    for role, spec in (("subject", settings.subject), ("reference", settings.reference)):
        if spec not in names:
            raise ConfigError(f"the {role} {spec!r} is none of the arms", hint="add it to arms")
    return settings.model_copy(
        update={
            "arms": list(names.values()),
            "subject": names[settings.subject],
            "reference": names[settings.reference],
        }
    )
