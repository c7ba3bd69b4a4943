"""Whole runs over engines that answer at once: their directories, and what they cost."""

import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

from picbench.inputs.workload import Workload
from picbench.measure.harness.instant_engine import answer_of, launch_instantly
from picbench.output.run_reader import read_run
from picbench.output.sample_row import Grader
from picbench.output.tables.run_files import write_run_files
from picbench.run.config import RunConfig, parse_config
from picbench.run.job import prepare
from picbench.run.progress import QuietProgress
from picbench.run.session import execute
from picbench.workloads.models import ModelSpec
from picbench.workloads.sample import Sample, SampleSegment

DATASET = "instant"

#: As in MuSiQue: passages of a question, questions on the same passages, tokens of a passage.
PASSAGES, QUESTIONS, TOKENS = 20, 4, 110

_WORDS = "the harbour of an old town where two rivers meet was rebuilt after a fire in that year"


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run of `requests` measured requests cost the harness, in seconds of one core.

    `prepare_s` is before engines start, `serve_s` from the first request to the summary without
    what the engines' processes take, and `files_s` for tables and figures. `waiting_s` is the time
    on the clock from the first request to the summary in which no engine was busy.
    """

    requests: int
    prepare_s: float
    serve_s: float
    files_s: float
    waiting_s: float

    @property
    def each_ms(self) -> float:
        """Milliseconds a request before and while it is served; files do not grow with requests."""
        return 1e3 * (self.prepare_s + self.serve_s) / self.requests


class _Watch(QuietProgress):
    """Notes when the first request was sent."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def begin(self, done: int = 0) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()


def run_instantly(output: Path, arms: Sequence[str], samples: int, seed: int = 0) -> RunCost:
    """Run `samples` through arms whose engines answer at once; `seed` draws their replies."""
    config = parse_config(
        {"algo": tuple(arms), "dataset": DATASET, "device": "cpu", "output": str(output)}
    )
    workload = _workload(samples)
    gc.collect()
    began = time.process_time()
    job = prepare(config, partial(_given, workload), _no_gpu)
    prepared = time.process_time() - began
    watch = _Watch()
    execute(job, launch_instantly(seed), watch)
    served, waited = time.process_time() - watch.cpu, time.perf_counter() - watch.wall
    began = time.process_time()
    for line in write_run_files(output):
        raise RuntimeError(line)
    files = time.process_time() - began
    busy = sum(arm.busy_s for arm in read_run(output).summary.values())
    return RunCost(job.requests, prepared, served, files, waited - busy)


def _workload(samples: int) -> Workload:
    return Workload(
        dataset=DATASET,
        metric="f1",
        model=ModelSpec("instant", "instant"),
        samples=tuple(islice(_samples(), samples)),
        grader=Grader(_score),
        synthetic=True,
    )


def _given(workload: Workload, _: RunConfig) -> Workload:
    return workload


def _no_gpu(_: int) -> None:
    """Engines here use none."""


def _score(reply: str, answers: Sequence[str]) -> float:
    return float(any(answer in reply for answer in answers))


def _samples() -> Iterator[Sample]:
    """Questions about twenty passages each, in an order of their own; four share theirs."""
    head = SampleSegment("text", "Answer from these passages.", tuple(range(40)))
    for group in count():
        passages = [_passage(group * PASSAGES + place) for place in range(PASSAGES)]
        for number in range(group * QUESTIONS, (group + 1) * QUESTIONS):
            random.Random(number).shuffle(passages)
            question = SampleSegment("text", f"Which place is number {number}?", (5, 6, number))
            segments = (head, *passages, question)
            yield Sample(f"q{number}", DATASET, segments, (answer_of(number),), max_tokens=32)


def _passage(number: int) -> SampleSegment:
    draw = random.Random(number)
    words = " ".join(draw.choices(_WORDS.split(), k=TOKENS - 10))
    tokens = tuple(draw.choices(range(32_000), k=TOKENS))
    return SampleSegment("chunk", f"Passage {number}: {words}.", tokens)
