"""How fast tiers store and fetch chunks, by themselves and under an engine (`HOST_TIER`).

By itself every tier is alone in a stack, so that what is timed is what the engine waits for:
copying and sealing, the call with its deadline, checking. A round stores a batch of new values,
waits, fetches it, checks the bytes, and deletes it. Values are random bytes. What was just written
is read back from memory wherever the system caches it, so disk reads are not the device's.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from picbench.engines.chunk_cache.tiers.notation import open_tiers, probe_tiers
from picbench.engines.chunk_cache.tiers.stack import StackLimits
from picbench.engines.chunk_cache.tiers.tier import TierSpec, parse_size
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.waves import BesideScene, serve_beside
from picbench.files import write_json
from picbench.run import runner
from picbench.run.measurements import HostTier, Outcome, Tiers
from picbench.run.runner import random_text, random_tokens
from picbench.store import provenance
from picbench.tables.page import WHERE, FigureRatio, FigureTable
from picbench.tables.table import table
from picbench.workloads.testbed import model_path

_WAIT = 120.0  # Seconds.


def measure(settings: Tiers) -> Outcome:
    """Time all tiers with all sizes; write JSON, if asked to.

    Raises InvalidRun if a tier does not keep or return what was stored.
    """
    rows: list[dict[str, Any]] = []
    for spec in probe_tiers(settings.tiers):
        for text in settings.sizes.split(","):
            nbytes, batch = _size(text), _size(settings.batch)
            values = max(1, batch // nbytes)
            payloads = [
                np.random.default_rng((settings.seed, i)).bytes(nbytes) for i in range(values)
            ]
            times = time_tier(spec, payloads, settings.rounds)
            row: dict[str, Any] = {
                "tier": spec.kind,
                "nbytes": nbytes,
                "values": values,
                "rounds": settings.rounds,
            }
            for way, seconds in zip(("store", "fetch"), zip(*times, strict=True), strict=True):
                speeds = [values * nbytes / 2**30 / each for each in seconds]
                row[way] = {
                    "median": median(speeds),
                    "slowest": min(speeds),
                    "fastest": max(speeds),
                }
            rows.append(row)
    if settings.output is not None:
        facts = provenance.facts("machine", "cores", "load", "python")
        facts["versions"] = provenance.facts("numpy", "xxhash")
        facts |= {"seed": settings.seed, "values": "random bytes"}
        write_json(settings.output, {"schema": 1, "provenance": facts, "rows": rows})
    speed = "{median:.2f} ({slowest:.2f}-{fastest:.2f})"
    lines = [
        (
            row["tier"],
            f"{row['nbytes'] / 2**20:g}",
            *(str(row[name]) for name in ("values", "rounds")),
            *(speed.format(**row[way]) for way in ("store", "fetch")),
        )
        for row in rows
    ]
    head = ("tier", "value MiB", "batch", "n", "store GiB/s", "fetch GiB/s")
    return Outcome(table(head, lines))


def _size(text: str) -> int:
    if size := parse_size(text):
        return size
    raise ConfigError(f"`sizes` {text}: not a size", hint="write 1MiB,32MiB")


def time_tier(spec: TierSpec, payloads: list[bytes], rounds: int) -> list[tuple[float, float]]:
    """Seconds in which a tier stores and fetches a batch, by round; one before these is dropped.

    Raises InvalidRun if the tier does not keep or return what was stored.
    """
    stack = open_tiers(
        [spec], limits=StackLimits(store_bytes=2 * sum(map(len, payloads)) + (64 << 20))
    )
    times = []
    try:
        for number in range(rounds + 1):
            keys = [number.to_bytes(16) + i.to_bytes(16) for i in range(len(payloads))]
            began = perf_counter()
            kept = stack.store(list(zip(keys, payloads, strict=True))).result(_WAIT)
            stored = perf_counter()
            sizes = [(key, len(payload)) for key, payload in zip(keys, payloads, strict=True)]
            found = stack.fetch(sizes).result(_WAIT)
            times.append((stored - began, perf_counter() - stored))
            stack.delete(keys).result(_WAIT)
            if not all(kept) or [each and bytes(each.data) for each in found] != payloads:
                raise InvalidRun(
                    f"{spec.text} did not keep a batch: {stack.counters()}",
                    hint="give it a capacity of some batches in `tiers`, or a longer deadline",
                )
    finally:
        stack.close()
    return times[1:]


#: The arms: an engine with a host tier, and one without tiers.
HOST, NONE = "host", "none"

#: Algorithms whose replies are compared: chunks are mapped, mapped in part, and copied.
CHECKED = ("naive", "mepic", "epic:k=16")

#: Blocks whose copies are timed by themselves.
COPIED = 512


def check(engine: Engine, name: str) -> dict[str, float]:
    """Serve prompts computed and loaded. Raises InvalidRun where anything differs."""
    # Some chunks end within a block.
    chunks = [Chunk(tokens=random_tokens(n, f"{name} {n}")) for n in (150, 35, 81, 64)]
    for algorithm in CHECKED:
        request = Request([*chunks, random_text(19, name)], algorithm)
        engine.reset()
        computed, before = _drained(engine, request, 16), engine.cache.digests(chunks)
        engine.reset(tiers=False)
        loaded, after = _drained(engine, request, 16), engine.cache.digests(chunks)
        wrong = {
            "replies differ": loaded.tokens != computed.tokens,
            "KV differs": after != before,
            "chunks were compiled again": loaded.counts.compile_work > 0,
            "nothing was loaded": not loaded.hits.tiers,
        }
        if found := [what for what, happened in wrong.items() if happened]:
            raise InvalidRun(f"{algorithm} from the host tier: {', '.join(found)}")
    return {"checked": len(CHECKED)}


def _drained(engine: Engine, request: Request, tokens: int = 1) -> Result:
    """A result, once what it leaves to store is stored."""
    [result] = engine.generate([request], max_tokens=tokens, ignore_eos=True)
    engine.drain()
    return result


def copies(engine: Engine, name: str) -> dict[str, float]:
    """GB/s of copies alone, out of the pool and into it; only with a tier."""
    if not engine.config.tiers:
        return {}
    out, back = engine.cache.time_copies(COPIED)
    nbytes = COPIED * float(engine.describe()["block_bytes"])
    return {"copy_out_gbps": nbytes / out / 1e9, "copy_in_gbps": nbytes / back / 1e9}


def ask(scene: BesideScene, chunks: Sequence[Chunk], name: str) -> Request:
    """A question about chunks, in an order of its own."""
    order = Random(name).sample(chunks, len(chunks))
    return Request([*order, random_text(scene.question, f"question {name}")], "mepic")


def ttft(engine: Engine, name: str, *, scene: BesideScene) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of new chunks, and of the same ones again.

    These are in host memory; without a tier, in the pool, and recomputed. Raises InvalidRun where
    chunks were not where they should be.
    """
    tiers, chunks = bool(engine.config.tiers), scene.draw(name)
    new = _drained(engine, ask(scene, chunks, f"{name} before"))
    if tiers:
        engine.reset(tiers=False)
    known = _drained(engine, ask(scene, chunks, name))
    for what, result, compiled, loaded in (
        ("new", new, True, False),
        ("known", known, False, tiers),
    ):
        if bool(result.counts.compile_work) != compiled or bool(result.hits.tiers) != loaded:
            raise InvalidRun(
                f"{what} chunks: {result.counts.compile_work} tokens were compiled, and tiers "
                f"loaded {dict(result.hits.tiers)} blocks",
                hint="give the host tier memory for all prompts",
            )
    found = {"cold_ms": new.timings.ttft * 1e3}
    if tiers:
        return found | {"load_ms": known.timings.ttft * 1e3}
    text = random_text(scene.prompt, f"{name} recomputed")
    full = _drained(engine, Request([text], "prefix"))
    return found | {"warm_ms": known.timings.ttft * 1e3, "full_ms": full.timings.ttft * 1e3}


def beside(engine: Engine, name: str, *, scene: BesideScene, new: bool) -> dict[str, float]:
    """Milliseconds of steps in which others decode, beside prompts of `new` or cached chunks.

    Each step gives each of the others a token, so that it is their inter-token latency.
    """
    prompts = {f"{name} {i}": scene.draw(f"{name} {i}") for i in range(scene.arrivals)}
    engine.reset()
    if not new:
        for own, chunks in prompts.items():
            _drained(engine, ask(scene, chunks, f"{own} before"))
        if engine.config.tiers:
            engine.reset(tiers=False)
    requests = [ask(scene, chunks, own) for own, chunks in prompts.items()]
    steps = serve_beside(engine, requests, name, scene)
    engine.drain()
    if not scene.reply <= len(steps) <= 1.1 * scene.reply + 10:
        raise InvalidRun(f"{len(steps)} steps for replies of {scene.reply} tokens")
    times = [(ended - began) * 1e3 for began, ended in steps]
    busy = float(np.percentile(times[scene.gap :], 99))
    if new:
        return {"itl_p99_cold_ms": busy}
    # The first steps compute prompts.
    return {"itl_p99_load_ms": busy, "itl_ms": median(times[4 : scene.gap])}


def check_replies(settings: HostTier) -> None:
    """Check the testbed's replies in float32. Raises InvalidRun where a check fails."""
    sizes = {"context": 1024, "kv_blocks": 400, "eager": True, "tiers": "host:1GiB"}
    model = {"model": str(model_path()), "dtype": "float32"}
    engines = {HOST: runner.engine_of(settings, **model, **sizes)}
    plan = runner.interleaved("check", {}, engines, {"check": check}, 1, warm_up=False)
    runner.run(plan, runner.RoundsRecord(), runner.say)


def host_tier_plan(settings: HostTier) -> runner.ExperimentPlan:
    """All measures of a scene, on an engine with a tier and on one without."""
    scene = BesideScene(settings.chunks)
    # The chunks of all arrivals and of one more, and what requests own.
    chunks = (scene.arrivals + 1) * scene.chunks * (-(-scene.length // BLOCK_SIZE) + 2)
    own = scene.chunks + scene.question + scene.others * (scene.reply + 2 * BLOCK_SIZE)
    config = runner.engine_of(
        settings,
        context=scene.prompt + 1024,
        batch_tokens=8192,
        kv_blocks=chunks + own + scene.prompt // BLOCK_SIZE,
        max_requests=64,
    )
    # All prompts of a measure and two more fit the tier.
    tiers = f"host:{1 + (scene.arrivals + 2) * scene.prompt * 128 // (1 << 20)}GiB"
    facts = runner.facts_of(settings) | {"repeats": settings.repeats}
    facts |= asdict(scene) | {"prompt": scene.prompt, "tiers": tiers}
    measures: dict[str, runner.Measure] = {
        "copies": copies,
        "ttft": partial(ttft, scene=scene),
        "beside loads": partial(beside, scene=scene, new=False),
        "beside stores": partial(beside, scene=scene, new=True),
    }
    arms = {HOST: replace(config, tiers=tiers), NONE: config}
    return runner.interleaved("host-tier", facts, arms, measures, settings.repeats)


def _ratio(name: str, *pairs: tuple[str, str]) -> FigureRatio:
    """Figures with a tier, each over one without."""
    return FigureRatio("tiers", name, [((HOST, ours), (NONE, other)) for ours, other in pairs])


HOST_TIER = runner.Experiment(
    plan=host_tier_plan,
    check=check_replies,
    title="Chunks in host memory",
    about=(
        f"{WHERE} "
        "Prompts of {chunks} chunks of {length} random tokens and a question, {prompt:,} tokens, "
        "under `mepic`; one engine with `{tiers}` and one without tiers, both up at once, in turn. "
        "Others are {others} plain requests that decode {reply} tokens beside {arrivals} such "
        "prompts. Before, loaded KV equalled computed KV byte for byte and replies in float32 "
        "token for token.\n\nMedian (lowest - highest)."
    ),
    tables=[
        FigureTable(
            {
                "copy_out_gbps": "blocks to host memory, GB/s",
                "copy_in_gbps": "blocks from host memory, GB/s",
                "cold_ms": "TTFT of new chunks, ms",
                "load_ms": "TTFT of chunks in host memory, ms",
                "warm_ms": "TTFT of chunks in the pool, ms",
                "full_ms": "TTFT of the prompt recomputed, ms",
                "itl_ms": "step of the others, alone, ms: median",
                "itl_p99_load_ms": "their steps beside loads (without a tier: beside warm chunks), "
                "ms: p99",
                "itl_p99_cold_ms": "their steps beside new chunks, ms: p99",
            },
            {HOST: "host tier", NONE: "no tier"},
            counted=True,
        )
    ],
    ratios=[
        _ratio("load_32k_vs_full", ("load_ms", "full_ms")),
        _ratio("cold_vs_no_tier", ("cold_ms", "cold_ms")),
        _ratio(
            "itl_p99_ratio",
            ("itl_p99_load_ms", "itl_p99_load_ms"),
            ("itl_p99_cold_ms", "itl_p99_cold_ms"),
        ),
    ],
    sentences=[
        "A load takes {load_32k_vs_full:.3f} of the prompt recomputed.",
        "New chunks take {cold_vs_no_tier:.3f} of the time without a tier.",
        "The p99 of the others' steps is {itl_p99_ratio:.3f} of that without a tier.",
    ],
)
