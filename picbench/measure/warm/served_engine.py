"""An engine as it is served: the engine core has a process of its own.

Requests are prepared and planned in the core's receiving thread, and the time to the first token
includes the way to the core and back. What the core keeps, like the block ledger, cannot be asked
for.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from picbench.arms.server import Server
from picbench.engines.config import EngineConfig
from picbench.engines.conversion import RequestPreparer
from picbench.engines.request import Request
from picbench.engines.tokenizer import ModelTokenizer
from picbench.engines.vllm.launch import launch_apart
from picbench.errors import EngineError


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds until a request's only token, its prompt's tokens, and how many were cached.

    Of a request with chunks these are the tokens that it reuses, as the linker counts them, also
    where a chunk was compiled for it.
    """

    ms: float
    prompt: int
    cached: int

    @property
    def fresh(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt - self.cached


class ServedEngine:
    """vLLM with picbench in it (or, with `EngineConfig.stock`, without); one request at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._preparer = RequestPreparer(config, ModelTokenizer(config.model))
        self._running = launch_apart(config)

    def first_token(self, request: Request) -> FirstToken:
        """Serve a request that generates one token; time counts from its arrival here."""
        engine = self._running.engine
        prepared = self._preparer.prepare(request, self._running, 1, None, ignore_eos=True)
        began = perf_counter()
        prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
        engine.add_request(prepared.tag, prompt, prepared.sampling_params)
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        took = perf_counter() - began
        [output] = outputs
        if not output.outputs[0].token_ids:
            raise EngineError(f"no token: {output.outputs[0].stop_reason}")
        return FirstToken(1e3 * took, len(prepared.prompt_token_ids), output.num_cached_tokens or 0)

    def warm_up(self) -> None:
        """Nothing: measurements repeat what they ask, and leave the first time out."""

    def reset(self) -> None:
        """Drop all cached KV. Raises EngineError if blocks are in use."""
        if not self._running.engine.reset_prefix_cache():
            raise EngineError("the cache cannot be dropped while requests hold blocks")

    def describe(self) -> Mapping[str, object]:
        """What runs here."""
        return {"kv_blocks": self._running.pool, "context": self._running.context}

    def close(self) -> None:
        """End the engine."""
        self._running.engine.engine_core.shutdown()


def launch_served(name: str, config: EngineConfig, log: Path) -> Server:
    """Start the process of an arm called `name`, whose engine starts one for its core."""
    return Server(name, partial(_open, config), log)


def _open(config: EngineConfig) -> AbstractContextManager[Any]:
    return closing(ServedEngine(config))
