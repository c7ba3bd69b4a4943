"""An engine that answers at once, so that what is left of a run's time is the harness's own.

Its numbers are drawn and say nothing of any algorithm; they only vary as real ones do.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from picbench.arms.server import Server
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.config import EngineConfig
from picbench.engines.ledger import KINDS, MemoryUse, Snapshot
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts

#: Scheduler steps a request in the ledger: as many as replies of 32 tokens, four at a time, take.
STEPS = 8

#: Seconds of a step of the ledger.
_STEP = 0.05

#: Seconds to the first token, and how likely a reply is right, where it is not as for `full`.
_TTFT = {"full": 0.8, "prefix": 0.7, "naive": 0.3}
_RIGHT = {"naive": 0.45, "mepic": 0.6}


def answer_of(number: int) -> str:
    """The right answer to the question whose last token is `number`."""
    return f"Harbour {number}"


@dataclass
class InstantEngine:
    """What a run asks of an engine; `seed` draws its numbers."""

    algorithm: str
    pool: int
    seed: int = 0
    compilations: Sequence[str] = ()
    _steps: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def memory(self) -> Sequence[Snapshot]:
        """A ledger in which blocks come and go."""
        return [self._snapshot(step) for step in range(self._steps)]

    @property
    def memory_use(self) -> Sequence[MemoryUse]:
        """One worker."""
        return [MemoryUse("cpu", 256 << 20, self.pool << 16, 8 << 20, process_bytes=600 << 20)]

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        """A tier that nothing went through."""
        return {"host": (0, 0)}

    @property
    def evictions(self) -> Mapping[str, int]:
        """No block lost its KV."""
        return {"chunk": 0, "prefix": 0}

    @property
    def step_times(self) -> StepTimes:
        """No time in tiers."""
        return StepTimes()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Result]:
        """Replies, of which some are right."""
        self._steps = STEPS * len(requests)
        return [self._answer(request) for request in requests]

    def measure(self) -> None:
        """Begin a ledger."""
        self._steps = 0

    def watch_compilations(self) -> None:
        """Nothing is compiled."""

    def reset(self) -> None:
        """Nothing is cached."""

    def warm_up(self) -> None:
        """Nothing is cold."""

    def describe(self) -> Mapping[str, object]:
        """What the manifest has of it."""
        return {"vllm": "none: replies are drawn", "block_bytes": 1 << 16, "notes": []}

    def _snapshot(self, step: int) -> Snapshot:
        held = self.pool * (1 + step % 7) / 16
        blocks = dict.fromkeys(KINDS, 0.0)
        blocks |= {"chunk": held, "prompt": held / 4, "decode": held / 8}
        blocks["free"] = self.pool - sum(blocks.values())
        return Snapshot(step, step * _STEP, self.pool, blocks)

    def _answer(self, request: Request) -> Result:
        prompt = tuple(token for segment in request.segments for token in segment.tokens or ())
        number = prompt[-1]
        draw = random.Random(f"{self.seed} {self.algorithm} {number}")
        name = self.algorithm.partition(":")[0]
        right = draw.random() < _RIGHT.get(name, 0.62)
        ttft = _TTFT.get(name, 0.4) * draw.lognormvariate(0, 0.2)
        reused = 0 if name == "full" else len(prompt) // 2
        return Result(
            text=f"It is {answer_of(number)}." if right else "It is another place, far away.",
            tokens=tuple(draw.choices(range(32_000), k=32)),
            prompt_tokens=prompt,
            timings=Timings(ttft, 0.8 * ttft, 0.02, ttft + 0.6),
            counts=TokenCounts(prompt=len(prompt), reused=reused),
            hits=Hits(chunk=reused // 16),
            finish_reason="stop",
        )


def launch_instantly(seed: int) -> Callable[[str, EngineConfig, Path], Server]:
    """Starts arms' processes as `launch` does, with engines that answer at once."""

    def start(name: str, config: EngineConfig, log: Path) -> Server:
        build = partial(InstantEngine, config.algorithm, config.kv_blocks or 0, seed)
        return Server(name, cast(Any, build), log)

    return start
