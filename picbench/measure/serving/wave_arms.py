"""Arms whose requests decode together, and the engines that serve them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from picbench.engines.config import EngineConfig
from picbench.measure.serving.decode_waves import DecodeScene, brief_wave, decode_wave
from picbench.measure.serving.served_rounds import ServedArm
from picbench.measure.serving.serving_run import ServingRun

#: Tokens of a reply when engines are warmed up.
_BRIEF = 16


def wave_arm(engine: str, scene: DecodeScene, *, common: bool = False) -> ServedArm:
    """The arm that serves a scene in an engine; with one prefix in `common`, see `decode_wave`."""
    brief = replace(scene, reply=min(_BRIEF, scene.reply))
    return ServedArm(
        engine,
        partial(decode_wave, scene=scene, common=common),
        partial(brief_wave, scene=brief, common=common),
    )


def wave_engine(
    run: ServingRun, model: str | Path, scene: DecodeScene, pool: int, shared_decode: str
) -> EngineConfig:
    """An engine that has all requests of a scene in flight, with a pool of `pool` blocks."""
    return EngineConfig(
        model=str(model),
        device=run.device,
        dtype=run.dtype,
        context=scene.prompt + scene.reply,
        batch_tokens=8192,
        kv_blocks=pool,
        max_requests=scene.requests,
        tiers="",
        shared_decode=shared_decode,
    )
