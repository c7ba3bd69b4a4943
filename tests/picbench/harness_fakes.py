"""Engines and workloads that need no model."""

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.config import EngineConfig
from picbench.engines.ledger import KINDS, MemoryUse, Snapshot
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.errors import ConfigError, EngineError
from picbench.run.job import prepare
from picbench.run.schedule import Progress
from picbench.run.server import Arrivals, run_group
from picbench.run.session import Services, execute
from picbench.run.workload import Workload
from picbench.settings import RunConfig, parse_config
from picbench.store.records import Grader, GroupResult
from picbench.workloads.models import ModelSpec
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.scoring import parse_scoring

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
    nats: float = 0.0
    compilations: Sequence[str] = ()
    notes: Sequence[str] = ()
    memory_use = (MemoryUse("cpu", 4 << 20, 2 << 20, 1 << 20, process_bytes=10 << 20),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    @property
    def memory(self) -> Sequence[Snapshot]:
        return [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 20), make_snapshot(2, 1.0, 0)]

    @property
    def evictions(self) -> Mapping[str, int]:
        return {"chunk": 0, "prefix": 0}

    @property
    def groups(self) -> int:
        return sum(call.startswith("generate") for call in self.calls)

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        return {"host": (100 * self.groups, 10 * self.groups)}

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(2.0 * self.groups, self.tier_seconds * self.groups)

    def generate(
        self, requests: Sequence[Request], *, concurrency: int | None, arrivals: Arrivals = None
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

    def warm_up(self, algorithm: str | None = None) -> None:
        self.calls.append("warm_up")

    def describe(self) -> Mapping[str, object]:
        about = {"vllm": "fake", "pid": os.getpid(), "block_bytes": 1 << 20}
        return about | {"notes": list(self.notes)}

    def _answer(self, request: Request) -> Result:
        prompt = tuple(t for segment in request.segments for t in segment.tokens or ())
        if prompt[0] == REFUSED:
            raise ConfigError("a chunk is too long", hint="`context`")
        if prompt[0] == DEADLY:
            os._exit(7)
        reused = 0 if self.algorithm in ("full", "nocontext") else self.reused
        counts = TokenCounts(len(prompt), reused, compiled=4, linked=3, padded=2, compile_work=4)
        reply = tuple(request.reply or (5, 6))
        # A chunk less makes an answer a nat a token less likely, and reuse costs half of one.
        chunks = len(chunks_of(request))
        nats = 3.0 - chunks + (0.5 if reused else self.nats if chunks else 0.0)
        others = {99: -2.0} if request.logprobs == 1 else {}
        return Result(
            text="yes",
            tokens=reply,
            prompt_tokens=prompt,
            timings=Timings(TTFT.get(self.algorithm, 0.1), 0.05, 0.01, 0.5),
            counts=counts,
            hits=Hits(chunk=1),
            finish_reason="length",
            logprobs=None
            if request.logprobs is None
            else tuple({t: -nats} | others for t in reply),
        )


@dataclass
class KeepingEngine(FakeEngine):
    """Keeps the last `capacity` of what it is given to keep; `evicted` counts the others."""

    capacity: int = 1000
    cached: dict[object, None] = field(default_factory=dict)
    evicted: int = 0

    def reset(self) -> None:
        super().reset()
        self.cached.clear()

    def keep(self, found: Sequence[object]) -> None:
        for one in found:
            self.cached.pop(one, None)
            self.cached[one] = None
        for one in list(self.cached)[: -self.capacity]:
            del self.cached[one]
            self.evicted += 1


def chunks_of(request: Request) -> list[tuple[int, ...]]:
    return [tuple(s.tokens) for s in request.segments if isinstance(s, Chunk) and s.tokens]


@dataclass
class CachingEngine(KeepingEngine):
    """Reuses the chunks that it saw last, unless it is `full`; replies tell what is cached."""

    capacity: int = 5

    @property
    def memory(self) -> Sequence[Snapshot]:
        return [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 10 + len(self.cached))]

    def _answer(self, request: Request) -> Result:
        plain = super()._answer(request)
        if self.algorithm == "full":
            return plain
        reused = sum(len(chunk) for chunk in chunks_of(request) if chunk in self.cached)
        self.keep(chunks_of(request))
        return replace(
            plain,
            text="yes" if reused else "no",
            tokens=tuple(chunk[0] for chunk in self.cached),  # type: ignore[index]
            counts=TokenCounts(prompt=len(plain.prompt_tokens), reused=reused),
            hits=Hits(chunk=reused // 16),
        )


@dataclass
class PicEngine(KeepingEngine):
    """Counts as the PIC engine does: missing chunks are compiled, all others are reused.

    With `prefix` it is stock vLLM, which finds whole blocks. It has room for `capacity` chunks or
    blocks; what it drops is evicted, `lossy` engines do not say so, `stale` ones keep all at reset.
    """

    lossy: bool = False
    stale: bool = False

    @property
    def evictions(self) -> Mapping[str, int]:
        kind = "prefix" if self.algorithm == "prefix" else "chunk"
        return {"chunk": 0, "prefix": 0} | {kind: 0 if self.lossy else self.evicted}

    def reset(self) -> None:
        known = dict(self.cached)
        super().reset()
        if self.stale:
            self.cached = known

    def _answer(self, request: Request) -> Result:
        plain = super()._answer(request)
        if self.algorithm == "full":
            return plain
        counts = self._serve(request, plain.prompt_tokens)
        return replace(plain, counts=counts, tokens=(len(self.cached),), hits=Hits())

    def _serve(self, request: Request, prompt: tuple[int, ...]) -> TokenCounts:
        if self.algorithm == "prefix":
            blocks = [prompt[:end] for end in range(16, len(prompt) + 1, 16)]
            known = [block in self.cached for block in blocks]
            self.keep(blocks)
            return TokenCounts(len(prompt), 16 * [*known, False].index(False))
        chunks = chunks_of(request)
        missing = {chunk for chunk in chunks if chunk not in self.cached}
        self.keep(chunks)
        compiled = sum(map(len, missing))
        reused = sum(map(len, chunks)) - compiled
        return TokenCounts(len(prompt), reused, compiled, compile_work=compiled)


def make_reusing_samples(count: int) -> list[Sample]:
    """Samples with two of a dozen chunks each, so that a small cache hits some."""
    text, question = SampleSegment("text", "t", (1, 2)), SampleSegment("text", "q", (3, 4))
    samples = []
    for n in range(count):
        numbers = (100 + n * n % 7, 200 + n * 5 % 6)
        chunks = [SampleSegment("chunk", "c", (number,) * 16) for number in numbers]
        samples.append(Sample(f"s{n}", "fake", (text, *chunks, question), ("yes",), 2))
    return samples


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


class UncountedEngine(FakeEngine):
    """Loses its device once, in a group that has been served, and does not notice."""

    def watch_compilations(self) -> None:
        super().watch_compilations()
        if self.calls.count("watch_compilations") == 2:
            raise RuntimeError("device lost")


class BusyEngine(FakeEngine):
    """Does not answer when it is reset again."""

    def reset(self) -> None:
        if "reset" in self.calls:
            time.sleep(600)
        super().reset()


class RefusingEngine(FakeEngine):
    """Cannot serve the model."""

    def describe(self) -> Mapping[str, object]:
        raise ConfigError("sliding window is not supported", hint="`model`")


class InterruptedEngine(FakeEngine):
    """Is stopped by the user at its second group."""

    def generate(self, requests: Sequence[Request], **pace: Any) -> list[Result]:
        if self.calls.count("measure") == 2:
            raise KeyboardInterrupt
        return super().generate(requests, **pace)


class ForgetfulEngine(FakeEngine):
    """Does not know the answer to the first `forgotten` samples."""

    forgotten = 1

    def generate(self, requests: Sequence[Request], **pace: Any) -> list[Result]:
        unknown = range(1000, 1000 + self.forgotten)
        results = super().generate(requests, **pace)
        return [replace(r, text="no") if r.prompt_tokens[2] in unknown else r for r in results]


class DeafEngine(FakeEngine):
    """Runs other tokens than it was given."""

    def generate(self, requests: Sequence[Request], **pace: Any) -> list[Result]:
        results = super().generate(requests, **pace)
        return [replace(result, prompt_tokens=result.prompt_tokens[1:]) for result in results]


@dataclass
class FakeServer:
    """A Server in this process; `order` is shared by all, to see who computed when."""

    name: str
    config: EngineConfig
    order: list[str]
    engine: FakeEngine
    dies_at: int | None = None
    watch: Callable[[], None] = lambda: None
    state: str = "new"
    runs: int = 0

    def ready(self) -> Mapping[str, object]:
        self.state = "ready"
        self.order.append(f"ready {self.name}")
        return self.engine.describe()

    def run(
        self, requests: Sequence[Request], concurrency: int | None, arrivals: Arrivals = None
    ) -> GroupResult:
        self.watch()
        result: GroupResult = self.call(partial(run_group, requests, concurrency, arrivals))
        self.runs += 1
        self.order.append(self.name)
        return result

    def call(self, function: Callable[[Any], Any]) -> Any:
        if self.runs == self.dies_at:
            raise EngineError(f"arm {self.name}: the engine's process was ended by SIGKILL")
        return function(self.engine)

    def reset(self) -> None:
        self.order.append(f"reset {self.name}")
        self.engine.reset()

    def close(self) -> None:
        self.state = "closed"

    def kill(self) -> None:
        self.state = "killed"


@dataclass
class Harness:
    """Services with everything faked, and what happened in them.

    `make` builds engines that `engines` does not have; `watch` is called before each group.
    """

    samples: Sequence[Sample]
    weights: str = "random"
    dies_at: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[str, FakeEngine] = field(default_factory=dict)
    arrivals: tuple[float, ...] | None = None
    preload: Sequence[Sample] = ()
    order: list[str] = field(default_factory=list)
    servers: dict[str, FakeServer] = field(default_factory=dict)
    file_faults: Sequence[str] = ()
    make: Callable[[str], FakeEngine] = FakeEngine
    watch: Callable[[], None] = lambda: None

    @property
    def groups(self) -> list[str]:
        """Which arms served a group, in order."""
        return [entry for entry in self.order if " " not in entry]

    def services(self) -> Services:
        return Services(self.load, self.launch, no_gpu, files=lambda path: iter(self.file_faults))

    def load(self, config: RunConfig) -> Workload:
        model = ModelSpec("shape:fake", "fake", self.weights)  # type: ignore[arg-type]
        samples = tuple(self.samples[: config.limit])
        grader = Grader(lambda text, answers: float(text in answers))
        ahead = {"arrivals": self.arrivals, "preload": tuple(self.preload)}
        golds = {s.id: (8, 9, 10)[: n % 3 + 1] for n, s in enumerate(samples)}
        asked = parse_scoring(config.scoring).likelihood
        return Workload("fake", "f1", model, samples, grader, golds=golds if asked else {}, **ahead)

    def launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        log.write_text("started\n")
        self.order.append(f"launch {name}")
        engine, dies_at = self.engines.get(name) or self.make(name), self.dies_at.get(name)
        made = FakeServer(name, config, self.order, engine, dies_at, lambda: self.watch())
        self.servers[name] = made
        return self.servers[name]


def run_fakes(harness: Harness, output: Path, *arms: str, **settings: object) -> Path:
    """Run arms over a harness without the command line; the run directory."""
    values = {"algo": arms, "dataset": "fake", "output": str(output), **settings}
    job = prepare(parse_config(values), harness.load, no_gpu)
    progress = Progress(job.facts.samples * len(arms), io.StringIO())
    execute(job, harness.launch, progress)
    return job.output
