"""How fast tiers store and fetch chunks.

Every tier is alone in a stack, so that what is timed is what the engine waits for: copying and
sealing, the call with its deadline, checking. A round stores a batch of new values, waits, fetches
it, checks the bytes, and deletes it. Values are random bytes. What was just written is read back
from memory wherever the system caches it, so disk reads are not the device's.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from picbench.engines.chunk_cache.tiers.kinds import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import StackLimits, TierStack
from picbench.engines.chunk_cache.tiers.tier import TierSpec, parse_size
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.waves import p99, serve_beside
from picbench.files import write_json
from picbench.run.measurements import HostTier, Outcome, Tiers
from picbench.run.runner import (
    ArmsRecord,
    Experiment,
    ExperimentPlan,
    Measure,
    engine_of,
    facts_of,
    interleaved,
    random_chunks,
    random_text,
    random_tokens,
    run,
    say,
)
from picbench.store import provenance
from picbench.tables.page import WHERE, FigureRatio, FigureTable
from picbench.tables.table import table
from picbench.workloads.testbed import model_path

T = TypeVar("T")

#: A tier under batches of values of one size; speeds in GiB/s over the rounds.
Row = dict[str, Any]

_WAIT = 120.0
_WAYS = ("store", "fetch")


def measure(settings: Tiers) -> Outcome:
    """Time all tiers with all sizes; write JSON, if asked to.

    Raises InvalidRun if a tier does not keep or return what was stored.
    """
    rows = [
        time_tier(spec, _size(size), _size(settings.batch), settings.rounds, settings.seed)
        for spec in parse_tiers(settings.tiers)
        for size in settings.sizes.split(",")
    ]
    if settings.output is not None:
        facts = provenance.facts("machine", "cores", "load", "python")
        facts["versions"] = provenance.facts("numpy", "xxhash")
        facts |= {"seed": settings.seed, "values": "random bytes"}
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(settings.output, {"schema": 1, "provenance": facts, "rows": rows})
    return Outcome(render(rows))


def time_tier(spec: TierSpec, nbytes: int, batch: int, rounds: int, seed: int) -> Row:
    """Time one tier with values of one size, `batch` bytes at a time; the first round is dropped.

    Raises InvalidRun if the tier does not keep or return what was stored.
    """
    values = max(1, batch // nbytes)
    payloads = [np.random.default_rng((seed, i)).bytes(nbytes) for i in range(values)]
    stack = open_tiers([spec], limits=StackLimits(store_bytes=2 * batch + (64 << 20)))
    try:
        times = [_round(stack, spec, payloads, number) for number in range(rounds + 1)][1:]
    finally:
        stack.close()
    stores, fetches = (
        [values * nbytes / 2**30 / seconds for seconds in column]
        for column in zip(*times, strict=True)
    )
    row = {"tier": spec.kind, "nbytes": nbytes, "values": values, "rounds": rounds}
    return row | {"store": _speed(stores), "fetch": _speed(fetches)}


def render(rows: Sequence[Row]) -> str:
    """The rows in Markdown: medians, in brackets slowest and fastest."""
    head = ("tier", "value MiB", "batch", "n", "store GiB/s", "fetch GiB/s")
    lines = (
        (
            row["tier"],
            f"{row['nbytes'] / 2**20:g}",
            *(str(row[name]) for name in ("values", "rounds")),
            *("{median:.2f} ({slowest:.2f}-{fastest:.2f})".format(**row[way]) for way in _WAYS),
        )
        for row in rows
    )
    return table(head, lines)


def _round(
    stack: TierStack, spec: TierSpec, payloads: Sequence[bytes], number: int
) -> tuple[float, float]:
    """Seconds of storing and of fetching one batch."""
    keys = [number.to_bytes(16) + i.to_bytes(16) for i in range(len(payloads))]
    items = list(zip(keys, payloads, strict=True))
    store, kept = _timed(lambda: stack.store(items).result(_WAIT))
    fetch, found = _timed(lambda: stack.fetch([(k, len(p)) for k, p in items]).result(_WAIT))
    stack.delete(keys).result(_WAIT)
    if not all(kept) or any(f is None or f.data != p for f, p in zip(found, payloads, strict=True)):
        raise InvalidRun(
            f"{spec.text} did not keep a batch: {stack.counters()}",
            hint="give it a capacity of some batches in `tiers`, or a longer deadline",
        )
    return store, fetch


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def _speed(speeds: Sequence[float]) -> dict[str, float]:
    return {"median": median(speeds), "slowest": min(speeds), "fastest": max(speeds)}


def _size(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ConfigError(f"`sizes` {text}: not a size", hint="write 1MiB,32MiB")
    return size


#: The arms: an engine with a host tier, and one without tiers.
HOST, NONE = "host", "none"

#: Algorithms whose replies are compared: chunks are mapped, mapped in part, and copied.
CHECKED = ("naive", "mepic", "epic:k=16")

#: Tokens of the chunks that are checked: some end within a block.
LENGTHS = (150, 35, 81, 64)

#: Blocks whose copies are timed by themselves.
COPIED = 512


@dataclass(frozen=True, slots=True)
class HostTierScene:
    """What is timed: a prompt of `chunks` of `length` tokens and a question of `question`.

    Beside `arrivals` of such prompts, `gap` steps apart, `others` plain requests decode `reply`
    tokens each.
    """

    chunks: int = 64
    length: int = 512
    question: int = 80
    others: int = 16
    arrivals: int = 3
    gap: int = 100
    reply: int = 400

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.chunks * self.length + self.question

    @property
    def blocks(self) -> int:
        """Blocks of the pool: the chunks of all arrivals and one more, and what requests own."""
        chunk = -(-self.length // BLOCK_SIZE)
        own = self.chunks + self.question + self.others * (self.reply + 2 * BLOCK_SIZE)
        return (self.arrivals + 1) * self.chunks * (chunk + 2) + own + self.prompt // BLOCK_SIZE

    def draw(self, name: str) -> list[Chunk]:
        """Chunks that belong to a name."""
        return random_chunks(self.chunks, self.length, name)

    def ask(self, chunks: Sequence[Chunk], name: str) -> Request:
        """A question about chunks, in an order of its own."""
        order = Random(name).sample(chunks, len(chunks))
        return Request([*order, random_text(self.question, f"question {name}")], "mepic")


def check(engine: Engine, name: str) -> dict[str, float]:
    """Serve prompts computed and loaded. Raises InvalidRun where anything differs."""
    chunks = [Chunk(tokens=random_tokens(n, f"{name} {n}")) for n in LENGTHS]
    for algorithm in CHECKED:
        request = Request([*chunks, random_text(19, name)], algorithm)
        engine.reset()
        computed, before = _reply(engine, request), engine.cache.digests(chunks)
        engine.reset(tiers=False)
        loaded, after = _reply(engine, request), engine.cache.digests(chunks)
        wrong = {
            "replies differ": loaded.tokens != computed.tokens,
            "KV differs": after != before,
            "chunks were compiled again": loaded.counts.compiled > 0,
            "nothing was loaded": not loaded.hits.tiers,
        }
        if found := [what for what, happened in wrong.items() if happened]:
            raise InvalidRun(f"{algorithm} from the host tier: {', '.join(found)}")
    return {"checked": len(CHECKED)}


def _reply(engine: Engine, request: Request) -> Result:
    [result] = engine.generate([request], max_tokens=16, ignore_eos=True)
    engine.drain()
    return result


def copies(engine: Engine, name: str) -> dict[str, float]:
    """GB/s of copies alone, out of the pool and into it; only with a tier."""
    if not engine.config.tiers:
        return {}
    out, back = engine.cache.time_copies(COPIED)
    nbytes = COPIED * float(engine.describe()["block_bytes"])
    return {"copy_out_gbps": nbytes / out / 1e9, "copy_in_gbps": nbytes / back / 1e9}


def cold(engine: Engine, name: str, *, scene: HostTierScene) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of new chunks."""
    result = _first_token(engine, scene.ask(scene.draw(name), name))
    _require("new chunks", result, compiled=True, loaded=False)
    engine.drain()
    return {"cold_ms": result.timings.ttft * 1e3}


def load(engine: Engine, name: str, *, scene: HostTierScene) -> dict[str, float]:
    """The same of chunks in host memory; without a tier, in the pool, and recomputed."""
    chunks = scene.draw(name)
    _first_token(engine, scene.ask(chunks, f"{name} before"))
    engine.drain()
    if engine.config.tiers:
        engine.reset(tiers=False)
    result = _first_token(engine, scene.ask(chunks, name))
    _require("cached chunks", result, compiled=False, loaded=bool(engine.config.tiers))
    milliseconds = result.timings.ttft * 1e3
    if engine.config.tiers:
        return {"load_ms": milliseconds}
    text = random_text(scene.prompt, f"{name} recomputed")
    full = _first_token(engine, Request([text], "prefix"))
    return {"warm_ms": milliseconds, "full_ms": full.timings.ttft * 1e3}


def beside(engine: Engine, name: str, *, scene: HostTierScene, new: bool) -> dict[str, float]:
    """Milliseconds of steps in which others decode, beside prompts of `new` or cached chunks.

    Each step gives each of the others a token, so that it is their inter-token latency.
    """
    prompts = [scene.draw(f"{name} {i}") for i in range(scene.arrivals)]
    engine.reset()
    if not new:
        for i, chunks in enumerate(prompts):
            _first_token(engine, scene.ask(chunks, f"{name} {i} before"))
        engine.drain()
        if engine.config.tiers:
            engine.reset(tiers=False)
    requests = [scene.ask(chunks, f"{name} {i}") for i, chunks in enumerate(prompts)]
    quiet, busy = _steps(engine, requests, name, scene)
    if new:
        return {"itl_p99_cold_ms": p99(busy) * 1e3}
    return {"itl_p99_load_ms": p99(busy) * 1e3, "itl_ms": median(quiet) * 1e3}


def _steps(
    engine: Engine, prompts: Sequence[Request], name: str, scene: HostTierScene
) -> tuple[list[float], list[float]]:
    """Seconds of steps before the first arrival, and from then on while the others decode."""
    texts = (random_text(2 * BLOCK_SIZE, f"{name} other {i}") for i in range(scene.others))
    others = [Request([text], "prefix") for text in texts]
    steps = serve_beside(engine, prompts, others, gap=scene.gap, reply=scene.reply)
    engine.drain()
    if not scene.reply <= len(steps) <= 1.1 * scene.reply + 10:
        raise InvalidRun(f"{len(steps)} steps for replies of {scene.reply} tokens")
    times = [ended - began for began, ended in steps]
    # The first steps compute prompts.
    return times[4 : scene.gap], times[scene.gap :]


def _first_token(engine: Engine, request: Request) -> Result:
    [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
    return result


def _require(what: str, result: Result, *, compiled: bool, loaded: bool) -> None:
    if bool(result.counts.compiled) != compiled or bool(result.hits.tiers) != loaded:
        raise InvalidRun(
            f"{what}: {result.counts.compiled} tokens were compiled, and tiers loaded "
            f"{dict(result.hits.tiers)} blocks",
            hint="give the host tier memory for all prompts",
        )


def measures(scene: HostTierScene) -> dict[str, Measure]:
    """What is measured, in this order."""
    return {
        "copies": copies,
        "cold": partial(cold, scene=scene),
        "load": partial(load, scene=scene),
        "beside loads": partial(beside, scene=scene, new=False),
        "beside stores": partial(beside, scene=scene, new=True),
    }


def check_replies(settings: HostTier) -> None:
    """Check the testbed's replies in float32. Raises InvalidRun where a check fails."""
    config = EngineConfig(
        model=str(model_path()),
        device=settings.device,
        dtype="float32",
        context=1024,
        kv_blocks=400,
        eager=True,
        tiers="host:1GiB",
    )
    plan = interleaved("check", {}, {HOST: config}, {"check": check}, 1, warm_up=False)
    run(plan, ArmsRecord(say), say)


def host_tier_plan(settings: HostTier) -> ExperimentPlan:
    """All measures of a scene, on an engine with a tier and on one without."""
    scene = HostTierScene(chunks=settings.chunks)
    config = engine_of(
        settings,
        context=scene.prompt + 1024,
        batch_tokens=8192,
        kv_blocks=scene.blocks,
        max_requests=64,
    )
    # All prompts of a measure and two more fit the tier.
    gib = 1 + (scene.arrivals + 2) * scene.prompt * 128 // (1 << 20)
    arms = {HOST: replace(config, tiers=f"host:{gib}GiB"), NONE: config}
    facts = facts_of(settings) | {"repeats": settings.repeats}
    facts |= asdict(scene) | {"prompt": scene.prompt, "tiers": arms[HOST].tiers}
    return interleaved("host-tier", facts, arms, measures(scene), settings.repeats)


def _pair(figure: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """A figure with a tier, and without one."""
    return (HOST, figure), (NONE, figure)


HOST_TIER = Experiment(
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
        FigureRatio("tiers", "load_32k_vs_full", [((HOST, "load_ms"), (NONE, "full_ms"))]),
        FigureRatio("tiers", "cold_vs_no_tier", [_pair("cold_ms")]),
        FigureRatio("tiers", "itl_p99_ratio", [_pair("itl_p99_load_ms"), _pair("itl_p99_cold_ms")]),
    ],
    sentences=[
        "A load takes {load_32k_vs_full:.3f} of the prompt recomputed.",
        "New chunks take {cold_vs_no_tier:.3f} of the time without a tier.",
        "The p99 of the others' steps is {itl_p99_ratio:.3f} of that without a tier.",
    ],
)
