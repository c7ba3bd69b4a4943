"""Series for Prometheus: what connectors tell, and what a server's process makes of it."""

import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import torch

from picbench.engines.chunk_cache.transfers import StoreCommand, TransferCommands
from picbench.engines.vllm.metrics import (
    GAUGES,
    SERIES,
    ConnectorMetrics,
    PicPromMetrics,
    PicStats,
    tier_values,
)
from picbench.engines.vllm.transfer.connector import PicConnector
from picbench.engines.vllm.transfer.tier_client import TierClient


def prom_metrics() -> PicPromMetrics:
    """The series as vLLM has them made."""
    config = SimpleNamespace(kv_transfer_config=None)
    types = {kind: kind for kind in (prometheus_client.Gauge, prometheus_client.Counter)}
    types[prometheus_client.Histogram] = prometheus_client.Histogram
    labels = ["model_name", "engine"]
    return PicConnector.build_prom_metrics(config, types, labels, {0: ["m", "0"], 1: ["m", "1"]})


def exposed() -> str:
    return prometheus_client.generate_latest().decode()


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, {"model_name": "m", **labels})


def test_series_are_of_engines_and_their_tiers() -> None:
    for _ in range(2):  # A process may start several engines.
        metrics = prom_metrics()
    data = {"tier_loads|hit|disk:/a|b": 2, "linked_tokens": 3, "kv_blocks|used": 5}
    metrics.observe(data, 1)
    metrics.observe(json.loads(json.dumps(data)), 1)
    assert value("pic_tier_loads_total", engine="1", result="hit", tier="disk:/a|b") == 4
    assert value("pic_linked_tokens_total", engine="1") == 6
    assert value("pic_kv_blocks", engine="1", kind="used") == 5
    assert value("pic_linked_tokens_total", engine="0") is None
    for name, series in SERIES.items():
        name = f"pic_{name}" + ("" if name in GAUGES else "_total")
        assert f"# HELP {name} {series[0]}" in exposed()
        assert series[0][-1] == "."


def test_counters_are_told_by_what_they_rose_and_gauges_as_they_are() -> None:
    now = Counter({"linked_tokens": 0, "kv_blocks|used": 3})
    connector = ConnectorMetrics()
    assert connector.get_kv_connector_stats() is None
    connector.report(lambda: now)
    told = []
    for added in ({}, {"linked_tokens": 4}, {}, {"linked_tokens": 2, "kv_blocks|used": 4}):
        now.update(added)
        stats = connector.get_kv_connector_stats()
        assert stats is not None and stats.is_empty() is not bool(stats.data)
        told.append(dict(stats.data))
    assert told == [
        {"linked_tokens": 0, "kv_blocks|used": 3},
        {"linked_tokens": 4},
        {},
        {"linked_tokens": 2, "kv_blocks|used": 7},
    ]
    every = PicStats()
    for data in told:
        every = every.aggregate(ConnectorMetrics.build_kv_connector_stats(data))
    assert every.data == {"linked_tokens": 6, "kv_blocks|used": 7}
    logged = {"prompt_tokens|compiled": 5, "tier_bytes|read|host": 8}
    assert PicStats({**logged, **every.data, "tier_faults|error|host": 0}).reduce() == logged


def test_counts_of_a_tier_that_took_the_place_of_another_begin_anew() -> None:
    counts = iter([70, 3, 5])
    connector = ConnectorMetrics()
    connector.report(lambda: {"tier_loads|hit|host": next(counts)})
    told = [connector.get_kv_connector_stats() for _ in range(3)]
    assert [one and one.data["tier_loads|hit|host"] for one in told] == [70, 3, 2]


def test_tiers_tell_what_their_counters_have(tmp_path: Path) -> None:
    client = TierClient(f"host:64KiB,disk:{tmp_path}:1MiB")
    client.register_kv_caches([torch.zeros(8, 1, 16, 4)])
    client.start(TransferCommands(stores=[StoreCommand(b"one", (1, 2)), StoreCommand(b"b", (3,))]))
    deadline = time.monotonic() + 30
    while client.take_results().pending and time.monotonic() < deadline:
        client.finish_loads()
    done = client.counters
    found = tier_values(client)
    assert {name.rsplit("|", 1)[1] for name in found} == done.keys() == {"host", f"disk:{tmp_path}"}
    assert {name.split("|")[0] for name in found} <= SERIES.keys()
    for tier, counters in done.items():
        assert found[f"tier_stores|stored|{tier}"] == counters.stored == 2
        assert found[f"tier_bytes|written|{tier}"] == counters.bytes_written > 0
        assert found[f"tier_faults|error|{tier}"] == counters.errors == 0
    assert 0 < found["tier_held_bytes|host"] <= found["tier_capacity_bytes|host"] == 1 << 16
    prom_metrics().observe(dict(found))
    written = value("pic_tier_bytes_total", engine="0", direction="written", tier="host")
    assert written == done["host"].bytes_written
    client.close()
