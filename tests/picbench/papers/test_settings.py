"""The settings that come with picbench."""

from contextlib import suppress
from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.papers.reproduce import LoadPoint, Reproduction, Serving
from picbench.papers.settings import (
    PAPERS,
    Device,
    ReproduceConfig,
    RowExperiment,
    RunQuantity,
    ScoreQuantity,
    find_preset,
    presets,
    read_published,
    read_settings,
)
from picbench.run.arm import parse_arms
from picbench.run.traffic_file import (
    TrafficWriter,
    Written,
    parse_traffic,
    source_of,
    traffic_of,
)
from picbench.settings import TrafficConfig
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import build
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.traffic_facts import TrafficFacts, measure

#: How far a drawn workload may be from the paper's: tokens in percent, reuse in points.
TOKENS, REUSE = 8.0, 2.0

#: Experiments that no paper has.
OURS = ("requests", "unlimited")


class Drawn(TrafficWriter):
    """Notes what requests are to be drawn."""

    def __init__(self) -> None:
        self.traffic: dict[str, TrafficConfig] = {}

    def write(self, path: Path, config: TrafficConfig, model: models.ModelSpec) -> Written:
        self.traffic[path.stem] = config
        facts = TrafficFacts(1, 1, 1.0, 1.0, 1.0, 1, 0.0, 1.0, 0.0, 1.0, None)
        return Written("", facts)


def points(
    paper: str, experiment: str, device: Device, drawn: Drawn | None = None
) -> list[LoadPoint]:
    config, output = ReproduceConfig(device=device), Path("nowhere")
    plan = Reproduction(paper, read_settings(paper), config, output, drawn or Drawn())
    return list(plan.loads(experiment, output, Serving()))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_has_its_experiment_on_both_devices(paper: str) -> None:
    settings = read_settings(paper)
    published = read_published(settings.published)
    assert published.paper.startswith(settings.paper)
    for name, figure in settings.figures.items():
        experiment = settings.experiments[figure.experiment]
        assert experiment.cpu is not None
        # Attention is computed on the CPU, whatever serves the rest, and counts need no device.
        assert isinstance(experiment, RowExperiment) or experiment.cuda is not None
        assert name in (published.model_extra or {}) or figure.experiment in OURS
    for device in ("cpu", "cuda"):
        names = []
        for load in settings.loads:
            found = points(paper, load, device)
            assert found
            names += [point.name for point in found]
        assert len(set(names)) == len(names)
        assert all(Path(name).name == name for name in names)


def _number(label: str) -> float | None:
    with suppress(ValueError):
        return float(label)
    return None


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_are_about_what_is_measured_and_growth_has_one_direction(paper: str) -> None:
    """Devices have sizes of their own: what is large on one may be the smallest on the other."""
    settings = read_settings(paper)
    for claim in settings.claims:
        judge = claim.judge
        if isinstance(judge, ScoreQuantity):
            parse_arms(arm.rpartition("/")[2] for arm in judge.arms)
        if not isinstance(judge, RunQuantity):
            continue
        experiment = settings.experiments[judge.experiment]
        if isinstance(experiment, RowExperiment):
            continue
        against = [judge.against] if isinstance(judge.against, str) else judge.against
        sizes = [one for one in (experiment.cpu, experiment.cuda) if one is not None]
        assert {*judge.at, *against} <= {label for one in sizes for label in one.points}
        for one in sizes:
            base = next((_number(label) for label in against if label in one.points), None)
            at = [_number(label) for label in judge.at if label in one.points]
            if base is not None:
                assert len({number > base for number in at if number is not None}) <= 1


def test_presets_are_the_workloads_of_both_tables() -> None:
    labels = {point.label for point in points("mepic", "workloads", "cpu")}
    assert labels == set(read_published("mepic.json").figure("table2")["rows"])
    assert set(presets()) == {"mepic-squad", "mepic-newsqa", "mepic-narrativeqa", "mepic-emrqa"}
    with pytest.raises(ConfigError, match="no such preset"):
        find_preset("mepic-squid")
    with pytest.raises(ConfigError, match="no paper is called 'epik'"):
        read_settings("epik")


@pytest.mark.parametrize("label", ["squad", "newsqa", "narrativeqa", "emrqa"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workloads_are_as_long_and_as_reusable_as_the_papers(label: str, device: Device) -> None:
    paper = read_published("mepic.json").figure("table1")["rows"][label]
    if device == "cpu":
        # The testbed's own workloads are smaller: its presets have as many requests as the paper.
        model = models.resolve("testbed")
        config = parse_traffic({**find_preset(f"mepic-{label}"), "seed": 1})
    else:
        drawn = Drawn()
        found = points("mepic", "workloads", device, drawn)
        served = next(one for one in found if one.label == label)
        model = models.resolve(served.settings["model"])
        config = drawn.traffic[served.name]
    corpus = build(source_of(config, model), models.load_tokenizer(model), 1)
    facts = measure(draw(traffic_of(config), corpus))
    assert abs(facts.mean_tokens / paper["tokens"] - 1) * 100 < TOKENS
    assert abs(100 * facts.reuse - paper["reuse_pct"]) < REUSE
