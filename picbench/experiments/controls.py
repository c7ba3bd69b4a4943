"""Comparisons whose outcome is known: `picbench doctor` and the controls of `picbench selftest`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.arm import SCORE, TIMES, MeasuredArm, compare_arms, measured_arms
from picbench.compare.comparison import adjusted
from picbench.engines.algorithms import Algorithm
from picbench.engines.config import EngineConfig
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment
from picbench.engines.vllm.installation import (
    Finding,
    inspect_device,
    inspect_import,
    inspect_installation,
)
from picbench.errors import PicBenchError
from picbench.run.job import Job, prepare
from picbench.run.runner import started_engines
from picbench.run.schedule import Progress
from picbench.run.session import Launch, Services, execute
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.store import provenance
from picbench.store.reader import read_run
from picbench.store.summary import BASELINE
from picbench.workloads import models
from picbench.workloads.sample import Sample


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
        found = list(segments)
        for place, segment in enumerate(segments):
            if segment.chunk:
                if not segment.context:
                    raise ValueError("the control shuffled needs a document for each chunk")
                tokens = tuple(islice(cycle(segment.context), len(segment.tokens)))
                found[place] = replace(segment, tokens=tokens, context=())
        return found

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy()


#: Of an alarm: any adjusted p below it.
ALPHA = 0.05

#: Comparisons.
SEEDS = 100

#: The arms: full recompute twice, reuse without recomputation, the KV of other chunks.
AGAIN, UNREPAIRED, WRONG = f"{BASELINE}#2", "naive", "shuffled"

#: p below which a loss is no chance; the score that `full` needs, for others to have something to
#: lose; the score that is left without the right KV.
SURE, ABLE, COLLAPSED = 0.001, 0.5, 0.1


def false_alarms(
    first: MeasuredArm, second: MeasuredArm, seeds: int = SEEDS, requests: int = 200
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
        alarms += any(p < ALPHA for metric in found.metrics if (p := metric.p) is not None)
    return alarms


def _arm(requests: Sequence[tuple[MeasuredArm, int]]) -> MeasuredArm:
    """An arm of these requests, each of its own name, cluster and round."""
    model, numbers = requests[0][0], tuple(range(len(requests)))
    times = model.times.keys() & TIMES
    names = tuple(map(str, numbers))
    return replace(
        model,
        samples=names,
        clusters=names,
        rounds=numbers,
        places=numbers,
        repeats=(0,) * len(requests),
        prompts=tuple(arm.prompts[place] for arm, place in requests),
        outputs=tuple(arm.outputs[place] for arm, place in requests),
        scores=tuple(arm.scores[place] for arm, place in requests),
        times={t: tuple(arm.times[t][place] for arm, place in requests) for t in times},
        counters={},
        totals={},
    )


def with_wrong_chunks(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The same prompts; before each chunk, in its document, stands a chunk of another prompt.

    The other prompt is half the workload away, where passages of one source are least likely to
    be neighbours. A chunk that both have in common is not taken. Raises ValueError where no other
    prompt has a chunk.
    """
    half, found = len(samples) // 2, []
    for index, sample in enumerate(samples):
        other = samples[(index + half) % len(samples)]
        right = {chunk.tokens for chunk in sample.chunks}
        wrong = [chunk for chunk in other.chunks if chunk.tokens not in right]
        if not wrong:
            raise ValueError(f"{other.id} has no chunk that {sample.id} has not")
        before = cycle(replace(chunk, before=None) for chunk in wrong)
        segments = (
            replace(segment, before=next(before)) if segment.kind == "chunk" else segment
            for segment in sample.segments
        )
        found.append(replace(sample, segments=tuple(segments)))
    return tuple(found)


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
    execute(job, services.launch, progress)
    return job.output, list(judge_controls(measured_arms(read_run(job.output))))


def judge_controls(arms: Mapping[str, MeasuredArm], seeds: int = SEEDS) -> Iterator[Control]:
    """What measured arms say of each control, false alarms of so many seeds among them."""
    full = arms[BASELINE]
    compared = [compare_arms(full, arms[name]) for name in (AGAIN, UNREPAIRED, WRONG)]
    again, unrepaired, wrong = adjusted(compared)
    known = [score for score in full.scores if score is not None]
    mean = sum(known) / len(known) if known else 0.0
    able = f"score of at least {ABLE:g}"
    yield Control(f"{BASELINE} answers", able, f"{mean:.3f}", mean >= ABLE)
    p, least = min((m.p, m.name) for m in again.metrics if m.p is not None)
    text = f"{p:.3f} ({least}); {again.repeatability.differing} other answers"
    expected = f"no adjusted p below {ALPHA:g}"
    yield Control(f"{BASELINE} against itself", expected, text, p >= ALPHA)
    alarms = false_alarms(full, arms[AGAIN], seeds)
    # They are binomial: so many that chance has them once in a thousand are too many.
    most = int(stats.binom.isf(0.001, seeds, ALPHA))
    expected = f"false alarms at a rate of {ALPHA:g}: at most {most} of {seeds}"
    yield Control("the same, resampled", expected, f"{alarms} of {seeds}", alarms <= most)
    lost, text, passed = unrepaired.metric(SCORE), "no score", False
    if lost is not None and lost.change.p is not None:
        # The one question that is asked here needs no adjustment.
        text = f"{lost.change.value:+.3f}, p {lost.change.p:.4f}"
        passed = lost.change.value < 0 and lost.change.p < SURE
    expected = f"score below {BASELINE}'s, p below {SURE:g}"
    yield Control(f"{UNREPAIRED} loses", expected, text, passed)
    left, text, passed = wrong.metric(SCORE), "no score", False
    if left is not None:
        text, passed = f"{left.after:.3f} of {left.before:.3f}", left.after < COLLAPSED
    yield Control("the KV of other chunks", f"score below {COLLAPSED:g}", text, passed)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, in the order in which it is read."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing has a fault."""
        return self.verdict == "ok"

    @property
    def verdict(self) -> str:
        """``ok``, or ``not ok`` and what is not."""
        faults = [finding.fault for finding in self.findings if finding.fault]
        return f"not ok: {'; '.join(faults)}" if faults else "ok"

    def document(self) -> dict[str, Any]:
        """The same as JSON values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"schema": 1, "ok": self.ok, "verdict": self.verdict, "findings": findings}

    def text(self) -> str:
        """A finding a line, below each other by section, and the verdict as the last line."""
        lines, last = [], ""
        width, wide = (max(len(getattr(f, n)) for f in self.findings) for n in ("section", "name"))
        for row in self.findings:
            section = "" if row.section == last else row.section
            mark = "   <- not ok" if row.fault else ""
            lines.append(f"{section:<{width}}  {row.name:<{wide}}  {row.found}{mark}".rstrip())
            last = row.section
        return "\n".join([*lines, self.verdict])


def diagnose(model: str | None, device: str, dtype: str, launch: Launch) -> Diagnosis:
    """Look at this installation and machine and, with a `model`, at the answers of its engines.

    Engines are only started where all else is right. Raises ConfigError for a model or a device
    that does not exist.
    """
    provenance.quiet_engine()
    findings = [*inspect_installation()]
    if not any(finding.fault for finding in findings):
        findings.append(inspect_import())
    broken = any(finding.fault for finding in findings)
    if not broken:
        cpu = f"{provenance.cpu_model()}, {provenance.cores()} cores"
        gpus = ("{name} ({memory}, driver {driver})".format(**gpu) for gpu in provenance.gpus())
        findings.append(Finding("device", "cpu", cpu))
        findings.append(Finding("device", "gpu", ", ".join(gpus) or "none"))
        findings += inspect_device(device)
    if model is not None:
        not_run = [Finding("self-check", model, "not run")]
        findings += not_run if broken else _self_check(model, device, dtype, launch)
    return Diagnosis(tuple(findings))


def _self_check(model: str, device: str, dtype: str, launch: Launch) -> Iterator[Finding]:
    found = models.resolve(model)
    # Room for the self-check's prompts; steps are so short that a prompt takes several.
    config = EngineConfig(
        model=str(found.path),
        device=device,
        dtype=dtype,
        context=min(1024, found.context or 1024),
        kv_blocks=256,
        batch_tokens=256,
        max_requests=16,
        eager=True,
        tiers="host:256MiB",
    )
    stock = replace(config, stock=True, algorithm="prefix", tiers="")
    began = time.perf_counter()
    try:
        # One after the other: a GPU may have room for one of them.
        known, kind = _ask(launch, "stock", stock, methodcaller("checked_prompts"))
        checked, _ = _ask(launch, "picbench", config, methodcaller("self_check", known))
    except PicBenchError as error:
        yield Finding("self-check", found.label, "an engine failed", str(error))
        return
    kind = f"{kind['dtype']} on {kind['device']}, {time.perf_counter() - began:.0f} s"
    yield Finding("self-check", found.label, f"{kind}; largest differences:")
    for one in checked.comparisons:
        limits = f"{one.difference:.1e}, at most {one.limit:.1e}"
        yield Finding("self-check", one.name, limits, one.fault)


def _ask(
    launch: Launch, name: str, config: EngineConfig, question: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """The answer of an engine in a process of its own, and what the engine is."""
    with started_engines({name: config}, launch) as (engines, described):
        return engines[name].call(question), described[name]
