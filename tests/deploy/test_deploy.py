"""The dashboard, the alert rules and the containers: their form, and that all they name exists.

`tests/engines/vllm/test_http.py` compares them with what a server exposes. Where Prometheus is
installed, its own tools check rules, queries and when alerts fire.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_queries import DEPLOY, SCRAPED, dashboard, panel_queries, rules, selectors
from server_arguments import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from picbench.cli import main
from picbench.engines.vllm.compat import RELEASES
from picbench.engines.vllm.metrics import GAUGES, SERIES

QUERIES = [*panel_queries(), *(rule["expr"] for rule in rules())]

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def check(*words: object) -> None:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_twelve_panels() -> None:
    panels = dashboard()["panels"]
    assert len(panels) == len({panel["title"] for panel in panels}) == 12
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == 12
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)


def test_the_alerts_say_what_to_do() -> None:
    assert len(rules()) == 4
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert all(rule["annotations"][text] for text in ("summary", "description"))


@pytest.mark.parametrize("query", QUERIES)
def test_queries_read_series_that_exist(query: str) -> None:
    assert query.count("(") == query.count(")") and query.count("[") == query.count("]")
    assert "$" not in query
    found = list(selectors(query))
    assert found
    for name, matchers in found:
        if name.startswith("pic_"):
            plain = name.removeprefix("pic_").removesuffix("_total")
            assert name.endswith("_total") is (plain not in GAUGES)
            assert {label for label, _, _ in matchers} <= {*SERIES[plain][1:], *SCRAPED}
            # The range of a counter has to be asked for.
            assert plain in GAUGES or re.search(re.escape(name) + r"(\{[^}]*\})?\[", query)


def test_every_series_is_shown() -> None:
    """But loaded tokens by tier, which users ask for by name."""
    shown = {name for query in panel_queries() for name, _ in selectors(query)}
    names = {f"pic_{name}" + ("" if name in GAUGES else "_total") for name in SERIES}
    assert names - shown == {"pic_loaded_tokens_total"}


@promtool
def test_prometheus_reads_rules_and_configuration(tmp_path: Path) -> None:
    check("check", "config", DEPLOY / "prometheus" / "prometheus.yaml")
    # Queries of panels as rules, which are parsed.
    parsed = [{"record": f"panel:{n}", "expr": q} for n, q in enumerate(panel_queries())]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "p", "rules": parsed}]}))
    check("check", "rules", tmp_path / "panels.yaml")


#: Rising counters, and the alert that each has fire.
FIRING = {
    "PicTierFailing": {'pic_tier_faults_total{kind="error",tier="disk:/kv"}': "0+1x60"},
    "PicTierFull": {
        'pic_tier_stores_total{result="refused",tier="redis://kv"}': "0+9x60",
        'pic_tier_faults_total{kind="error",tier="redis://kv"}': "7x60",
    },
    "PicPoolTooSmall": {
        'pic_compiled_chunks_total{reason="evicted"}': "0+6x60",
        'pic_compiled_chunks_total{reason="new"}': "0+3x60",
    },
    "PicRequestsEnded": {'pic_refused_requests_total{reason="fault"}': "0+1x60"},
}


@promtool
@pytest.mark.parametrize("alert", FIRING)
def test_alerts_fire(alert: str, tmp_path: Path) -> None:
    series = [{"series": name, "values": values} for name, values in FIRING[alert].items()]
    [labels] = {name.split("{")[1].rstrip("}") for name in list(FIRING[alert])[:1]}
    kept = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    kept = {k: v for k, v in kept.items() if k == "tier" or alert == "PicRequestsEnded"}
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    fires = {"exp_labels": kept | {"severity": rule["labels"]["severity"]}}
    expected = [
        {"eval_time": "45m", "alertname": name, "exp_alerts": [fires] if name == alert else []}
        for name in FIRING
    ]
    (tmp_path / "alerts.yaml").write_text(_without_annotations())
    test = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m"}
    test["tests"] = [{"interval": "1m", "input_series": series, "alert_rule_test": expected}]
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    check("test", "rules", tmp_path / "test.yaml")


def _without_annotations() -> str:
    """The rules without texts."""
    plain = [{k: v for k, v in rule.items() if k != "annotations"} for rule in rules()]
    return yaml.safe_dump({"groups": [{"name": "picbench", "rules": plain}]})


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]

#: What each image's program is given beside picbench's own flags.
FOREIGN = {
    "redis": {"--save", "--maxmemory", "--maxmemory-policy"},
    "indexer": {"--port"},
}


def words(service: str) -> list[str]:
    command = SERVICES[service].get("command", [])
    return shlex.split(command) if isinstance(command, str) else list(command)


def flags(service: str) -> set[str]:
    return {word.partition("=")[0] for word in words(service) if word.startswith("--")}


def test_images_are_of_one_release() -> None:
    stages = dict[str, str]()
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM"):
            _, image, _, stage = line.split()
            stages[stage] = image
    images = {one["image"] for one in SERVICES.values() if "build" not in one}
    images -= {"picbench:${TARGET:-cpu}"}
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in {*images, *stages.values()})
    built = {one["build"]["target"] for one in SERVICES.values() if "build" in one}
    assert built == {"indexer", "${TARGET:-cpu}"}
    assert stages.keys() == {"indexer", "cpu", "cuda"}
    assert f"v{RELEASES[0]}" in stages["cuda"]
    pinned = (DEPLOY.parent / "Makefile").read_text().split("TORCH := ")[1].split()[0]
    assert pinned in (DEPLOY / "Dockerfile").read_text()


def test_what_is_mounted_exists() -> None:
    mounted = [v.split(":")[0] for one in SERVICES.values() for v in one.get("volumes", ())]
    files = [DEPLOY / place for place in mounted if place.startswith(".")]
    assert len(files) == 4
    assert all(file.exists() for file in files)
    assert {place for place in mounted if not place.startswith(".")} == COMPOSE["volumes"].keys()
    for file in DEPLOY.rglob("*.yaml"):
        assert yaml.safe_load(file.read_text())


def test_services_name_each_other() -> None:
    named = set(re.findall(r"//([a-z][\w-]*):\d", (DEPLOY / "compose.yaml").read_text()))
    fleet = yaml.safe_load((DEPLOY / "prometheus" / "fleet.yaml").read_text())
    [scraped] = fleet["scrape_configs"][0]["static_configs"]
    named |= {target.split(":")[0] for target in scraped["targets"]}
    assert named - {"localhost"} <= SERVICES.keys()
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    assert cuda.keys() == {name for name in SERVICES if name.startswith("server-")}


def test_every_flag_exists() -> None:
    servers = [name for name in SERVICES if name.startswith("server-")]
    for name in (*servers, "router"):
        command, *given = words(name)
        options = {flag for option in main.commands[command].params for flag in option.opts}
        vllm = [word for word in given if word.partition("=")[0] not in options]
        if command == "serve":
            asked = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm[1:])
            assert asked.kv_events_config.endpoint == "tcp://*:5557"
        else:
            assert not [word for word in vllm if word.startswith("--")]
    others = {name: flags(name) for name in SERVICES if name not in (*servers, "router")}
    assert {name: found for name, found in others.items() if found} == FOREIGN


def test_servers_and_router_agree() -> None:
    given = words("router")
    places = [given[n + 1 :][:3] for n, word in enumerate(given) if word == "--server"]
    ports = "8000", "5557", "5558"
    for name, found in zip(("server-0", "server-1"), places, strict=True):
        assert [place.split("//")[1] for place in found] == [f"{name}:{port}" for port in ports]
        config = next(word for word in words(name) if word.startswith("--kv-events-config="))
        events = json.loads(config.partition("=")[2])
        assert [events["endpoint"], events["replay_endpoint"]] == [
            f"tcp://*:{port}" for port in ports[1:]
        ]
        assert "--port=8000" in words(name)
        assert ("--marks=on" in words(name)) is ("--marks=on" in given)
