"""The settings that come with picbench."""

import pytest

from picbench.errors import ConfigError
from picbench.inputs.traffic_file import parse_traffic
from picbench.papers.paper_settings import FIGURES, find_preset, points, presets, read_settings
from picbench.papers.published import read_published
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import build
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.traffic_facts import measure

#: How far a drawn workload may be from the paper's: tokens in percent, reuse in points.
TOKENS, REUSE = 8.0, 2.0


def test_every_figure_has_its_experiment_and_the_paper_its_numbers() -> None:
    settings = read_settings("mepic")
    published = read_published(settings.published)
    for figure, experiment in FIGURES.items():
        assert list(points(settings, experiment))
        assert published.content[figure]["caption"]
    assert settings.subject in settings.arms
    assert settings.reference in settings.arms
    assert {p.label for p in points(settings, "workloads")} == set(
        published.content["table2"]["rows"]
    )


def test_presets_are_the_workloads_of_table_1() -> None:
    assert set(presets()) == {"mepic-squad", "mepic-newsqa", "mepic-narrativeqa", "mepic-emrqa"}
    with pytest.raises(ConfigError, match="no such preset"):
        find_preset("mepic-squid")


@pytest.mark.parametrize("label", ["squad", "newsqa", "narrativeqa", "emrqa"])
def test_workloads_are_as_long_and_as_reusable_as_the_papers(label: str) -> None:
    paper = read_published("mepic.json").workload(label)
    config = parse_traffic({**find_preset(f"mepic-{label}"), "seed": 1})
    model = models.resolve("testbed")
    corpus = build(config.source(model), models.load_tokenizer(model), 1)
    facts = measure(draw(config.traffic(), corpus))
    assert abs(facts.mean_tokens / paper["tokens"] - 1) * 100 < TOKENS
    assert abs(100 * facts.reuse - paper["reuse_pct"]) < REUSE


def test_unknown_papers_and_files_are_named() -> None:
    with pytest.raises(ConfigError, match="no paper is called 'epic'"):
        read_settings("epic")
