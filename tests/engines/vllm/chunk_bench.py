"""A small engine over four chunks, for the tests of the chunk cache."""

from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Result

BLOCKS = 400


def config(llama: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(llama),
            "dtype": "float32",
            "kv_blocks": BLOCKS,
            "context": 1024,
            "batch_tokens": 256,
            "max_requests": 8,
            **changes,
        }
    )


def serve(engine: Engine, *requests: Request) -> list[Result]:
    return engine.generate(requests, max_tokens=4, logprobs=4, ignore_eos=True)
