"""Tiers by themselves, and under an engine: what is asked, what is refused, and the page."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from harness_fakes import GPU_FACTS

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments.tiers import (
    CHECKED,
    HOST,
    HOST_TIER,
    NONE,
    beside,
    check,
    copies,
    host_tier_plan,
    ttft,
)
from picbench.experiments.waves import BesideScene
from picbench.run.measurements import HostTier
from picbench.tables.page import ratio_figures

SCENE = BesideScene(chunks=2, length=48, question=5, others=3, arrivals=2, gap=10, reply=40)

FOUND = {
    "host": {
        "cold_ms": [880.0, 900.0, 870.0],
        "load_ms": [150.0, 160.0, 170.0],
        "itl_p99_load_ms": [70.0],
        "itl_p99_cold_ms": [210.0],
        "copy_in_gbps": [50.0],
    },
    "none": {
        "cold_ms": [850.0, 860.0, 840.0],
        "full_ms": [1200.0, 1160.0, 1100.0],
        "warm_ms": [60.0],
        "itl_p99_load_ms": [65.0],
        "itl_p99_cold_ms": [205.0],
    },
}


@dataclass
class Tiered:
    """An engine that compiles chunks once, and loads them after a reset if it has tiers."""

    config: EngineConfig
    spoiled: Mapping[str, Any] = field(default_factory=dict)
    pool: set[tuple[int, ...]] = field(default_factory=set)
    stored: set[tuple[int, ...]] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    arrived: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def cache(self) -> Any:
        digests = self.spoiled.get("digests", lambda self: [b"kv"])
        return SimpleNamespace(
            digests=lambda chunks: digests(self), time_copies=lambda blocks: (0.5, 0.25)
        )

    def describe(self) -> dict[str, Any]:
        return {"block_bytes": 2_000_000}

    def reset(self, *, tiers: bool = True) -> None:
        self.pool.clear()
        if tiers:
            self.stored.clear()

    def drain(self) -> None:
        if self.config.tiers:
            self.stored |= self.pool

    def generate(self, requests: list[Request], *, max_tokens: int, ignore_eos: bool) -> Any:
        assert ignore_eos
        [request] = requests
        chunks = {s.tokens or () for s in request.segments if isinstance(s, Chunk)}
        loaded = len((chunks & self.stored) - self.pool)
        compiled = sum(map(len, chunks - self.stored - self.pool))
        self.pool |= chunks
        result = Result(
            "",
            (5,),
            (),
            Timings(ttft=0.5, prefill=0.0, tpot=None, e2e=0.0),
            TokenCounts(compile_work=compiled),
            Hits(tiers={"host": loaded} if loaded else {}),
        )
        changes = self.spoiled.get("result", lambda _: {})(self)
        return [replace(result, **changes)]

    def submit(self, request: Request, *, max_tokens: int, ignore_eos: bool) -> str:
        name = f"r{len(self.left)}-{self.steps}"
        if any(isinstance(segment, Chunk) for segment in request.segments):
            self.arrived.append(self.steps)
        self.left[name] = max_tokens
        return name

    def step(self) -> dict[str, None]:
        self.steps += 1
        for name in self.left:
            self.left[name] -= 1
        ended = [name for name, left in self.left.items() if not left]
        for name in ended:
            del self.left[name]
        return dict.fromkeys(ended)


def engine(tiers: str = "host:1GiB", **spoiled: Any) -> Any:
    return Tiered(EngineConfig("m", tiers=tiers), spoiled)


def test_replies_and_kv_are_compared() -> None:
    assert check(engine(), "a") == {"checked": len(CHECKED)}


@pytest.mark.parametrize(
    ("wrong", "spoiled"),
    [
        ("replies differ", {"result": lambda e: {"tokens": (len(e.stored),)}}),
        ("KV differs", {"digests": lambda e: [object()]}),
        ("were compiled again", {"result": lambda e: {"counts": TokenCounts(compile_work=1)}}),
        ("nothing was loaded", {"result": lambda e: {"hits": Hits()}}),
    ],
)
def test_what_differs_is_named(wrong: str, spoiled: dict[str, Any]) -> None:
    with pytest.raises(InvalidRun, match=f"naive from the host tier: .*{wrong}"):
        check(engine(**spoiled), "a")


def test_only_an_engine_with_a_tier_copies() -> None:
    assert copies(engine(""), "a") == {}
    assert copies(engine(), "a") == pytest.approx({"copy_out_gbps": 2.048, "copy_in_gbps": 4.096})


def test_new_chunks_are_new_and_cached_ones_are_where_they_should_be() -> None:
    assert list(ttft(engine(), "a", scene=SCENE)) == ["cold_ms", "load_ms"]
    times = {"cold_ms": 500.0, "warm_ms": 500.0, "full_ms": 500.0}
    known = engine("")
    assert ttft(known, "a", scene=SCENE) == times
    with pytest.raises(InvalidRun, match="new chunks: 0 tokens were compiled"):
        ttft(known, "a", scene=SCENE)


@pytest.mark.parametrize("new", [True, False])
def test_prompts_arrive_while_others_decode(new: bool) -> None:
    asked = engine()
    found = beside(asked, "a", scene=SCENE, new=new)
    kind = "cold" if new else "load"
    assert set(found) == {f"itl_p99_{kind}_ms", *(() if new else ("itl_ms",))}
    assert asked.arrived == [10, 20]


def test_prompts_that_do_not_arrive_are_an_error() -> None:
    with pytest.raises(InvalidRun, match="1 prompts did not arrive"):
        beside(engine(), "a", scene=replace(SCENE, gap=30), new=True)


def test_engines_differ_in_the_tier_alone_and_have_room_for_all_prompts() -> None:
    plan = host_tier_plan(HostTier(model="shape:tiny", commit="c"))
    assert plan.facts["prompt"] == 64 * 512 + 80
    host, none = plan.engines[HOST], plan.engines[NONE]
    assert none.kv_blocks * 16 > (plan.facts["arrivals"] + 1) * plan.facts["prompt"]
    names = [cell.name for cell in plan.cells]
    assert names == ["copies", "ttft", "beside loads", "beside stores"]
    assert host == replace(none, tiers=plan.facts["tiers"])


def test_the_page_and_figures_that_are_ratios_of_medians() -> None:
    facts = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "tiers": "host:9GiB", "chunks": 64}
    facts |= {"length": 512, "prompt": 32_848, "others": 16, "reply": 400, "arrivals": 3}
    page = HOST_TIER.render(FOUND, facts)
    assert "| TTFT of chunks in host memory, ms | 160.0 (150.0 - 170.0, n=3) | - |" in page
    assert "A load takes 0.138 of the prompt recomputed" in page
    assert ratio_figures(HOST_TIER.ratios, FOUND)["tiers"] == pytest.approx(
        {"load_32k_vs_full": 160 / 1160, "cold_vs_no_tier": 880 / 850, "itl_p99_ratio": 70 / 65}
    )
    some: Any = {arm: {"cold_ms": figures["cold_ms"]} for arm, figures in FOUND.items()}
    assert list(ratio_figures(HOST_TIER.ratios, some)["tiers"]) == ["cold_vs_no_tier"]
    assert "A load takes" not in HOST_TIER.render(some, facts)


def test_a_table_and_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out" / "tiers.json"
    tiers = f"host:4MiB,disk:{tmp_path}:4MiB"
    options = ["--tiers", tiers, "--sizes", "4KiB,64KiB", "--batch", "128KiB", "--rounds", "2"]
    result = CliRunner().invoke(main, ["measure", "tiers", *options, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 2 + 4
    rows = json.loads(output.read_text())["rows"]
    measured = [(row["tier"], row["nbytes"], row["values"]) for row in rows]
    assert measured == [(kind, n << 10, 128 // n) for kind in ("host", "disk") for n in (4, 64)]
    assert all(row["store"]["slowest"] <= row["store"]["median"] for row in rows)


def test_a_tier_that_loses_values_is_no_measurement() -> None:
    flags = ["--tiers", "host:64KiB", "--sizes", "48KiB", "--batch", "96KiB"]
    result = CliRunner().invoke(main, ["measure", "tiers", *flags])
    assert result.exit_code == 3
    assert "of some batches in --tiers" in result.output
