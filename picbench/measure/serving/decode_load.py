"""Decoding of many long requests that share chunks: with each chunk read once, and without.

`load`: requests whose chunks are drawn from a small corpus, in a random order, in an engine without
and in one with shared decode, and in stock vLLM; all engines are up at once with pools of the same
size, and take turns. Stock vLLM serves as many of these requests as fit its pool, and as many of
one common prefix as fit; these the engine with shared decode serves as well. `sharing`: the two
engines of picbench alone, at each degree of sharing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from picbench.engines.config import EngineConfig
from picbench.measure.serving.decode_load_page import (
    AUTO,
    COMMON,
    OFF,
    OWN_COMMON,
    PREFIX,
    write_load,
    write_sharing,
)
from picbench.measure.serving.decode_waves import DecodeScene
from picbench.measure.serving.load_costs import CostGuess
from picbench.measure.serving.served_rounds import (
    RoundsPlan,
    ServedCell,
    estimate,
)
from picbench.measure.serving.serving_run import ServingRun, measure_rounds
from picbench.measure.serving.wave_arms import wave_arm, wave_engine
from picbench.workloads import models

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
