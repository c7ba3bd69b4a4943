"""The controls: comparisons whose outcome is known, and what came of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scipy import stats  # type: ignore[import-untyped]

from picbench.comparison.arm_comparison import SCORE, ArmComparison, compare_arms
from picbench.comparison.measured_arm import MeasuredArm, measured_arms
from picbench.comparison.run_comparison import adjusted
from picbench.inputs.workload import Workload
from picbench.output.run_reader import read_run
from picbench.output.summary import BASELINE
from picbench.run.config import RunConfig
from picbench.run.job import Job, prepare
from picbench.run.progress import Progress
from picbench.run.session import Services, execute
from picbench.selftest.false_alarms import ALPHA, SEEDS, false_alarms
from picbench.selftest.wrong_chunks import with_wrong_chunks

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
    yield _able(full)
    yield _same(found[AGAIN])
    yield _quiet(full, arms[AGAIN], seeds)
    yield _loses(found[UNREPAIRED])
    yield _collapses(found[WRONG])


def _able(full: MeasuredArm) -> Control:
    known = [score for score in full.scores if score is not None]
    mean = sum(known) / len(known) if known else 0.0
    expected = f"score of at least {ABLE:g}"
    return Control(f"{BASELINE} answers", expected, f"{mean:.3f}", mean >= ABLE)


def _same(found: ArmComparison) -> Control:
    least = min(found.metrics, key=lambda metric: metric.p)
    return Control(
        f"{BASELINE} against itself",
        f"no adjusted p below {ALPHA:g}",
        f"{least.p:.3f} ({least.name}); {found.repeatability.differing} other answers",
        least.p >= ALPHA,
    )


def _quiet(full: MeasuredArm, again: MeasuredArm, seeds: int) -> Control:
    """False alarms are binomial: so many that chance has them once in a thousand are too many."""
    alarms = false_alarms(full, again, seeds)
    most = int(stats.binom.isf(0.001, seeds, ALPHA))
    return Control(
        "the same, resampled",
        f"false alarms at a rate of {ALPHA:g}: at most {most} of {seeds}",
        f"{alarms} of {seeds}",
        alarms <= most,
    )


def _loses(found: ArmComparison) -> Control:
    score = found.metric(SCORE)
    expected = f"score below {BASELINE}'s, p below {SURE:g}"
    if score is None:
        return Control(f"{UNREPAIRED} loses", expected, "no score", False)
    # The one question that is asked here needs no adjustment.
    text = f"{score.change.value:+.3f}, p {score.change.p:.4f}"
    passed = score.change.value < 0 and score.change.p < SURE
    return Control(f"{UNREPAIRED} loses", expected, text, passed)


def _collapses(found: ArmComparison) -> Control:
    score = found.metric(SCORE)
    expected = f"score below {COLLAPSED:g}"
    if score is None:
        return Control("the KV of other chunks", expected, "no score", False)
    text = f"{score.after:.3f} of {score.before:.3f}"
    return Control("the KV of other chunks", expected, text, score.after < COLLAPSED)
