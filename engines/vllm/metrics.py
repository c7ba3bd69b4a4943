"""Series for Prometheus, by the interface that vLLM has for KV connectors.

The connectors of the scheduler and of the workers tell after each step what has changed
(`KVConnectorBase_V1.get_kv_connector_stats`), and the server's process adds it to its series
(`build_prom_metrics`). Upstream: vllm/distributed/kv_transfer/kv_connector/v1/metrics.py of vLLM
0.32.0. Of several workers counts are added, and gauges are one worker's.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from picbench.plugins import version_of

_LOG = logging.getLogger(__name__)

#: All series, by their names without `pic_`: what they show, and their labels. Counters end with
#: `_total` when they are exposed.
SERIES = {
    "requests": ("Requests scheduled, with chunks that are reused or plain.", "kind"),
    "prompt_tokens": ("Prompt tokens, each once, by where their KV came from.", "kind"),
    "loaded_tokens": ("Prompt tokens loaded from tiers, by tier.", "tier"),
    "linked_tokens": ("Prompt tokens inside chunks that were computed again.",),
    "padded_tokens": ("Slots of prompts without a visible token.",),
    "compile_tokens": ("Tokens computed to compile chunks, anchors included.",),
    "compiled_chunks": ("Chunks that began to be compiled, by why they missed.", "reason"),
    "refused_requests": ("Requests ended by pressure on the pool, or a fault.", "reason"),
    "tier_loads": ("Values read from a tier, by result.", "result", "tier"),
    "tier_stores": ("Values written to a tier, by result.", "result", "tier"),
    "tier_bytes": ("Bytes read from and written to a tier.", "direction", "tier"),
    "tier_faults": ("Calls or values of a tier that failed.", "kind", "tier"),
    "tier_held_bytes": ("Bytes that the nearest host tier holds.", "tier"),
    "tier_capacity_bytes": ("Bytes that it can hold.", "tier"),
    "kv_blocks": ("Blocks of the KV pool by kind; kinds overlap.", "kind"),
}

GAUGES = ("tier_held_bytes", "tier_capacity_bytes", "kv_blocks")

#: What the labels of tiers' series are called among a tier's counters.
_OF_TIERS = {
    "tier_loads": {"hit": "hits", "miss": "misses"},
    "tier_stores": {"stored": "stored", "refused": "refused"},
    "tier_bytes": {"read": "bytes_read", "written": "bytes_written"},
    "tier_faults": {n.rstrip("s"): n for n in ("errors", "timeouts", "corrupt", "skipped")},
}

#: Values by series and labels, ``tier_loads|hit|disk:/kv``: tiers are last, they may have any name.
Values = Mapping[str, int]


@dataclass
class PicStats(KVConnectorStats):
    """What has changed in a step: by how much counters rose, and gauges as they are."""

    data: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorStats) -> "PicStats":
        """With the changes of another process or of a later step."""
        for name, value in other.data.items():
            self.data[name] = value + (0 if name.startswith(GAUGES) else self.data.get(name, 0))
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows: where prompts' KV came from, and what tiers did."""
        shown = ("prompt_tokens", "tier_bytes", "tier_faults")
        return {name: n for name, n in self.data.items() if n and name.startswith(shown)}

    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not self.data


class ConnectorMetrics:
    """The part of a connector that tells vLLM what has changed; `report` says how to find out."""

    _read: Callable[[], Values] | None = None

    #: Scheduler: what serves, for the log.
    about = ""

    def report(self, read: Callable[..., Values], *of: Any) -> None:
        """From now on tell what changes of the values that `read` returns, called with `of`."""
        _log_as_vllm()
        self._read, self._told = partial(read, *of), dict[str, int]()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Scheduler: say once what serves, since its workers have told their namespace."""
        namespace = metadata.get(0) or "none"
        _LOG.info("picbench %s: %s, namespace %s", version_of("picbench"), self.about, namespace)

    def get_kv_connector_stats(self) -> PicStats | None:
        """What has changed since the last call; the first one has all series, also at zero."""
        if self._read is None:
            return None
        now, told = self._read(), self._told
        if now == told:
            return PicStats()
        self._told = dict(now)
        changed = {name: value for name, value in now.items() if value != told.get(name)}
        for name, value in changed.items():
            # A count that fell began anew: that of a tier which took the place of another.
            if not name.startswith(GAUGES) and value >= (before := told.get(name, 0)):
                changed[name] = value - before
        return PicStats(changed)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PicStats:
        """The stats that were sent to another process."""
        return PicStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> "PicPromMetrics":
        """The series of a server."""
        return PicPromMetrics(*args)


class PicPromMetrics(KVConnectorPromMetrics):
    """The series of a server's process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # As vLLM with its own: a process may start several engines, one after the other.
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith("pic_"):
                REGISTRY.unregister(collector)
        self._series: dict[str, Any] = {}
        for name, (text, *labels) in SERIES.items():
            mode = {"multiprocess_mode": "mostrecent"} if name in GAUGES else {}
            kind: Any = self._gauge_cls if name in GAUGES else self._counter_cls
            labels = [*self._labelnames, *labels]
            self._series[name] = kind(f"pic_{name}", text, labelnames=labels, **mode)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what has changed."""
        for key, value in transfer_stats_data.items():
            name, _, rest = key.partition("|")
            given = rest.split("|", len(SERIES[name]) - 2) if rest else []
            child = self._series[name].labels(*self.per_engine_labelvalues[engine_idx], *given)
            (child.set if name in GAUGES else child.inc)(value)


def _log_as_vllm() -> None:
    """Have this process log picbench's lines in vLLM's format, unless vLLM's own are left out."""
    ours, theirs = logging.getLogger("picbench"), logging.getLogger("vllm")
    if theirs.isEnabledFor(logging.INFO) and not ours.handlers:
        ours.setLevel(theirs.level)
        ours.handlers = list(theirs.handlers)


def tier_values(client: Any) -> Values:
    """What tiers have done so far by a worker's `TierClient`, and what its host memory holds."""
    found = {
        f"{series}|{label}|{tier}": getattr(counters, name)
        for tier, counters in client.counters.items()
        for series, names in _OF_TIERS.items()
        for label, name in names.items()
    }
    # Far tiers are not asked: a step would wait for them.
    if (arena := client._chunks.arena) is not None:
        sizes = {"held": arena.held_bytes, "capacity": arena.capacity}
        found |= {f"tier_{name}_bytes|host": size for name, size in sizes.items()}
    return found
