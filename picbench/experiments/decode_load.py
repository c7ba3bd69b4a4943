"""Requests that decode together over chunks that they share, and that on several GPUs.

`DECODE_LOAD` compares shared decode with reading chunks for each request, and with stock vLLM;
`DECODE_SHARING` does so by how many requests share a chunk; `SCALING` compares an engine on several
GPUs with one on one GPU, and with stock vLLM.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.experiments.waves import CostGuess, DecodeScene, as_stock, wave_arm, wave_engine
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_lines
from picbench.run.measurements import DecodeUnderLoad, Outcome, Scaling
from picbench.run.runner import (
    Cell,
    ExperimentPlan,
    RoundsExperiment,
    RoundsRecord,
    ServedArm,
    facts_of,
)
from picbench.statistics.significance import paired_ratio
from picbench.tables.page import (
    WHERE,
    Columns,
    Found,
    by_round,
    first_lines,
    mean_ratio,
    page,
    spread,
    spreads,
)
from picbench.tables.table import table
from picbench.workloads import models

#: The arms: shared decode off and auto, stock vLLM; and with one common prefix, which prefix
#: caching finds, stock vLLM and the engine with shared decode.
OFF, AUTO, PREFIX, COMMON = "off", "auto", "prefix", "common"
OWN_COMMON = "own-common"

STOCK = "stock"

_NAMES = {
    OFF: "picbench, each request reads its chunks (as at 198d84a)",
    AUTO: "picbench, shared decode",
    PREFIX: "stock vLLM, prefix caching, as many as fit",
    COMMON: "stock vLLM, one common prefix",
    OWN_COMMON: "picbench, shared decode, one common prefix and no chunks",
}

_COLUMNS: Columns = MappingProxyType(
    {
        "tokens_s": ("tokens/s in all", 0),
        "decode_tokens_s": ("tokens/s, decode", 0),
        "tpot_ms": ("time per token, ms", 2),
        "tpot_p99_ms": ("its p99, ms", 2),
        "ttft_ms": ("TTFT, ms", 0),
    }
)


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """The scenes of a device: of the load, and of the degrees of sharing; pools are in blocks.

    A prompt of `degrees` has as many chunks as the pool has room for, up to the load's. `costs` is
    what a first round may take. By default what a GPU has room for.
    """

    scene: DecodeScene
    costs: CostGuess
    pool: int = 12_000
    degrees: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    sharing_reply: int = 32
    sharing_pool: int = 22_000

    def at(self, degree: int) -> DecodeScene:
        """The scene in which `degree` requests read each chunk."""
        scene = replace(self.scene, reply=self.sharing_reply, even=True)
        for chunks in range(scene.chunks, 0, -1):
            corpus = scene.requests * chunks // degree
            found = replace(scene, chunks=chunks, corpus=corpus)
            if found.blocks <= self.sharing_pool:
                break
        return found


#: By device. On a GPU three engines with the load's pools fit 139 GiB, or two with the other ones.
DECODE_SIZES: Mapping[str, DecodeSizes] = MappingProxyType(
    {
        "cuda": DecodeSizes(DecodeScene(), CostGuess(18_000, 0.035)),
        "cpu": DecodeSizes(
            DecodeScene(4, 3, 6, 40, 9, 24), CostGuess(3_000, 0.02), 200, (1, 2, 4), 24, 200
        ),
    }
)


def _sizes(settings: DecodeUnderLoad) -> DecodeSizes:
    """The device's sizes, with the replies that were asked for."""
    found = DECODE_SIZES[settings.device]
    if not settings.reply:
        return found
    scene = replace(found.scene, reply=settings.reply)
    return replace(found, scene=scene, sharing_reply=settings.reply)


def load_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """One cell: the load, in all arms."""
    sizes = _sizes(settings)
    scene = sizes.scene
    config = wave_engine(settings, scene, sizes.pool)
    alone = replace(scene, requests=scene.plain_fit(sizes.pool))
    common = replace(scene, requests=scene.common_fit(sizes.pool))
    arms = {
        OFF: wave_arm(OFF, scene),
        AUTO: wave_arm(AUTO, scene),
        PREFIX: wave_arm(STOCK, alone),
        COMMON: wave_arm(STOCK, common, common=True),
        OWN_COMMON: wave_arm(AUTO, common, common=True),
    }
    facts = {"scene": asdict(scene), "prompt": scene.prompt, "pool": sizes.pool}
    return ExperimentPlan(
        name="decode-load",
        facts=facts_of(settings) | facts,
        engines=_ours(config) | {STOCK: as_stock(config)},
        cells=[Cell("load", arms, len(arms) * sizes.costs.wave(scene))],
        rounds=settings.rounds,
    )


def sharing_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """A cell for each degree of sharing, in two arms."""
    sizes = _sizes(settings)
    scenes = {str(degree): sizes.at(degree) for degree in sizes.degrees}
    longest = max(scenes.values(), key=lambda scene: scene.prompt)
    facts = {
        "scenes": {degree: asdict(scene) for degree, scene in scenes.items()},
        "pool": sizes.sharing_pool,
    }
    return ExperimentPlan(
        name="decode-sharing",
        facts=facts_of(settings) | facts,
        engines=_ours(wave_engine(settings, longest, sizes.sharing_pool)),
        cells=[_degree(name, scene, sizes.costs) for name, scene in scenes.items()],
        rounds=settings.rounds,
    )


def _degree(name: str, scene: DecodeScene, costs: CostGuess) -> Cell:
    # What steps that decode take is warmed up by those before, which compute the prompts.
    arms = {arm: replace(wave_arm(arm, scene), warm_up=None) for arm in (OFF, AUTO)}
    return Cell(name, arms, len(arms) * costs.wave(scene))


def _ours(config: EngineConfig) -> dict[str, EngineConfig]:
    return {OFF: config, AUTO: replace(config, shared_decode="auto")}


def load_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json``: ratios of tokens a second in all, milliseconds a token."""
    figures = record.cells["load"]
    ours = figures[AUTO]["tokens_s"]
    return {
        "shared_decode": {
            "engine_throughput_vs_198d84a": paired_ratio(figures[OFF]["tokens_s"], ours).value,
            "engine_throughput_vs_prefix": paired_ratio(figures[PREFIX]["tokens_s"], ours).value,
            "tpot_ms": median(figures[AUTO]["tpot_ms"]),
        }
    }


def render_load(record: RoundsRecord) -> str:
    """The page of the load, in Markdown."""
    if "load" not in record.cells:
        return ""
    facts, figures = record.facts, record.cells["load"]
    rows = [
        (name, f"{figures[arm]['in_flight'][0]:.0f}", *spreads(figures[arm], _COLUMNS))
        for arm, name in _NAMES.items()
        if arm in figures
    ]
    rates = ("tokens_s", "decode_tokens_s")
    ratios = [
        (name, *(mean_ratio(figures[AUTO][key], figures[arm][key]) for key in rates))
        for arm, name in _NAMES.items()
        if arm in figures and arm != AUTO
    ]
    said = (
        "{requests} requests in flight, {chunks} of {corpus} chunks of {length} tokens in a random "
        "order and a question of {question}"
    ).format(**facts["scene"])
    return page(
        "Decoding of long requests that share chunks",
        f"{_about(facts)} {said} ({facts['prompt']:,} tokens), replies of "
        f"{facts['scene']['reply']}; chunks are in the pool, of {facts['pool']:,} blocks in each "
        "engine. All engines are up at once; arms take turns, another one first in each round, "
        f"n={len(record.seconds['load'])}; median (lowest - highest). Decode is from the last "
        "first token to the first end: there a step gives each request a token.",
        table(("", "requests", *(name for name, _ in _COLUMNS.values())), rows, right=1),
        "Shared decode over the others, tokens a second; geometric mean over rounds (95 %).",
        table(("over", "in all", "decode"), ratios, right=1),
        _notes(record),
    )


def render_sharing(record: RoundsRecord) -> str:
    """The page of the degrees of sharing, in Markdown."""
    if not record.cells:
        return ""
    rows = []
    for degree in sorted(record.cells, key=int):
        figures, scene = record.cells[degree], record.facts["scenes"][degree]
        rows.append(
            (
                degree,
                f"{scene['corpus']:,}",
                f"{_prompt(scene):,}",
                *(spread(figures[arm]["tpot_ms"], 2) for arm in (OFF, AUTO)),
                mean_ratio(figures[AUTO]["decode_tokens_s"], figures[OFF]["decode_tokens_s"]),
            )
        )
    scene = next(iter(record.facts["scenes"].values()))
    head = ("sharing", "corpus", "prompt tokens", "off, ms a token", "auto, ms a token", "speed-up")
    return page(
        "Decoding by how many requests share a chunk",
        f"{_about(record.facts)} {scene['requests']} requests decode together; each chunk of "
        f"{scene['length']} tokens is in the prompts of as many of them as the first column says, "
        "in an order of its own in each. Prompts are shorter where the corpus would not fit the "
        f"pool of {record.facts['pool']:,} blocks. Both engines are up at once and take turns; "
        "median (lowest - highest) of the rounds' medians; speed-up: tokens a second in decode, "
        "shared over not, geometric mean over rounds (95 %).",
        table(head, rows, right=0),
        _notes(record),
    )


def draw_sharing(record: RoundsRecord, base: Path) -> None:
    """A line for each way of decoding: medians of rounds, from the lowest to the highest."""
    degrees = sorted(record.cells, key=int)
    names = {OFF: "each request\nreads its\nchunks", AUTO: "shared\ndecode"}
    lines = {
        name: [
            Spot(log2(int(degree)), median(values), min(values), max(values))
            for degree in degrees
            if (values := record.cells[degree][arm]["tpot_ms"])
        ]
        for arm, name in names.items()
    }
    ticks = {
        log2(int(degree)): f"{degree}\n{_prompt(record.facts['scenes'][degree]) / 1000:.0f}k"
        for degree in degrees
    }
    what = "requests that read a chunk, and tokens of a prompt"
    panel = Panel(what, "time per token, ms", _about(record.facts))
    draw_lines(panel, lines, ticks, base)


def _prompt(scene: Mapping[str, int]) -> int:
    return scene["chunks"] * scene["length"] + scene["question"]


def _about(facts: Mapping[str, Any]) -> str:
    nothing = "times, not answers, and log-probabilities of such weights would say nothing;"
    return WHERE.replace("times, not answers;", nothing).format(**facts)


def _notes(record: RoundsRecord) -> str:
    """What else happened: compiled chunks and lost requests spoil figures."""

    def values(name: str) -> list[float]:
        arms = (arm for figures in record.cells.values() for arm in figures.values())
        return [value for arm in arms for value in arm.get(name, ())]

    kernels = "; ".join(
        f"{name}: {', '.join(f'`{kernel}`' for kernel in compiled) or 'none'}"
        for name, compiled in record.compiled.items()
    )
    compiled, lost = (round(sum(values(name))) for name in ("compiled_tokens", "preemptions"))
    return (
        f"Chunk tokens compiled while measured: {compiled:,}; requests that lost their blocks: "
        f"{lost:,}. Kernels compiled after engines were ready: {kernels}. A step gives a request "
        f"{min(values('tokens_a_step')):.2f} tokens or more."
    )


DECODE_LOAD = RoundsExperiment(plan=load_plan, render=render_load, figures=load_figures)
DECODE_SHARING = RoundsExperiment(plan=sharing_plan, render=render_sharing, draw=draw_sharing)


def measure(settings: DecodeUnderLoad) -> Outcome:
    """Measure what is left of the load, or of the degrees of sharing."""
    return (DECODE_SHARING if settings.sharing else DECODE_LOAD).measure(settings)


#: The engines that are compared on one GPU and on several.
OURS = "mepic"

#: The cell in which replies are compared, and its arms.
REPLIES = "replies"

#: Models whose replies are compared: the trained one's heads can be divided by two only.
_TRAINED, _OTHERWISE = "testbed", "shape:small"


@dataclass(frozen=True, slots=True)
class ScalingSizes:
    """Requests of a device, of each length that is given in chunks; pools are in blocks.

    `replies` is what the trained model is asked. By default what a GPU has room for.
    """

    scene: DecodeScene
    replies: DecodeScene
    costs: CostGuess
    lengths: tuple[int, ...] = (16, 32, 64)
    pool: int = 10_000
    replies_pool: int = 1_000

    def at(self, chunks: int) -> DecodeScene:
        """Requests of this many chunks, drawn from twice as many."""
        return replace(self.scene, chunks=chunks, corpus=2 * chunks)


#: By device. On a GPU two engines with such pools and half of two others fit 139 GiB.
SCALING_SIZES: Mapping[str, ScalingSizes] = MappingProxyType(
    {
        "cuda": ScalingSizes(
            DecodeScene(reply=128), DecodeScene(8, 8, 16, 56, 24, 32), CostGuess(18_000, 0.03)
        ),
        "cpu": ScalingSizes(
            DecodeScene(4, 3, 6, 40, 9, 12),
            DecodeScene(2, 2, 4, 56, 24, 8),
            CostGuess(2_000, 0.05),
            lengths=(2, 3),
            pool=200,
            replies_pool=100,
        ),
    }
)


def arm_name(who: str, gpus: int) -> str:
    """What an arm on this many GPUs is called."""
    return f"{who} x{gpus}"


def scaling_plan(settings: Scaling) -> ExperimentPlan:
    """A cell for each length, in four arms, and one for the replies."""
    sizes, workers = SCALING_SIZES[settings.device], settings.workers
    scenes = [sizes.at(chunks) for chunks in sizes.lengths]
    longest = max(scenes, key=lambda scene: scene.prompt)
    plain = replace(
        wave_engine(settings, longest, sizes.pool), shared_decode=settings.shared_decode
    )
    asked = models.resolve(_TRAINED if workers == 2 else _OTHERWISE)
    replies = replace(
        wave_engine(settings, sizes.replies, sizes.replies_pool),
        model=str(asked.path),
        dtype="float32",
        shared_decode=settings.shared_decode,
    )
    graphs = {} if settings.graph_tokens is None else {"graph_tokens": settings.graph_tokens}
    facts = {
        "pool": sizes.pool,
        "workers": workers,
        "shared_decode": settings.shared_decode,
        **graphs,
        "scenes": {str(scene.prompt): asdict(scene) for scene in scenes},
        "replies": {"model": asked.label, "dtype": "float32", **asdict(sizes.replies)},
    }
    return ExperimentPlan(
        name=f"scaling-{workers}",
        facts=facts_of(settings) | facts,
        engines={
            arm_name(who, gpus): replace(config, tensor_parallel=gpus)
            for who, config in {
                OURS: replace(plain, graph_tokens=settings.graph_tokens),
                STOCK: as_stock(plain),
                REPLIES: replies,
            }.items()
            for gpus in (1, workers)
        },
        cells=[*(_length(scene, workers, sizes) for scene in scenes), _replies(workers, sizes)],
        rounds=settings.rounds,
    )


def _length(scene: DecodeScene, workers: int, sizes: ScalingSizes) -> Cell:
    arms = {
        name: wave_arm(name, scene, common=who == STOCK)
        for who in (OURS, STOCK)
        for name in (arm_name(who, 1), arm_name(who, workers))
    }
    return Cell(str(scene.prompt), arms, len(arms) * sizes.costs.wave(scene))


def _replies(workers: int, sizes: ScalingSizes) -> Cell:
    work = partial(reply_sums, scene=sizes.replies)
    arms = {name: ServedArm(name, work) for name in _pair(REPLIES, workers)}
    return Cell(REPLIES, arms, 2 * sizes.costs.wave(sizes.replies), rank=1, most=1)


def reply_sums(engine: Engine, name: str, *, scene: DecodeScene) -> dict[str, float]:
    """A checksum of the tokens of each reply, which another engine is to give, too."""
    requests = scene.draw(name, scene.requests, "mepic")
    results = engine.generate(requests, max_tokens=scene.reply, ignore_eos=True)
    return {
        str(number): float(zlib.crc32(array("q", result.tokens).tobytes()))
        for number, result in enumerate(results)
    }


def _pair(who: str, workers: int) -> tuple[str, str]:
    """The arms on one GPU, and on several."""
    return arm_name(who, 1), arm_name(who, workers)


def _rates(figures: Found, who: str, workers: int) -> tuple[Sequence[float], Sequence[float]]:
    """Tokens a second of several GPUs, and of one."""
    one, several = (figures[arm]["tokens_s"] for arm in _pair(who, workers))
    return several, one


def _gains(figures: Found, workers: int) -> tuple[Sequence[float], Sequence[float]]:
    """Tokens a second of several GPUs over one, round by round: ours, and stock vLLM's."""
    return (by_round(*_rates(figures, OURS, workers)), by_round(*_rates(figures, STOCK, workers)))


def _measured(record: RoundsRecord) -> list[str]:
    """The measured lengths, shortest first."""
    return sorted(record.cells.keys() - {REPLIES}, key=int)


def scaling_figures(record: RoundsRecord) -> dict[str, float]:
    """Throughput of several GPUs over one at the longest prompts, and the least over stock's."""
    workers, lengths = record.facts["workers"], _measured(record)
    over_stock = []
    for length in lengths:
        ours, theirs = _gains(record.cells[length], workers)
        over_stock.append(paired_ratio(theirs, ours).value)
    several, one = _rates(record.cells[lengths[-1]], OURS, workers)
    return {
        f"tp{workers}_scaling": paired_ratio(one, several).value,
        f"tp{workers}_vs_stock_tp{workers}": min(over_stock),
    }


def render_scaling(record: RoundsRecord) -> str:
    """The page, in Markdown."""
    lengths = _measured(record)
    if not lengths:
        return ""
    facts, workers = record.facts, record.facts["workers"]
    columns = {
        "tokens_s": ("tokens/s", 0),
        "tpot_ms": ("time per token, ms", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
    }
    rows = [
        (f"{int(length):,}", arm, str(len(figures["tokens_s"])), *spreads(figures, columns))
        for length in lengths
        for arm, figures in record.cells[length].items()
    ]
    gains = []
    for length in lengths:
        figures = record.cells[length]
        own = (mean_ratio(*_rates(figures, who, workers)) for who in (OURS, STOCK))
        gains.append((f"{int(length):,}", *own, mean_ratio(*_gains(figures, workers))))
    head = ("prompt", "engine", "n", *(name for name, _ in columns.values()))
    return page(
        "One engine on several GPUs",
        _scaling_about(facts, facts["scenes"][lengths[0]]),
        table(head, rows, right=2),
        f"{workers} GPUs over one, tokens a second; geometric mean of rounds (95 %).",
        table(("prompt", OURS, STOCK, f"{OURS} over {STOCK}"), gains, right=0),
        _equal_replies(facts, record.cells.get(REPLIES)),
        "\n".join(first_lines(record.failures)),
    )


def _scaling_about(facts: Mapping[str, Any], scene: Mapping[str, int]) -> str:
    graphs = ""
    if "graph_tokens" in facts:
        graphs = f", CUDA graphs of up to {facts['graph_tokens']:,} tokens"
    return (
        f"{WHERE.format(**facts)} {scene['requests']} requests at once, of chunks of "
        f"{scene['length']} tokens that are in the pool, half of twice as many, in a random order, "
        f"and a question of {scene['question']}; replies of {scene['reply']}. `{OURS}` is an "
        f"engine of picbench (shared decode: {facts['shared_decode']}{graphs}), `{STOCK}` stock "
        "vLLM, whose requests have all these chunks as one common prefix. All engines are up at "
        f"once, with pools of {facts['pool']:,} blocks, and take turns, another one first in each "
        "round; median (lowest - highest). Tokens generated a second, prompts included."
    )


def _equal_replies(facts: Mapping[str, Any], figures: Found | None) -> str:
    if figures is None:
        return ""
    asked = facts["replies"]
    one, several = (figures[arm] for arm in _pair(REPLIES, facts["workers"]))
    equal = sum(several[name] == sums for name, sums in one.items())
    return (
        f"{asked['model']} in {asked['dtype']}, as it is served, on {facts['workers']} GPUs and "
        f"on one: {equal} of {len(one)} replies of {asked['reply']} tokens are equal."
    )


SCALING = RoundsExperiment(plan=scaling_plan, render=render_scaling, figures=scaling_figures)
