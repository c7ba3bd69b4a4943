"""Tables, the figure and the summary's figures of decoding under load."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from picbench.compare.significance import paired_ratio
from picbench.engines.config import EngineConfig
from picbench.experiments.page import spread, update_summary
from picbench.experiments.rounds import (
    CellFigures,
    RoundsFound,
    RoundsPlan,
    ServedCell,
    ServingRun,
    estimate,
    measure_rounds,
)
from picbench.experiments.waves import CostGuess, DecodeScene, wave_arm, wave_engine
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_lines
from picbench.files import write_whole
from picbench.tables import table as markdown
from picbench.workloads import models

#: The arms: shared decode off and auto, stock vLLM; and with one common prefix, which prefix
#: caching finds, stock vLLM and the engine with shared decode.
OFF, AUTO, PREFIX, COMMON = "off", "auto", "prefix", "common"
OWN_COMMON = "own-common"

_NAMES = {
    OFF: "picbench, each request reads its chunks (as at 198d84a)",
    AUTO: "picbench, shared decode",
    PREFIX: "stock vLLM, prefix caching, as many as fit",
    COMMON: "stock vLLM, one common prefix",
    OWN_COMMON: "picbench, shared decode, one common prefix and no chunks",
}

_COLUMNS: Mapping[str, tuple[str, int]] = {
    "tokens_s": ("tokens/s in all", 0),
    "decode_tokens_s": ("tokens/s, decode", 0),
    "tpot_ms": ("time per token, ms", 2),
    "tpot_p99_ms": ("its p99, ms", 2),
    "ttft_ms": ("TTFT, ms", 0),
}

_RATES = ("tokens_s", "decode_tokens_s")


def ratio(after: Sequence[float], before: Sequence[float]) -> str:
    """The geometric mean of ratios, round by round, with 95 % by Student's t where it can be."""
    found = paired_ratio(before, after)
    if found.interval is None:
        return f"{found.value:.3f} (n=1)"
    low, high = found.interval.low, found.interval.high
    return f"{found.value:.3f} ({low:.3f} - {high:.3f}, n={found.pairs})"


def write_load(found: RoundsFound, output: Path) -> str:
    """Write ``decode-load.md`` and the summary's figures; the page."""
    figures = found.cells["load"]
    page = render_load(found)
    write_whole(output / "decode-load.md", page.encode())
    update_summary(output, {"shared_decode": load_figures(figures)})
    return page


def load_figures(figures: CellFigures) -> dict[str, float]:
    """The figures for ``summary.json``: ratios of tokens a second in all, milliseconds a token."""
    ours = figures[AUTO]["tokens_s"]
    return {
        "engine_throughput_vs_198d84a": paired_ratio(figures[OFF]["tokens_s"], ours).value,
        "engine_throughput_vs_prefix": paired_ratio(figures[PREFIX]["tokens_s"], ours).value,
        "tpot_ms": median(figures[AUTO]["tpot_ms"]),
    }


def render_load(found: RoundsFound) -> str:
    """The page of the load, in Markdown."""
    facts, figures = found.facts, found.cells["load"]
    scene = facts["scene"]
    rows = [
        (
            _NAMES[arm],
            f"{figures[arm]['in_flight'][0]:.0f}",
            *(spread(figures[arm][key], digits) for key, (_, digits) in _COLUMNS.items()),
        )
        for arm in _NAMES
        if arm in figures
    ]
    ratios = [
        (_NAMES[arm], *(ratio(figures[AUTO][key], figures[arm][key]) for key in _RATES))
        for arm in (OFF, PREFIX, COMMON, OWN_COMMON)
        if arm in figures
    ]
    lines = [
        "# Decoding of long requests that share chunks",
        "",
        f"{_about(facts)} {scene['requests']} requests in flight, {scene['chunks']} of "
        f"{scene['corpus']} chunks of {scene['length']} tokens in a random order and a question of "
        f"{scene['question']} ({facts['prompt']:,} tokens), replies of {scene['reply']}; chunks "
        f"are in the pool, of {facts['pool']:,} blocks in each engine. All engines are up at "
        f"once; arms take turns, another one first in each round, "
        f"n={found.rounds('load')}; median (lowest - highest). Decode is from the last first token "
        "to the first end: there a step gives each request a token.",
        "",
        markdown.table(("", "requests", *(name for name, _ in _COLUMNS.values())), rows, right=1),
        "",
        "Shared decode over the others, tokens a second; geometric mean over rounds (95 %).",
        "",
        markdown.table(("over", "in all", "decode"), ratios, right=1),
        "",
        *_notes(found),
    ]
    return "\n".join(lines) + "\n"


def write_sharing(found: RoundsFound, output: Path) -> str:
    """Write ``decode-sharing.md`` and its figure; the page."""
    page = render_sharing(found)
    write_whole(output / "decode-sharing.md", page.encode())
    _draw_sharing(found, output / "decode-sharing")
    return page


def _draw_sharing(found: RoundsFound, base: Path) -> None:
    """A line for each way of decoding: medians of rounds, from the lowest to the highest."""
    degrees = sorted(found.cells, key=int)
    names = {OFF: "each request\nreads its\nchunks", AUTO: "shared\ndecode"}
    lines = {
        name: [
            Spot(log2(int(degree)), median(values), min(values), max(values))
            for degree in degrees
            if (values := found.cells[degree][arm]["tpot_ms"])
        ]
        for arm, name in names.items()
    }
    ticks = {
        log2(int(degree)): f"{degree}\n{_prompt(found.facts['scenes'][degree]) / 1000:.0f}k"
        for degree in degrees
    }
    what = "requests that read a chunk, and tokens of a prompt"
    panel = Panel(what, "time per token, ms", _about(found.facts))
    draw_lines(panel, lines, ticks, base)


def render_sharing(found: RoundsFound) -> str:
    """The page of the degrees of sharing, in Markdown."""
    rows = []
    for degree in sorted(found.cells, key=int):
        figures, scene = found.cells[degree], found.facts["scenes"][degree]
        rows.append(
            (
                degree,
                f"{scene['corpus']:,}",
                f"{_prompt(scene):,}",
                *(spread(figures[arm]["tpot_ms"], 2) for arm in (OFF, AUTO)),
                ratio(figures[AUTO]["decode_tokens_s"], figures[OFF]["decode_tokens_s"]),
            )
        )
    scene = next(iter(found.facts["scenes"].values()))
    head = ("sharing", "corpus", "prompt tokens", "off, ms a token", "auto, ms a token", "speed-up")
    lines = [
        "# Decoding by how many requests share a chunk",
        "",
        f"{_about(found.facts)} {scene['requests']} requests decode together; each chunk of "
        f"{scene['length']} tokens is in the prompts of as many of them as the first column says, "
        "in an order of its own in each. Prompts are shorter where the corpus would not fit the "
        f"pool of {found.facts['pool']:,} blocks. Both engines are up at once and take turns; "
        "median (lowest - highest) of the rounds' medians; speed-up: tokens a second in decode, "
        "shared over not, geometric mean over rounds (95 %).",
        "",
        markdown.table(head, rows, right=0),
        "",
        *_notes(found),
    ]
    return "\n".join(lines) + "\n"


def _prompt(scene: Mapping[str, int]) -> int:
    return scene["chunks"] * scene["length"] + scene["question"]


def _about(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['dtype']}: times, not answers, and log-probabilities of such "
        f"weights would say nothing; {facts['gpu']}, driver {facts['driver']}, vLLM "
        f"{facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}."
    )


def _notes(found: RoundsFound) -> list[str]:
    """What else happened: compiled chunks and lost requests spoil figures."""

    def total(key: str) -> int:
        return round(
            sum(
                sum(arm.get(key, ()))
                for figures in found.cells.values()
                for arm in figures.values()
            )
        )

    shares = [
        share
        for figures in found.cells.values()
        for arm in figures.values()
        for share in arm.get("tokens_a_step", ())
    ]
    kernels = "; ".join(
        f"{name}: {', '.join(f'`{kernel}`' for kernel in compiled) or 'none'}"
        for name, compiled in found.compiled.items()
    )
    return [
        f"Chunk tokens compiled while measured: {total('compiled_tokens'):,}; requests that lost "
        f"their blocks: {total('preemptions'):,}. Kernels compiled after engines were ready: "
        f"{kernels}. A step gives a request {min(shares):.2f} tokens or more."
    ]


STOCK = "stock"


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The scenes of a device: of the load, and of the degrees of sharing; pools are in blocks.

    A prompt of `degrees` has as many chunks as the pool has room for, up to the load's. `costs` is
    what a first round may take.
    """

    scene: DecodeScene
    pool: int
    degrees: tuple[int, ...]
    sharing_reply: int
    sharing_pool: int
    costs: CostGuess

    def at(self, degree: int) -> DecodeScene:
        """The scene in which `degree` requests read each chunk."""
        scene = replace(self.scene, reply=self.sharing_reply, even=True)
        chunks = scene.chunks
        while True:
            corpus = scene.requests * chunks // degree
            found = replace(scene, chunks=chunks, corpus=corpus)
            if found.blocks <= self.sharing_pool or chunks == 1:
                return found
            chunks -= 1


#: By device. On a GPU three engines with the load's pools fit 139 GiB, or two with the other ones.
LOADS_OF: Mapping[str, DecodeLoad] = MappingProxyType(
    {
        "cuda": DecodeLoad(
            DecodeScene(), 12_000, (1, 2, 4, 8, 16, 32, 64), 32, 22_000, CostGuess(18_000, 0.035)
        ),
        "cpu": DecodeLoad(
            DecodeScene(4, 3, 6, 40, 9, 24), 200, (1, 2, 4), 24, 200, CostGuess(3_000, 0.02)
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun(ServingRun):
    """How to measure; `reply` is that of every request (0: the device's)."""

    reply: int = 0

    @property
    def load(self) -> DecodeLoad:
        """What is served."""
        found = LOADS_OF[self.device]
        if not self.reply:
            return found
        scene = replace(found.scene, reply=self.reply)
        return replace(found, scene=scene, sharing_reply=self.reply)


def measure(run: DecodeRun, say: Callable[[str], None], *, sharing: bool) -> tuple[str, bool]:
    """Measure what is left of the load, or of the degrees of sharing: the page, and if it is all.

    The page is empty before any round is done.
    """
    plan = sharing_plan(run) if sharing else load_plan(run)
    write = write_sharing if sharing else write_load
    return measure_rounds(plan, partial(write, output=run.output), say)


def estimated(run: DecodeRun, *, sharing: bool) -> str:
    """What is left."""
    plan = sharing_plan(run) if sharing else load_plan(run)
    return str(estimate(plan, plan.read()))


def load_plan(run: DecodeRun) -> RoundsPlan:
    """One cell: the load, in all arms."""
    load = run.load
    scene = load.scene
    model = models.resolve(run.model).path
    config = wave_engine(run, model, scene, load.pool, "off")
    alone = replace(scene, requests=scene.plain_fit(load.pool))
    common = replace(scene, requests=scene.common_fit(load.pool))
    arms = {
        OFF: wave_arm(OFF, scene),
        AUTO: wave_arm(AUTO, scene),
        PREFIX: wave_arm(STOCK, alone),
        COMMON: wave_arm(STOCK, common, common=True),
        OWN_COMMON: wave_arm(AUTO, common, common=True),
    }
    facts = run.facts() | {"scene": asdict(scene), "prompt": scene.prompt, "pool": load.pool}
    engines = _ours(config) | {STOCK: replace(config, stock=True, algorithm="prefix")}
    cells = [ServedCell("load", arms, len(arms) * load.costs.wave(scene))]
    return RoundsPlan(_path(run, "decode-load"), facts, engines, cells, run.rounds, run.seconds)


def sharing_plan(run: DecodeRun) -> RoundsPlan:
    """A cell for each degree of sharing, in two arms."""
    load = run.load
    scenes = {degree: load.at(degree) for degree in load.degrees}
    longest = max(scenes.values(), key=lambda scene: scene.prompt)
    model = models.resolve(run.model).path
    rows = {str(degree): asdict(scene) for degree, scene in scenes.items()}
    facts = run.facts() | {"scenes": rows, "pool": load.sharing_pool}
    return RoundsPlan(
        _path(run, "decode-sharing"),
        facts,
        _ours(wave_engine(run, model, longest, load.sharing_pool, "off")),
        list(_degrees(scenes, load.costs)),
        run.rounds,
        run.seconds,
    )


def _degrees(scenes: Mapping[int, DecodeScene], costs: CostGuess) -> Iterator[ServedCell]:
    for degree, scene in scenes.items():
        # What steps that decode take is warmed up by those before, which compute the prompts.
        arms = {name: replace(wave_arm(name, scene), warm_up=None) for name in (OFF, AUTO)}
        yield ServedCell(str(degree), arms, len(arms) * costs.wave(scene))


def _ours(config: EngineConfig) -> dict[str, EngineConfig]:
    return {OFF: config, AUTO: replace(config, shared_decode="auto")}


def _path(run: DecodeRun, name: str) -> Path:
    return run.output / f"{name}.json"
