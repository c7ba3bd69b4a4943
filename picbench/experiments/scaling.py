"""The page of one engine on several GPUs, and the summary's figures of it."""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picbench.compare.significance import paired_ratio
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.experiments.decode_load import ratio
from picbench.experiments.page import spread, update_summary
from picbench.experiments.rounds import (
    CellFigures,
    RoundsFound,
    RoundsPlan,
    ServedArm,
    ServedCell,
    ServingRun,
    estimate,
    measure_rounds,
)
from picbench.experiments.waves import CostGuess, DecodeScene, wave_arm, wave_engine
from picbench.files import write_whole
from picbench.tables import table as markdown
from picbench.workloads import models

OURS, STOCK = "mepic", "stock"

#: The cell in which replies are compared, and its arms.
REPLIES = "replies"


def arm_name(who: str, gpus: int) -> str:
    """What an arm on this many GPUs is called."""
    return f"{who} x{gpus}"


def write_scaling(found: RoundsFound, path: Path) -> str:
    """Write the page beside its file, and the summary's figures; the page."""
    page = render_scaling(found)
    write_whole(path.with_suffix(".md"), page.encode())
    update_summary(path.parent, scaling_figures(found))
    return page


def scaling_figures(found: RoundsFound) -> dict[str, float]:
    """Throughput of several GPUs over one at the longest prompts, and the least over stock's."""
    workers = found.facts["workers"]
    lengths = _length_lines(found)
    over_stock = {
        length: paired_ratio(_gains(found, length, STOCK), _gains(found, length, OURS)).value
        for length in lengths
    }
    ours = found.cells[lengths[-1]]
    one, several = (ours[arm_name(OURS, gpus)]["tokens_s"] for gpus in (1, workers))
    return {
        f"tp{workers}_scaling": paired_ratio(one, several).value,
        f"tp{workers}_vs_stock_tp{workers}": min(over_stock.values()),
    }


def render_scaling(found: RoundsFound) -> str:
    """The page, in Markdown."""
    facts, lengths = found.facts, _length_lines(found)
    workers, scene = facts["workers"], facts["scenes"][lengths[0]]
    rows = [
        (
            f"{int(length):,}",
            arm,
            str(len(figures["tokens_s"])),
            spread(figures["tokens_s"], 0),
            spread(figures["tpot_ms"], 2),
            spread(figures["ttft_ms"], 0),
        )
        for length in lengths
        for arm, figures in found.cells[length].items()
    ]
    gains = [
        (
            f"{int(length):,}",
            *(
                ratio(
                    found.cells[length][arm_name(who, workers)]["tokens_s"],
                    found.cells[length][arm_name(who, 1)]["tokens_s"],
                )
                for who in (OURS, STOCK)
            ),
            ratio(_gains(found, length, OURS), _gains(found, length, STOCK)),
        )
        for length in lengths
    ]
    head = ("prompt", "engine", "n", "tokens/s", "time per token, ms", "TTFT p50, ms")
    lines = [
        "# One engine on several GPUs",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. {scene['requests']} requests at once, of chunks of {scene['length']} "
        f"tokens that are in the pool, half of twice as many, in a random order, and a question of "
        f"{scene['question']}; replies of {scene['reply']}. `{OURS}` is an engine of picbench "
        f"(shared decode: {facts['shared_decode']}{_graphs(facts)}), `{STOCK}` stock vLLM, whose "
        "requests have all these chunks as one common prefix. All engines are up at once, with "
        f"pools of {facts['pool']:,} blocks, and take turns, another one first in each round; "
        "median (lowest - highest). Tokens generated a second, prompts included.",
        "",
        markdown.table(head, rows, right=2),
        "",
        f"{workers} GPUs over one, tokens a second; geometric mean of rounds (95 %).",
        "",
        markdown.table(("prompt", OURS, STOCK, f"{OURS} over {STOCK}"), gains, right=0),
        "",
        *_reply_lines(found.facts, found.cells.get(REPLIES)),
        *(f"{cell} failed: {error.splitlines()[0]}" for cell, error in found.failures.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _reply_lines(facts: Mapping[str, Any], figures: CellFigures | None) -> list[str]:
    if figures is None:
        return []
    asked = facts["replies"]
    one, several = (figures[arm_name(REPLIES, gpus)] for gpus in (1, facts["workers"]))
    equal = sum(several[name] == sums for name, sums in one.items())
    return [
        f"{asked['model']} in {asked['dtype']}, as it is served, on {facts['workers']} GPUs and "
        f"on one: {equal} of {len(one)} replies of {asked['reply']} tokens are equal.",
        "",
    ]


def _gains(found: RoundsFound, length: str, who: str) -> Sequence[float]:
    """Tokens a second of several GPUs over one, round by round."""
    one, several = (
        found.cells[length][arm_name(who, gpus)]["tokens_s"] for gpus in (1, found.facts["workers"])
    )
    return [more / less for more, less in zip(several, one, strict=True)]


def _length_lines(found: RoundsFound) -> list[str]:
    """The measured lengths, shortest first."""
    return sorted(found.cells.keys() - {REPLIES}, key=int)


def _graphs(facts: Mapping[str, Any]) -> str:
    if "graph_tokens" not in facts:
        return ""
    return f", CUDA graphs of up to {facts['graph_tokens']:,} tokens"


#: Models whose replies are compared: the trained one's heads can be divided by two only.
_TRAINED, _OTHERWISE = "testbed", "shape:small"


@dataclass(frozen=True, slots=True)
class ScalingSizes:
    """Requests of a device, of each length that is given in chunks; pools are in blocks.

    `replies` is what the trained model is asked.
    """

    scene: DecodeScene
    lengths: tuple[int, ...]
    pool: int
    replies: DecodeScene
    replies_pool: int
    costs: CostGuess

    def at(self, chunks: int) -> DecodeScene:
        """Requests of this many chunks, drawn from twice as many."""
        return replace(self.scene, chunks=chunks, corpus=2 * chunks)


_REPLIES = DecodeScene(8, 8, 16, 56, 24, 32)

#: By device. On a GPU two engines with such pools and half of two others fit 139 GiB.
SCALING_SIZES: Mapping[str, ScalingSizes] = MappingProxyType(
    {
        "cuda": ScalingSizes(
            scene=DecodeScene(reply=128),
            lengths=(16, 32, 64),
            pool=10_000,
            replies=_REPLIES,
            replies_pool=1_000,
            costs=CostGuess(18_000, 0.03),
        ),
        "cpu": ScalingSizes(
            scene=DecodeScene(4, 3, 6, 40, 9, 12),
            lengths=(2, 3),
            pool=200,
            replies=replace(_REPLIES, requests=2, chunks=2, corpus=4, reply=8),
            replies_pool=100,
            costs=CostGuess(2_000, 0.05),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRun(ServingRun):
    """How to measure one GPU against `workers`.

    `shared_decode` is that of picbench's engines, and so is `graph_tokens` (None: their default).
    """

    workers: int
    shared_decode: str = "auto"
    graph_tokens: int | None = None

    @property
    def path(self) -> Path:
        """The file of what is measured."""
        return self.output / f"scaling-{self.workers}.json"


def measure(run: ScalingRun, say: Callable[[str], None]) -> tuple[str, bool]:
    """Measure what is left: the page of all that is measured, and whether nothing is left.

    The page is empty before any length is done.
    """

    def write(found: RoundsFound) -> str:
        return write_scaling(found, run.path) if found.cells.keys() - {REPLIES} else ""

    return measure_rounds(scaling_plan(run), write, say)


def estimated(run: ScalingRun) -> str:
    """What is left."""
    plan = scaling_plan(run)
    return str(estimate(plan, plan.read()))


def scaling_plan(run: ScalingRun) -> RoundsPlan:
    """A cell for each length, in four arms, and one for the replies."""
    sizes = SCALING_SIZES[run.device]
    scenes = {scene.prompt: scene for scene in map(sizes.at, sizes.lengths)}
    found = models.resolve(run.model)
    facts = run.facts() | {"pool": sizes.pool, "workers": run.workers}
    facts["shared_decode"] = run.shared_decode
    if run.graph_tokens is not None:
        facts["graph_tokens"] = run.graph_tokens
    facts["scenes"] = {str(prompt): asdict(scene) for prompt, scene in scenes.items()}
    longest = max(scenes.values(), key=lambda scene: scene.prompt)
    plain = wave_engine(run, found.path, longest, sizes.pool, run.shared_decode)
    ours = replace(plain, graph_tokens=run.graph_tokens)
    asked = models.resolve(_TRAINED if run.workers == 2 else _OTHERWISE)
    replies = wave_engine(run, asked.path, sizes.replies, sizes.replies_pool, run.shared_decode)
    facts["replies"] = {"model": asked.label, "dtype": "float32", **asdict(sizes.replies)}
    stock = replace(plain, stock=True, algorithm="prefix", shared_decode="off")
    engines = {
        **_sides(OURS, ours, run.workers),
        **_sides(STOCK, stock, run.workers),
        **_sides(REPLIES, replace(replies, dtype="float32"), run.workers),
    }
    cells = [*_lengths(scenes, run, sizes), _replies(run, sizes)]
    return RoundsPlan(run.path, facts, engines, cells, run.rounds, run.seconds)


def _lengths(
    scenes: Mapping[int, DecodeScene], run: ScalingRun, sizes: ScalingSizes
) -> Iterator[ServedCell]:
    for prompt, scene in scenes.items():
        arms = [
            wave_arm(arm_name(who, gpus), scene, common=who == STOCK)
            for who in (OURS, STOCK)
            for gpus in (1, run.workers)
        ]
        named = {arm.engine: arm for arm in arms}
        yield ServedCell(str(prompt), named, len(arms) * sizes.costs.wave(scene))


def _replies(run: ScalingRun, sizes: ScalingSizes) -> ServedCell:
    work = partial(reply_sums, scene=sizes.replies)
    names = [arm_name(REPLIES, gpus) for gpus in (1, run.workers)]
    arms = {name: ServedArm(name, work) for name in names}
    return ServedCell(REPLIES, arms, 2 * sizes.costs.wave(sizes.replies), rank=1, most=1)


def reply_sums(engine: Engine, name: str, *, scene: DecodeScene) -> dict[str, float]:
    """A checksum of the tokens of each reply, which another engine is to give, too."""
    requests = scene.draw(name, scene.requests, "mepic")
    results = engine.generate(requests, max_tokens=scene.reply, ignore_eos=True)
    return {
        str(number): float(zlib.crc32(array("q", result.tokens).tobytes()))
        for number, result in enumerate(results)
    }


def _sides(who: str, config: EngineConfig, workers: int) -> dict[str, EngineConfig]:
    return {arm_name(who, gpus): replace(config, tensor_parallel=gpus) for gpus in (1, workers)}
