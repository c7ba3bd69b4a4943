"""The queries in `deploy/`: those of the dashboard's panels and of the alert rules."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[1] / "deploy"

#: Labels that Prometheus adds when it scrapes.
SCRAPED = {"job", "instance"}

#: A name of picbench's or vLLM's series, what may select of it, and a label with its value.
_SELECTOR = re.compile(r"((?:pic_|vllm:)\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")


class Selector(NamedTuple):
    """A series that a query reads: label, operator and value of each matcher."""

    series: str
    matchers: tuple[tuple[str, str, str], ...]


def dashboard() -> dict[str, Any]:
    """The dashboard for Grafana."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panel_queries() -> list[str]:
    """The queries of all panels, with Grafana's variables filled in."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    filled = {"$job": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    for variable, value in filled.items():
        found = [query.replace(variable, value) for query in found]
    return found


def selectors(query: str) -> Iterator[Selector]:
    """The series that a query reads."""
    for name, matchers in _SELECTOR.findall(query):
        yield Selector(name, tuple(_MATCHER.findall(matchers)))


def grouped(query: str) -> set[str]:
    """The labels that a query groups by."""
    return {label.strip() for labels in _GROUPING.findall(query) for label in labels.split(",")}


def samples(text: str) -> dict[str, list[dict[str, str]]]:
    """The labels of all samples that a server exposes, by the name of the series."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def unanswered(query: str, exposed: dict[str, list[dict[str, str]]]) -> list[str]:
    """What a query reads that is not exposed."""
    missing = []
    for name, matchers in selectors(query):
        fitting = exposed.get(name, [])
        for label, operator, value in matchers:
            if label not in SCRAPED:
                pattern = re.compile(value if operator == "=~" else re.escape(value))
                same = operator != "!="
                fits = [s for s in fitting if label in s]
                fitting = [s for s in fits if bool(pattern.fullmatch(s[label])) is same]
        if not fitting or any(not (grouped(query) - SCRAPED) <= s.keys() for s in fitting):
            missing.append(name)
    return missing
