"""Negative controls, for `picbench selftest`: comparisons whose outcome is known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.arm import (
    SCORE,
    TIMES,
    ArmComparison,
    MeasuredArm,
    compare_arms,
    measured_arms,
)
from picbench.compare.comparison import adjusted
from picbench.engines.algorithms import Algorithm
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment
from picbench.run.job import Job, prepare
from picbench.run.schedule import Progress
from picbench.run.session import Services, execute
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.store.reader import read_run
from picbench.store.summary import BASELINE
from picbench.workloads.sample import Sample, SampleSegment


@dataclass(frozen=True)
class Shuffled(Algorithm):
    """Map each chunk to the KV of what stands before it in its document, and link nothing.

    The self-test puts a chunk of another prompt there. Everything else is right: sizes, positions,
    blocks, what is shared; and the prompt that the user sent stays as it was, so that only the
    answers can tell. On purpose, this breaks the rule of `Algorithm.arrange` that the user's tokens
    stay.
    """

    name: ClassVar[str] = "shuffled"
    summary: ClassVar[str] = "a control: chunks with the KV of other chunks"

    @property
    def documents(self) -> bool:
        """The engine hands documents on."""
        return True

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Replace every chunk by as many tokens of its context, repeated where these are too few.

        Raises ValueError for a chunk without a document.
        """
        return [_replaced(segment) if segment.chunk else segment for segment in segments]

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy()


def _replaced(segment: Segment) -> Segment:
    if not segment.context:
        raise ValueError("the control shuffled needs a document for each chunk")
    tokens = islice(cycle(segment.context), len(segment.tokens))
    return replace(segment, tokens=tuple(tokens), context=())


#: Of an alarm: any adjusted p below it.
ALPHA = 0.05

#: Comparisons, and requests in each.
SEEDS, REQUESTS = 100, 200


def false_alarms(
    first: MeasuredArm, second: MeasuredArm, seeds: int = SEEDS, requests: int = REQUESTS
) -> int:
    """Of `seeds` comparisons of `first` and `second` with nothing between them, those that alarm.

    Each draws `requests` of those that both answered, with replacement, and swaps the two sides of
    every one by chance: no side can be the slower one or the better one, and the noise is what was
    measured. The rest is what `picbench compare` does with two arms of a run.
    """
    places = {sample: place for place, sample in enumerate(second.samples)}
    shared = [(p, places[sample]) for p, sample in enumerate(first.samples) if sample in places]
    alarms = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        drawn = [shared[i] for i in rng.integers(len(shared), size=requests)]
        swapped = rng.random(requests) < 0.5
        pairs = [((first, one), (second, other)) for one, other in drawn]
        sides = [pair[::-1] if swap else pair for pair, swap in zip(pairs, swapped, strict=True)]
        before, after = (_arm(side) for side in zip(*sides, strict=True))
        (found,) = adjusted([compare_arms(before, after, seed=seed)])
        alarms += any(metric.p < ALPHA for metric in found.metrics)
    return alarms


def _arm(requests: Sequence[tuple[MeasuredArm, int]]) -> MeasuredArm:
    """An arm of these requests, each of its own name, cluster and round."""
    model, names = requests[0][0], tuple(f"{n}" for n in range(len(requests)))
    return replace(
        model,
        samples=names,
        clusters=names,
        rounds=tuple(range(len(requests))),
        places=tuple(range(len(requests))),
        repeats=(0,) * len(requests),
        prompts=tuple(arm.prompts[place] for arm, place in requests),
        outputs=tuple(arm.outputs[place] for arm, place in requests),
        scores=tuple(arm.scores[place] for arm, place in requests),
        times={name: tuple(arm.times[name][place] for arm, place in requests) for name in TIMES},
        counters={
            name: tuple(arm.counters[name][place] for arm, place in requests)
            for name in model.counters
        },
        totals={},
    )


def with_wrong_chunks(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The same prompts; before each chunk, in its document, stands a chunk of another prompt.

    The other prompt is half the workload away, where passages of one source are least likely to
    be neighbours. A chunk that both have in common is not taken. Raises ValueError where no other
    prompt has a chunk.
    """
    half = len(samples) // 2
    return tuple(
        _with_wrong(sample, samples[(index + half) % len(samples)])
        for index, sample in enumerate(samples)
    )


def _with_wrong(sample: Sample, other: Sample) -> Sample:
    right = {chunk.tokens for chunk in sample.chunks}
    wrong = [chunk for chunk in other.chunks if chunk.tokens not in right]
    if not wrong:
        raise ValueError(f"{other.id} has no chunk that {sample.id} has not")
    numbers = iter(range(len(sample.segments)))
    return replace(
        sample,
        segments=tuple(
            _after(segment, wrong[next(numbers) % len(wrong)])
            if segment.kind == "chunk"
            else segment
            for segment in sample.segments
        ),
    )


def _after(chunk: SampleSegment, wrong: SampleSegment) -> SampleSegment:
    return replace(chunk, before=replace(wrong, before=None))


#: The arms: full recompute twice, reuse without recomputation, the KV of other chunks.
AGAIN, UNREPAIRED, WRONG = f"{BASELINE}#2", "naive", "shuffled"

#: p below which a loss is no chance, and the score that is left without the right KV.
SURE, COLLAPSED = 0.001, 0.1

#: The score that `full` needs, for others to have something to lose.
ABLE = 0.5


@dataclass(frozen=True, slots=True)
class Control:
    """What a control expects, what it found, and whether that is the same."""

    name: str
    expected: str
    found: str
    passed: bool


def prepare_controls(config: RunConfig, services: Services) -> Job:
    """The run of the controls: the arms of `config`, which are given here, on its requests."""

    def load(settings: RunConfig) -> Workload:
        workload = services.load(settings)
        return replace(workload, samples=with_wrong_chunks(workload.samples))

    arms = (BASELINE, UNREPAIRED, WRONG)
    job = prepare(config.model_copy(update={"algo": arms}), load, services.memory)
    full = next(arm for arm in job.arms if arm.name == BASELINE)
    return replace(job, arms=(full, replace(full, name=AGAIN), *job.arms[1:]))


def run_controls(job: Job, services: Services, progress: Progress) -> tuple[Path, list[Control]]:
    """Run the controls; the directory of the run, and what came of each."""
    finished = execute(job, services.launch, progress)
    return finished.path, list(judge_controls(measured_arms(read_run(finished.path))))


def judge_controls(arms: Mapping[str, MeasuredArm], seeds: int = SEEDS) -> Iterator[Control]:
    """What measured arms say of each control, false alarms of so many seeds among them."""
    full = arms[BASELINE]
    names = (AGAIN, UNREPAIRED, WRONG)
    found = dict(
        zip(names, adjusted([compare_arms(full, arms[name]) for name in names]), strict=True)
    )
    known = [score for score in full.scores if score is not None]
    mean = sum(known) / len(known) if known else 0.0
    able = f"score of at least {ABLE:g}"
    yield Control(f"{BASELINE} answers", able, f"{mean:.3f}", mean >= ABLE)
    least = min(found[AGAIN].metrics, key=lambda metric: metric.p)
    yield Control(
        f"{BASELINE} against itself",
        f"no adjusted p below {ALPHA:g}",
        f"{least.p:.3f} ({least.name}); {found[AGAIN].repeatability.differing} other answers",
        least.p >= ALPHA,
    )
    alarms = false_alarms(full, arms[AGAIN], seeds)
    # They are binomial: so many that chance has them once in a thousand are too many.
    most = int(stats.binom.isf(0.001, seeds, ALPHA))
    expected = f"false alarms at a rate of {ALPHA:g}: at most {most} of {seeds}"
    yield Control("the same, resampled", expected, f"{alarms} of {seeds}", alarms <= most)
    yield _loses(found[UNREPAIRED])
    yield _collapses(found[WRONG])


def _loses(found: ArmComparison) -> Control:
    score = found.metric(SCORE)
    name, expected = f"{UNREPAIRED} loses", f"score below {BASELINE}'s, p below {SURE:g}"
    if score is None:
        return Control(name, expected, "no score", False)
    # The one question that is asked here needs no adjustment.
    text = f"{score.change.value:+.3f}, p {score.change.p:.4f}"
    return Control(name, expected, text, score.change.value < 0 and score.change.p < SURE)


def _collapses(found: ArmComparison) -> Control:
    score = found.metric(SCORE)
    name, expected = "the KV of other chunks", f"score below {COLLAPSED:g}"
    if score is None:
        return Control(name, expected, "no score", False)
    text = f"{score.after:.3f} of {score.before:.3f}"
    return Control(name, expected, text, score.after < COLLAPSED)
