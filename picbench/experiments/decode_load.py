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
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.experiments.waves import CostGuess, DecodeScene, as_stock, wave_arm, wave_engine
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_lines
from picbench.run import runner
from picbench.run.measurements import DecodeUnderLoad, Outcome, Scaling
from picbench.run.runner import ExperimentPlan, RoundsRecord, facts_of
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

#: Engines that are compared on several GPUs, and the cell in which replies are.
OURS, STOCK, REPLIES = "mepic", "stock", "replies"

_NAMES = {
    OFF: "picbench, each request reads its chunks (as at 198d84a)",
    AUTO: "picbench, shared decode",
    PREFIX: "stock vLLM, prefix caching, as many as fit",
    COMMON: "stock vLLM, one common prefix",
    OWN_COMMON: "picbench, shared decode, one common prefix and no chunks",
}

_COLUMNS: Columns = {
    "tokens_s": ("tokens/s in all", 0),
    "decode_tokens_s": ("tokens/s, decode", 0),
    "tpot_ms": ("time per token, ms", 2),
    "tpot_p99_ms": ("its p99, ms", 2),
    "ttft_ms": ("TTFT, ms", 0),
}


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """What a device serves, by default a GPU; pools are in blocks.

    `scene` is that of the load. Scenes of `degrees` of sharing have as many chunks as their pool
    has room for, up to the load's. `lengths` of prompts on several GPUs are in chunks, and
    `replies` is what the trained model is asked there. `costs` is what a first round may take.
    """

    scene: DecodeScene
    replies: DecodeScene
    costs: CostGuess
    pool: int = 12_000
    degrees: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    sharing_reply: int = 32
    sharing_pool: int = 22_000
    lengths: Sequence[int] = (16, 32, 64)
    scaling_reply: int = 128
    scaling_pool: int = 10_000
    replies_pool: int = 1_000

    def shared(self, degree: int, reply: int | None = None) -> DecodeScene:
        """The scene in which `degree` requests read each chunk."""
        scene = replace(self.scene, reply=reply or self.sharing_reply, even=True)
        for chunks in range(scene.chunks, 0, -1):
            found = replace(scene, chunks=chunks, corpus=scene.requests * chunks // degree)
            if found.blocks <= self.sharing_pool:
                break
        return found

    def scaled(self) -> list[DecodeScene]:
        """The scenes on several GPUs: chunks are drawn from twice as many."""
        return [
            replace(self.scene, chunks=chunks, corpus=2 * chunks, reply=self.scaling_reply)
            for chunks in self.lengths
        ]


#: By device. On a GPU three engines with the load's pools fit 139 GiB, or two with those of
#: sharing; or two engines with the pools of several GPUs and half of two others.
SIZES = {
    "cuda": DecodeSizes(DecodeScene(), DecodeScene(8, 8, 16, 56, 24, 32), CostGuess(18_000, 0.035)),
    "cpu": DecodeSizes(
        DecodeScene(4, 3, 6, 40, 9, 24),
        DecodeScene(2, 2, 4, 56, 24, 8),
        CostGuess(2_500, 0.03),
        pool=200,
        degrees=(1, 2, 4),
        sharing_reply=24,
        sharing_pool=200,
        lengths=(2, 3),
        scaling_reply=12,
        scaling_pool=200,
        replies_pool=100,
    ),
}


def load_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """One cell: the load, in all arms."""
    sizes = SIZES[settings.device]
    scene = replace(sizes.scene, reply=settings.reply or sizes.scene.reply)
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
        cells=[runner.Cell("load", arms, len(arms) * sizes.costs.wave(scene))],
        rounds=settings.rounds,
    )


def sharing_plan(settings: DecodeUnderLoad) -> ExperimentPlan:
    """A cell for each degree of sharing, in two arms."""
    sizes = SIZES[settings.device]
    scenes = {str(degree): sizes.shared(degree, settings.reply) for degree in sizes.degrees}
    longest = max(scenes.values(), key=lambda scene: scene.prompt)
    described = {degree: asdict(scene) for degree, scene in scenes.items()}
    cells = []
    for degree, scene in scenes.items():
        # What steps that decode take is warmed up by those before, which compute the prompts.
        arms = {arm: replace(wave_arm(arm, scene), warm_up=None) for arm in (OFF, AUTO)}
        cells.append(runner.Cell(degree, arms, len(arms) * sizes.costs.wave(scene)))
    return ExperimentPlan(
        name="decode-sharing",
        facts=facts_of(settings) | {"scenes": described, "pool": sizes.sharing_pool},
        engines=_ours(wave_engine(settings, longest, sizes.sharing_pool)),
        cells=cells,
        rounds=settings.rounds,
    )


def _ours(config: EngineConfig) -> dict[str, EngineConfig]:
    return {OFF: config, AUTO: replace(config, shared_decode="auto")}


def load_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json``: ratios of tokens a second in all, milliseconds a token."""
    figures = record.cells["load"]
    off, ours, prefix = (figures[arm]["tokens_s"] for arm in (OFF, AUTO, PREFIX))
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
    facts, figures = record.facts, record.cells["load"]
    rows, ratios = [], []
    for arm, name in _NAMES.items():
        if arm not in figures:
            continue
        rows.append((name, f"{figures[arm]['in_flight'][0]:.0f}", *spreads(figures[arm], _COLUMNS)))
        if arm != AUTO:
            rates = ("tokens_s", "decode_tokens_s")
            ratios.append((name, *(mean_ratio(figures[AUTO][r], figures[arm][r]) for r in rates)))
    said = (
        "{requests} requests in flight, {chunks} of {corpus} chunks of {length} tokens in a random "
        "order and a question of {question}"
    ).format(**facts["scene"])
    return page(
        "Decoding of long requests that share chunks",
        f"{WHERE.format(**facts)} {said} ({facts['prompt']:,} tokens), replies of "
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
    rows, scenes = [], record.facts["scenes"]
    for degree in sorted(record.cells, key=int):
        off, auto = (record.cells[degree][arm] for arm in (OFF, AUTO))
        rows.append(
            (
                degree,
                f"{scenes[degree]['corpus']:,}",
                f"{_prompt(scenes[degree]):,}",
                *(spread(figures["tpot_ms"], 2) for figures in (off, auto)),
                mean_ratio(auto["decode_tokens_s"], off["decode_tokens_s"]),
            )
        )
    scene = next(iter(scenes.values()))
    head = ("sharing", "corpus", "prompt tokens", "off, ms a token", "auto, ms a token", "speed-up")
    return page(
        "Decoding by how many requests share a chunk",
        f"{WHERE.format(**record.facts)} {scene['requests']} requests decode together; each chunk "
        f"of {scene['length']} tokens is in the prompts of as many of them as the first column "
        "says, in an order of its own in each. Prompts are shorter where the corpus would not fit "
        f"the pool of {record.facts['pool']:,} blocks. Both engines take turns; median (lowest - "
        "highest) of the rounds' medians; speed-up: tokens a second in decode, shared over not, "
        "geometric mean over rounds (95 %).",
        table(head, rows, right=0),
        _notes(record),
    )


def draw_sharing(record: RoundsRecord, base: Path) -> None:
    """A line for each way of decoding: medians of rounds, from the lowest to the highest."""
    degrees = {degree: log2(int(degree)) for degree in sorted(record.cells, key=int)}
    names = {OFF: "each request\nreads its\nchunks", AUTO: "shared\ndecode"}
    lines: dict[str, list[Spot]] = {name: [] for name in names.values()}
    for arm, name in names.items():
        for degree, place in degrees.items():
            values = record.cells[degree][arm]["tpot_ms"]
            lines[name].append(Spot(place, median(values), min(values), max(values)))
    scenes = record.facts["scenes"]
    ticks = {x: f"{degree}\n{_prompt(scenes[degree]) / 1000:.0f}k" for degree, x in degrees.items()}
    what = "requests that read a chunk, and tokens of a prompt"
    panel = Panel(what, "time per token, ms", WHERE.format(**record.facts))
    draw_lines(panel, lines, ticks, base)


def _prompt(scene: Mapping[str, int]) -> int:
    return scene["chunks"] * scene["length"] + scene["question"]


def _notes(record: RoundsRecord) -> str:
    """What else happened: compiled chunks and lost requests spoil figures."""
    arms = [arm for figures in record.cells.values() for arm in figures.values()]
    compiled, lost = (
        round(sum(sum(arm.get(name, ())) for arm in arms))
        for name in ("compiled_tokens", "preemptions")
    )
    least = min(min(arm["tokens_a_step"]) for arm in arms)
    kernels = "; ".join(
        f"{name}: {', '.join(f'`{kernel}`' for kernel in compiled) or 'none'}"
        for name, compiled in record.compiled.items()
    )
    return (
        f"Chunk tokens compiled while measured: {compiled:,}; requests that lost their blocks: "
        f"{lost:,}. Kernels compiled after engines were ready: {kernels}. A step gives a request "
        f"{least:.2f} tokens or more."
    )


DECODE_LOAD = runner.RoundsExperiment(plan=load_plan, render=render_load, figures=load_figures)
DECODE_SHARING = runner.RoundsExperiment(
    plan=sharing_plan, render=render_sharing, draw=draw_sharing
)


def measure(settings: DecodeUnderLoad) -> Outcome:
    """Measure what is left of the load, or of the degrees of sharing."""
    return (DECODE_SHARING if settings.sharing else DECODE_LOAD).measure(settings)


def scaling_plan(settings: Scaling) -> ExperimentPlan:
    """A cell for each length, in four arms, and one for the replies."""
    sizes, workers = SIZES[settings.device], settings.workers
    scenes = sizes.scaled()
    longest = max(scenes, key=lambda scene: scene.prompt)
    shared = settings.shared_decode
    plain = replace(wave_engine(settings, longest, sizes.scaling_pool), shared_decode=shared)
    # The trained model's heads can be divided by two only.
    asked = models.resolve("testbed" if workers == 2 else "shape:small")
    replies = replace(
        wave_engine(settings, sizes.replies, sizes.replies_pool),
        model=str(asked.path),
        dtype="float32",
        shared_decode=shared,
    )
    ours = replace(plain, graph_tokens=settings.graph_tokens)
    configs = {OURS: ours, STOCK: as_stock(plain), REPLIES: replies}
    arms = {who: [f"{who} x{gpus}" for gpus in (1, workers)] for who in configs}
    cells = []
    for scene in scenes:
        waves = {a: wave_arm(a, scene, common=w == STOCK) for w in (OURS, STOCK) for a in arms[w]}
        cells.append(runner.Cell(str(scene.prompt), waves, 4 * sizes.costs.wave(scene)))
    work = partial(reply_sums, scene=sizes.replies)
    asks = {arm: runner.ServedArm(arm, work) for arm in arms[REPLIES]}
    cells.append(runner.Cell(REPLIES, asks, 2 * sizes.costs.wave(sizes.replies), rank=1, most=1))
    graphs = {} if settings.graph_tokens is None else {"graph_tokens": settings.graph_tokens}
    facts = {
        "pool": sizes.scaling_pool,
        "workers": workers,
        "shared_decode": shared,
        **graphs,
        "scenes": {str(scene.prompt): asdict(scene) for scene in scenes},
        "replies": {"model": asked.label, "dtype": "float32", **asdict(sizes.replies)},
    }
    return ExperimentPlan(
        name=f"scaling-{workers}",
        facts=facts_of(settings) | facts,
        engines={
            f"{who} x{gpus}": replace(config, tensor_parallel=gpus)
            for who, config in configs.items()
            for gpus in (1, workers)
        },
        cells=cells,
        rounds=settings.rounds,
    )


def reply_sums(engine: Engine, name: str, *, scene: DecodeScene) -> dict[str, float]:
    """A checksum of the tokens of each reply, which another engine is to give, too."""
    requests = scene.draw(name, scene.requests, "mepic")
    results = engine.generate(requests, max_tokens=scene.reply, ignore_eos=True)
    sums = (float(zlib.crc32(array("q", result.tokens).tobytes())) for result in results)
    return {str(number): value for number, value in enumerate(sums)}


def _rates(figures: Found, who: str, workers: int) -> tuple[Sequence[float], Sequence[float]]:
    """Tokens a second of several GPUs, and of one."""
    return figures[f"{who} x{workers}"]["tokens_s"], figures[f"{who} x1"]["tokens_s"]


def _gains(figures: Found, workers: int) -> list[list[float]]:
    """Tokens a second of several GPUs over one, round by round: ours, and stock vLLM's."""
    return [by_round(*_rates(figures, who, workers)) for who in (OURS, STOCK)]


def scaling_figures(record: RoundsRecord) -> dict[str, float]:
    """Throughput of several GPUs over one at the longest prompts, and the least over stock's."""
    workers = record.facts["workers"]
    lengths = sorted(record.cells.keys() - {REPLIES}, key=int)
    gains = [_gains(record.cells[length], workers) for length in lengths]
    several, one = _rates(record.cells[lengths[-1]], OURS, workers)
    return {
        f"tp{workers}_scaling": paired_ratio(one, several).value,
        f"tp{workers}_vs_stock_tp{workers}": min(paired_ratio(s, o).value for o, s in gains),
    }


def render_scaling(record: RoundsRecord) -> str:
    """The page, in Markdown."""
    lengths = sorted(record.cells.keys() - {REPLIES}, key=int)
    if not lengths:
        return ""
    facts, workers = record.facts, record.facts["workers"]
    columns = {
        "tokens_s": ("tokens/s", 0),
        "tpot_ms": ("time per token, ms", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
    }
    rows, gains = [], []
    for length in lengths:
        cell, prompt = record.cells[length], f"{int(length):,}"
        for arm, figures in cell.items():
            rows.append((prompt, arm, str(len(figures["tokens_s"])), *spreads(figures, columns)))
        own = (mean_ratio(*_rates(cell, who, workers)) for who in (OURS, STOCK))
        gains.append((prompt, *own, mean_ratio(*_gains(cell, workers))))
    replies, scene = "", facts["scenes"][lengths[0]]
    if REPLIES in record.cells:
        asked = facts["replies"]
        one, several = (record.cells[REPLIES][f"{REPLIES} x{n}"] for n in (1, workers))
        equal = sum(several[name] == sums for name, sums in one.items())
        replies = (
            f"{asked['model']} in {asked['dtype']}, as it is served, on {workers} GPUs and on one: "
            f"{equal} of {len(one)} replies of {asked['reply']} tokens are equal."
        )
    graphs = ""
    if "graph_tokens" in facts:
        graphs = f", CUDA graphs of up to {facts['graph_tokens']:,} tokens"
    return page(
        "One engine on several GPUs",
        f"{WHERE.format(**facts)} {scene['requests']} requests at once, of chunks of "
        f"{scene['length']} tokens that are in the pool, half of twice as many, in a random order, "
        f"and a question of {scene['question']}; replies of {scene['reply']}. `{OURS}` is an "
        f"engine of picbench (shared decode: {facts['shared_decode']}{graphs}), `{STOCK}` stock "
        "vLLM, whose requests have all these chunks as one common prefix. All engines are up at "
        f"once, with pools of {facts['pool']:,} blocks, and take turns, another one first in each "
        "round; median (lowest - highest). Tokens generated a second, prompts included.",
        table(("prompt", "engine", "n", *(name for name, _ in columns.values())), rows, right=2),
        f"{workers} GPUs over one, tokens a second; geometric mean of rounds (95 %).",
        table(("prompt", OURS, STOCK, f"{OURS} over {STOCK}"), gains, right=0),
        replies,
        "\n".join(first_lines(record.failures)),
    )


SCALING = runner.RoundsExperiment(plan=scaling_plan, render=render_scaling, figures=scaling_figures)
