"""Requests that decode together over chunks that they share, and that on several GPUs.

`DECODE_LOAD` compares shared decode with reading chunks for each request, and with stock vLLM;
`DECODE_SHARING` does so by how many requests share a chunk; `SCALING` compares an engine on several
GPUs with one on one GPU, and with stock vLLM.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.experiments.waves import (
    DecodeScene,
    as_stock,
    compiled_kernels,
    wave_arm,
    wave_engine,
)
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_lines
from picbench.run import runner
from picbench.run.measurements import DecodeUnderLoad, Outcome, Scaling
from picbench.run.runner import Cell, ExperimentPlan, RoundsRecord, ServedArm, facts_of
from picbench.statistics.significance import paired_ratio
from picbench.tables import page as pages
from picbench.tables.page import WHERE, Columns, by_round, mean_ratio, spread, spreads
from picbench.tables.table import table
from picbench.workloads import models

#: Shared decode off and auto, the engine of both, and stock vLLM.
OFF, AUTO, OURS, STOCK = "off", "auto", "mepic", "stock"

#: Arms of the load: also stock vLLM, and both with one common prefix, which prefix caching finds.
ARMS = {
    OFF: "picbench, each request reads its chunks (as at 198d84a)",
    AUTO: "picbench, shared decode",
    "prefix": "stock vLLM, prefix caching, as many as fit",
    "common": "stock vLLM, one common prefix",
    "own-common": "picbench, shared decode, one common prefix and no chunks",
}

#: The cell on several GPUs in which replies are.
REPLIES = "replies"

#: The load's scene, by device; and in what a first round may take: tokens of prompts a second, and
#: seconds of a step that decodes.
SCENES = {"cuda": DecodeScene(), "cpu": DecodeScene(4, 3, 6, 40, 9, 24)}
SPEEDS = {"cuda": (18_000, 0.035), "cpu": (2_500, 0.03)}


def wave_cell(name: str, device: str, scene: DecodeScene, arms: Mapping[str, ServedArm]) -> Cell:
    """A cell of requests that decode together; a block of each chunk is computed."""
    tokens_s, step_s = SPEEDS[device]
    computed = scene.requests * (scene.chunks * BLOCK_SIZE + scene.question)
    return Cell(name, arms, len(arms) * (computed / tokens_s + scene.reply * step_s))


def load_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """One cell: the load, in all arms, of as many requests as fit the pool at a time."""
    # On a GPU three engines with such pools fit 139 GiB.
    device, pool = settings.device, {"cuda": 12_000, "cpu": 200}[settings.device]
    scene = replace(SCENES[device], reply=settings.reply or SCENES[device].reply)
    own, config = scene.text_blocks, wave_engine(settings, scene, pool)
    chunks = scene.chunks * scene.length // BLOCK_SIZE
    # In common all chunks of all are one prefix; alone nothing is shared.
    common = replace(scene, requests=max(1, min(scene.requests, (pool - chunks - 1) // own)))
    alone = replace(scene, requests=min(scene.requests, pool // (chunks + own)))
    waves = (
        wave_arm(OFF, scene),
        wave_arm(AUTO, scene),
        wave_arm(STOCK, alone),
        wave_arm(STOCK, common, common=True),
        wave_arm(AUTO, common, common=True),
    )
    facts = {"scene": asdict(scene), "prompt": scene.prompt, "pool": pool}
    return ExperimentPlan(
        name="decode-load",
        facts=facts_of(settings) | facts,
        engines=_ours(config) | {STOCK: as_stock(config)},
        cells=[wave_cell("load", device, scene, dict(zip(ARMS, waves, strict=True)))],
        rounds=settings.rounds,
    )


def _ours(config: EngineConfig) -> dict[str, EngineConfig]:
    return {OFF: config, AUTO: replace(config, shared_decode="auto")}


def load_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json``: ratios of tokens a second in all, milliseconds a token."""
    figures = record.cells["load"]
    off, ours, prefix = (figures[arm]["tokens_s"] for arm in (OFF, AUTO, "prefix"))
    return {
        "shared_decode": {
            "engine_throughput_vs_198d84a": paired_ratio(off, ours).value,
            "engine_throughput_vs_prefix": paired_ratio(prefix, ours).value,
            "tpot_ms": median(figures[AUTO]["tpot_ms"]),
        }
    }


def render_load(record: RoundsRecord) -> str:
    """The page of the load, in Markdown."""
    if "load" not in record.cells:
        return ""
    figures, ours = record.cells["load"], record.cells["load"][AUTO]
    columns: Columns = {
        "tokens_s": ("tokens/s in all", 0),
        "decode_tokens_s": ("tokens/s, decode", 0),
        "tpot_ms": ("time per token, ms", 2),
        "tpot_p99_ms": ("its p99, ms", 2),
        "ttft_ms": ("TTFT, ms", 0),
    }
    arms = {name: figures[arm] for arm, name in ARMS.items() if arm in figures}
    rows, ratios = [], []
    for name, arm in arms.items():
        rows.append((name, f"{arm['in_flight'][0]:.0f}", *spreads(arm, columns)))
        if arm is not ours:
            rates = ("tokens_s", "decode_tokens_s")
            ratios.append((name, *(mean_ratio(ours[rate], arm[rate]) for rate in rates)))
    about = (
        WHERE + " {scene[requests]} requests in flight, {scene[chunks]} of {scene[corpus]} chunks "
        "of {scene[length]} tokens in a random order and a question of {scene[question]} "
        "({prompt:,} tokens), replies of {scene[reply]}; chunks are in the pool, of {pool:,} "
        "blocks in each engine. All engines are up at once and take turns; median (lowest - "
        "highest), n={n}. Decode is from the last first token to the first end."
    )
    return pages.page(
        "Decoding of long requests that share chunks",
        about.format(**record.facts, n=len(record.seconds["load"])),
        table(("", "requests", *(name for name, _ in columns.values())), rows, right=1),
        "Shared decode over the others, tokens a second; geometric mean over rounds (95 %).",
        table(("over", "in all", "decode"), ratios, right=1),
        _notes(record),
    )


def _notes(record: RoundsRecord) -> str:
    """What else happened: compiled chunks and lost requests spoil figures."""
    arms = [arm for figures in record.cells.values() for arm in figures.values()]
    compiled, lost = (
        round(sum(sum(arm.get(name, ())) for arm in arms))
        for name in ("compiled_tokens", "preemptions")
    )
    least = min(min(arm["tokens_a_step"]) for arm in arms)
    return (
        f"Chunk tokens compiled while measured: {compiled:,}; requests that lost their blocks: "
        f"{lost:,}. {compiled_kernels(record)} A step gives a request {least:.2f} tokens or more."
    )


def sharing_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """A cell for each degree of sharing, in two arms."""
    # On a GPU two engines with such pools fit 139 GiB.
    device = settings.device
    degrees, reply, pool = {"cuda": (range(7), 32, 22_000), "cpu": (range(3), 24, 200)}[device]
    whole = replace(SCENES[device], reply=settings.reply or reply, even=True)
    scenes = {str(2**degree): shared(whole, 2**degree, pool) for degree in degrees}
    longest = max(scenes.values(), key=lambda scene: scene.prompt)
    cells = []
    for degree, scene in scenes.items():
        # What steps that decode take is warmed up by those before, which compute the prompts.
        arms = {arm: replace(wave_arm(arm, scene), warm_up=None) for arm in (OFF, AUTO)}
        cells.append(wave_cell(degree, device, scene, arms))
    described = {degree: asdict(scene) for degree, scene in scenes.items()}
    return ExperimentPlan(
        name="decode-sharing",
        facts=facts_of(settings) | {"scenes": described, "pool": pool},
        engines=_ours(wave_engine(settings, longest, pool)),
        cells=cells,
        rounds=settings.rounds,
    )


def shared(scene: DecodeScene, degree: int, pool: int) -> DecodeScene:
    """The scene in which `degree` requests read each chunk, with as many chunks as a pool holds."""
    scenes = (
        replace(scene, chunks=chunks, corpus=scene.requests * chunks // degree)
        for chunks in range(scene.chunks, 0, -1)
    )
    return next(found for found in scenes if found.blocks <= pool)


def _shared_scenes(record: RoundsRecord) -> dict[str, DecodeScene]:
    """The scenes that are measured, by degree of sharing."""
    scenes = record.facts["scenes"]
    return {degree: DecodeScene(**scenes[degree]) for degree in sorted(record.cells, key=int)}


def render_sharing(record: RoundsRecord) -> str:
    """The page of the degrees of sharing, in Markdown."""
    if not record.cells:
        return ""
    rows, scenes = [], _shared_scenes(record)
    for degree, scene in scenes.items():
        off, auto = (record.cells[degree][arm] for arm in (OFF, AUTO))
        times = (spread(figures["tpot_ms"], 2) for figures in (off, auto))
        gain = mean_ratio(auto["decode_tokens_s"], off["decode_tokens_s"])
        rows.append((degree, f"{scene.corpus:,}", f"{scene.prompt:,}", *times, gain))
    head = ("sharing", "corpus", "prompt tokens", "off, ms a token", "auto, ms a token", "speed-up")
    about = (
        f"{WHERE} {scene.requests} requests decode together; each chunk of {scene.length} tokens "
        "is in the prompts of as many of them as the first column says. Prompts are shorter where "
        "the corpus would not fit the pool of {pool:,} blocks. Engines take turns; median (lowest "
        "- highest) of the rounds' medians; speed-up: tokens a second in decode, shared over not, "
        "geometric mean over rounds (95 %)."
    )
    return pages.page(
        "Decoding by how many requests share a chunk",
        about.format(**record.facts),
        table(head, rows, right=0),
        _notes(record),
    )


def draw_sharing(record: RoundsRecord, base: Path) -> None:
    """A line for each way of decoding: medians of rounds, from the lowest to the highest."""
    lines: dict[str, list[Spot]] = {"each request\nreads its\nchunks": [], "shared\ndecode": []}
    ticks = {}
    for degree, scene in _shared_scenes(record).items():
        place = log2(int(degree))
        ticks[place] = f"{degree}\n{scene.prompt / 1000:.0f}k"
        for arm, spots in zip((OFF, AUTO), lines.values(), strict=True):
            values = record.cells[degree][arm]["tpot_ms"]
            spots.append(Spot(place, median(values), min(values), max(values)))
    what = "requests that read a chunk, and tokens of a prompt"
    panel = Panel(what, "time per token, ms", WHERE.format(**record.facts))
    draw_lines(panel, lines, ticks, base)


DECODE_LOAD = runner.RoundsExperiment(plan=load_plan, render=render_load, figures=load_figures)
DECODE_SHARING = runner.RoundsExperiment(
    plan=sharing_plan, render=render_sharing, draw=draw_sharing
)


def measure(settings: DecodeUnderLoad) -> Outcome:
    """Measure what is left of the load, or of the degrees of sharing."""
    return (DECODE_SHARING if settings.sharing else DECODE_LOAD).measure(settings)


def scaling_plan(settings: Scaling) -> ExperimentPlan:
    """A cell for each length, in four arms, and one for the replies."""
    device, workers, sharing = settings.device, settings.workers, settings.shared_decode
    # On a GPU two engines with such pools and half of two others fit 139 GiB.
    lengths, reply, pool = {"cuda": ((16, 32, 64), 128, 10_000), "cpu": ((2, 3), 12, 200)}[device]
    asked = (
        DecodeScene(8, 8, 16, 56, 24, 32) if device == "cuda" else DecodeScene(2, 2, 4, 56, 24, 8)
    )
    whole = replace(SCENES[device], reply=reply)
    scenes = [replace(whole, chunks=chunks, corpus=2 * chunks) for chunks in lengths]
    plain = replace(wave_engine(settings, scenes[-1], pool), shared_decode=sharing)
    # The trained model's heads can be divided by two only.
    trained = models.resolve("testbed" if workers == 2 else "shape:small")
    replies = replace(wave_engine(settings, asked, 1_000), shared_decode=sharing)
    configs = {
        OURS: replace(plain, graph_tokens=settings.graph_tokens),
        STOCK: as_stock(plain),
        REPLIES: replace(replies, model=str(trained.path), dtype="float32"),
    }
    arms = {who: [f"{who} x{gpus}" for gpus in (1, workers)] for who in configs}
    cells = []
    for scene in scenes:
        waves = {a: wave_arm(a, scene, common=w == STOCK) for w in (OURS, STOCK) for a in arms[w]}
        cells.append(wave_cell(str(scene.prompt), device, scene, waves))
    work = partial(reply_sums, scene=asked)
    sums = wave_cell(REPLIES, device, asked, {arm: ServedArm(arm, work) for arm in arms[REPLIES]})
    facts: dict[str, Any] = {"pool": pool, "workers": workers, "shared_decode": sharing}
    facts |= {} if settings.graph_tokens is None else {"graph_tokens": settings.graph_tokens}
    facts["scenes"] = {str(scene.prompt): asdict(scene) for scene in scenes}
    facts["replies"] = {"model": trained.label, "dtype": "float32", **asdict(asked)}
    return ExperimentPlan(
        name=f"scaling-{workers}",
        facts=facts_of(settings) | facts,
        engines={
            arm: replace(configs[who], tensor_parallel=gpus)
            for who in arms
            for arm, gpus in zip(arms[who], (1, workers), strict=True)
        },
        cells=[*cells, replace(sums, rank=1, most=1)],
        rounds=settings.rounds,
    )


def reply_sums(engine: Engine, name: str, *, scene: DecodeScene) -> dict[str, float]:
    """A checksum of the tokens of each reply, which another engine is to give, too."""
    results = engine.generate(scene.draw(name, "mepic"), max_tokens=scene.reply, ignore_eos=True)
    sums = (float(zlib.crc32(array("q", result.tokens).tobytes())) for result in results)
    return {str(number): value for number, value in enumerate(sums)}


def _gains(record: RoundsRecord) -> dict[str, list[list[Sequence[float]]]]:
    """By length, of our engine and of stock vLLM: tokens a second of several GPUs, and of one."""
    names = [f" x{gpus}" for gpus in (record.facts["workers"], 1)]
    return {
        length: [
            [record.cells[length][who + name]["tokens_s"] for name in names]
            for who in (OURS, STOCK)
        ]
        for length in sorted(record.cells.keys() - {REPLIES}, key=int)
    }


def scaling_figures(record: RoundsRecord) -> dict[str, float]:
    """Throughput of several GPUs over one at the longest prompts, and the least over stock's."""
    gains, workers = [*_gains(record).values()], record.facts["workers"]
    several, one = gains[-1][0]
    ratios = [[by_round(*rates) for rates in pair] for pair in gains]
    return {
        f"tp{workers}_scaling": paired_ratio(one, several).value,
        f"tp{workers}_vs_stock_tp{workers}": min(paired_ratio(s, o).value for o, s in ratios),
    }


def render_scaling(record: RoundsRecord) -> str:
    """The page, in Markdown."""
    found, facts, workers = _gains(record), record.facts, record.facts["workers"]
    if not found:
        return ""
    columns: Columns = {
        "tokens_s": ("tokens/s", 0),
        "tpot_ms": ("time per token, ms", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
    }
    rows, gains = [], []
    for length, pair in found.items():
        prompt = f"{int(length):,}"
        for arm, figures in record.cells[length].items():
            rows.append((prompt, arm, str(len(figures["tokens_s"])), *spreads(figures, columns)))
        over = mean_ratio(*(by_round(*rates) for rates in pair))
        gains.append((prompt, *(mean_ratio(*rates) for rates in pair), over))
    replies = ""
    if REPLIES in record.cells:
        one, several = (record.cells[REPLIES][f"{REPLIES} x{n}"] for n in (1, workers))
        equal = sum(several[name] == sums for name, sums in one.items())
        replies = (
            "{model} in {dtype}, on {workers} GPUs and on one: {equal} of {count} replies of "
            "{reply} tokens are equal."
        ).format(**facts["replies"], workers=workers, equal=equal, count=len(one))
    graphs = f"{facts['graph_tokens']:,} tokens" if "graph_tokens" in facts else "the engine's own"
    about = (
        WHERE + " {scene[requests]} requests at once, of chunks of {scene[length]} tokens that are "
        "in the pool, half of twice as many, in a random order, and a question of "
        "{scene[question]}; replies of {scene[reply]}. `mepic` is an engine of picbench (shared "
        "decode: {shared_decode}, CUDA graphs: {graphs}), `stock` stock vLLM, whose "
        "requests have all these chunks as one common prefix. All engines are up at once, with "
        "pools of {pool:,} blocks, and take turns; median (lowest - highest). Tokens generated a "
        "second, prompts included."
    )
    return pages.page(
        "One engine on several GPUs",
        about.format(scene=facts["scenes"][min(found, key=int)], graphs=graphs, **facts),
        table(("prompt", "engine", "n", *(name for name, _ in columns.values())), rows, right=2),
        f"{workers} GPUs over one, tokens a second; geometric mean of rounds (95 %).",
        table(("prompt", OURS, STOCK, f"{OURS} over {STOCK}"), gains, right=0),
        replies,
        "\n".join(pages.first_lines(record.failures)),
    )


SCALING = runner.RoundsExperiment(plan=scaling_plan, render=render_scaling, figures=scaling_figures)
