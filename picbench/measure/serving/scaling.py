"""Throughput of one engine on several GPUs against one, beside stock vLLM's.

Requests of several lengths decode together, over chunks that are in the pool; stock vLLM's have one
common prefix of the same length, so that it computes as few new tokens. All engines are up at once
and take turns. Besides, a trained model replies on one GPU and on several, as engines are served:
with graphs, scheduling ahead.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.measure.serving.decode_waves import DecodeScene
from picbench.measure.serving.load_costs import CostGuess
from picbench.measure.serving.rounds_file import RoundsFound
from picbench.measure.serving.scaling_page import (
    OURS,
    REPLIES,
    STOCK,
    arm_name,
    write_scaling,
)
from picbench.measure.serving.served_rounds import (
    RoundsPlan,
    ServedArm,
    ServedCell,
    estimate,
)
from picbench.measure.serving.serving_run import ServingRun, measure_rounds
from picbench.measure.serving.wave_arms import wave_arm, wave_engine
from picbench.workloads import models

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
