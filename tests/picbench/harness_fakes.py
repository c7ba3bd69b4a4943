"""Engines and workloads that need no model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from picbench.arms.arm_process import run_group
from picbench.arms.messages import Group, GroupResult
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.config import EngineConfig
from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.errors import ConfigError, EngineError
from picbench.inputs.workload import Workload
from picbench.run.config import RunConfig
from picbench.run.session import Services
from picbench.workloads.models import ModelSpec
from picbench.workloads.sample import Sample, SampleSegment

POOL = 100

#: Requests whose first token is one of these misbehave.
REFUSED, DEADLY = 666, 667

TTFT = {"full": 0.4, "prefix": 0.2}

#: What a page says of where its figures were measured.
GPU_FACTS = {"gpu": "G", "driver": "D", "torch": "T", "vllm": "V", "commit": "C"}


def no_gpu(count: int) -> None:
    """What `gpu_memory` finds on a CPU."""


def make_sample(number: int, first: int = 1, max_tokens: int = 2) -> Sample:
    """A sample of 36 tokens: text, a chunk of its own, a chunk that all share, text."""
    segments = (
        SampleSegment("text", "t", (first, 2)),
        SampleSegment("chunk", "c", (1000 + number,) * 16),
        SampleSegment("chunk", "d", (7,) * 16),
        SampleSegment("text", "q", (3, 4)),
    )
    return Sample(f"s{number}", "fake", segments, ("yes",), max_tokens)


def make_snapshot(step: int, time: float, referenced: float) -> Snapshot:
    """A snapshot with `referenced` blocks of prompt and the rest free."""
    blocks = dict.fromkeys(KINDS, 0.0) | {"prompt": referenced, "free": POOL - referenced}
    return Snapshot(step, time, POOL, blocks)


@dataclass
class FakeEngine:
    """Answers "yes" at once; counts what is done to it."""

    algorithm: str = "mepic"
    calls: list[str] = field(default_factory=list)
    reused: int = 16
    tier_seconds: float = 0.0
    compilations: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    @property
    def memory(self) -> Sequence[Snapshot]:
        return [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 20), make_snapshot(2, 1.0, 0)]

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        groups = sum(call.startswith("generate") for call in self.calls)
        return {"host": (100 * groups, 10 * groups)}

    @property
    def step_times(self) -> StepTimes:
        groups = sum(call.startswith("generate") for call in self.calls)
        return StepTimes(2.0 * groups, self.tier_seconds * groups)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Result]:
        how = f"at {concurrency}" if arrivals is None else f"from {min(arrivals)} s"
        self.calls.append(f"generate {len(requests)} {how}")
        return [self._answer(request) for request in requests]

    def measure(self) -> None:
        self.calls.append("measure")

    def watch_compilations(self) -> None:
        self.calls.append("watch_compilations")

    def reset(self) -> None:
        self.calls.append("reset")

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def describe(self) -> Mapping[str, object]:
        return {"vllm": "fake", "pid": os.getpid(), "notes": list(self.notes)}

    def _answer(self, request: Request) -> Result:
        prompt = tuple(t for segment in request.segments for t in segment.tokens or ())
        if prompt[0] == REFUSED:
            raise ConfigError("a chunk is too long", hint="`context`")
        if prompt[0] == DEADLY:
            os._exit(7)
        reused = 0 if self.algorithm == "full" else self.reused
        return Result(
            text="yes",
            tokens=(5, 6),
            prompt_tokens=prompt,
            timings=Timings(TTFT.get(self.algorithm, 0.1), 0.05, 0.01, 0.5),
            counts=TokenCounts(prompt=len(prompt), reused=reused, compiled=4, linked=3, padded=2),
            hits=Hits(chunk=1),
            finish_reason="length",
        )


class BrokenEngine(FakeEngine):
    """Fails to start, with an error that is not one of picbench."""

    def warm_up(self) -> None:
        print("loading weights", flush=True)
        raise RuntimeError("no memory left on the device")


class DyingEngine(FakeEngine):
    """Ends its process during start-up."""

    def warm_up(self) -> None:
        print("\x1b[31mlast words\x1b[0m\n", flush=True)
        os._exit(9)


class StuckEngine(FakeEngine):
    """Cannot drop its cache once it has been asked something."""

    def reset(self) -> None:
        if any(call.startswith("generate") for call in self.calls):
            raise EngineError("requests hold blocks")


class RefusingEngine(FakeEngine):
    """Cannot serve the model."""

    def describe(self) -> Mapping[str, object]:
        raise ConfigError("sliding window is not supported", hint="`model`")


class InterruptedEngine(FakeEngine):
    """Is stopped by the user at its second group."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Result]:
        if self.calls.count("measure") == 2:
            raise KeyboardInterrupt
        return super().generate(requests, concurrency=concurrency, arrivals=arrivals)


class DeafEngine(FakeEngine):
    """Runs other tokens than it was given."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Result]:
        results = super().generate(requests, concurrency=concurrency, arrivals=arrivals)
        return [replace(result, prompt_tokens=result.prompt_tokens[1:]) for result in results]


@dataclass
class FakeServer:
    """A Server in this process; `order` is shared by all, to see who computed when."""

    name: str
    config: EngineConfig
    order: list[str]
    engine: FakeEngine
    dies_at: int | None = None
    state: str = "new"
    runs: int = 0

    def ready(self) -> Mapping[str, object]:
        self.state = "ready"
        self.order.append(f"ready {self.name}")
        return self.engine.describe()

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        if self.runs == self.dies_at:
            raise EngineError(f"arm {self.name}: the engine's process was ended by SIGKILL")
        self.runs += 1
        self.order.append(self.name)
        times = None if arrivals is None else tuple(arrivals)
        return run_group(self.engine, Group(tuple(requests), concurrency, times))

    def reset(self) -> None:
        self.order.append(f"reset {self.name}")
        self.engine.reset()

    def close(self) -> None:
        self.state = "closed"

    def kill(self) -> None:
        self.state = "killed"


@dataclass
class Harness:
    """Services with everything faked, and what happened in them."""

    samples: Sequence[Sample]
    weights: str = "random"
    dies_at: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[str, FakeEngine] = field(default_factory=dict)
    arrivals: tuple[float, ...] | None = None
    preload: Sequence[Sample] = ()
    order: list[str] = field(default_factory=list)
    servers: dict[str, FakeServer] = field(default_factory=dict)

    def services(self) -> Services:
        return Services(load=self.load, launch=self.launch, memory=no_gpu)

    def load(self, config: RunConfig) -> Workload:
        model = ModelSpec("shape:fake", "fake", self.weights)  # type: ignore[arg-type]
        samples = tuple(self.samples[: config.limit])
        return Workload(
            "fake",
            "f1",
            model,
            samples,
            lambda text, answers: text in answers,
            arrivals=self.arrivals,
            preload=tuple(self.preload),
        )

    def launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        log.write_text("started\n")
        self.order.append(f"launch {name}")
        engine = self.engines.get(name) or FakeEngine(name)
        self.servers[name] = FakeServer(name, config, self.order, engine, self.dies_at.get(name))
        return self.servers[name]
