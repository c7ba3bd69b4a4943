"""Engines that schedule a step before the previous one has ended, as on a GPU.

vLLM does so on no CPU. Here its scheduler and its engine core do, over steps that run at once.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm import settings
from picbench.engines.vllm.scheduler.scheduler import PicAsyncScheduler
from picbench.engines.vllm.worker.cpu import worker

#: How an engine is started.
Start = Callable[[EngineConfig], Engine]


def engine_ahead(config: EngineConfig) -> Engine:
    """An engine whose scheduler is one step ahead of the model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (settings, worker):
            patch.setattr(module, "SCHEDULER", settings.ASYNC_SCHEDULER)
        engine = Engine(config)
    core: Any = engine._running.engine.engine_core
    core = core.engine_core
    assert isinstance(core.scheduler, PicAsyncScheduler)
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue
    return engine
