"""The results of a run: what is printed of it and of its directory, and its scores anew."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Registry, Reuse
from picbench.errors import ConfigError
from picbench.files import write_json
from picbench.run.job import Job
from picbench.run.workload import find_grader
from picbench.settings import RunConfig
from picbench.store.reader import Run, check_rows, read_run
from picbench.store.records import SampleRow
from picbench.store.summary import ArmSummary, ScoreSummary, count_outcomes, summarise_scores
from picbench.store.writer import FINAL, MANIFEST, SAMPLES, SUMMARY, hold, write_rows
from picbench.tables.metrics import metrics_shown
from picbench.tables.run import (
    bar_lines,
    cache_lines,
    memory_lines,
    run_table,
    sentences,
    server_lines,
    stalled,
    verdict,
)
from picbench.tables.table import WIDTH, PipedConsole
from picbench.workloads import models
from picbench.workloads.scoring import METRICS, parse_scoring
from picbench.workloads.traffic.corpus import LOGGED, SYNTHETIC


def print_all(stream: TextIO, *parts: RenderableType) -> None:
    """Print in the width of a terminal, or in lines of WIDTH characters."""
    console = PipedConsole(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Names and values, a fact a line."""
    table = Table(show_header=False, box=None)
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def print_result(
    job: Job, arms: Mapping[str, ArmSummary], stream: TextIO, worded: Callable[[str], str] = str
) -> None:
    """A line for each arm, what reuse gains and loses, and what the numbers mean.

    `worded` puts flags for fields into what is advised. A terminal gets a picture and a sentence in
    place of footnotes, which `print_overview` has.
    """
    facts, workload = job.facts, job.workload
    reusing = [arm.name for arm in job.arms if arm.reuse is Reuse.CHUNKS]
    heading = (
        f"{facts.dataset}{' (synthetic rows)' if workload.synthetic else ''}, "
        f"{facts.samples} requests an arm, {workload.model.label}, {load_of(job)}, "
        f"pool {job.sizes.pool} blocks"
    )
    told = map(worded, (*_warnings(job), *stalled(arms), *delay_lines(arms), *low_reuse(job)))
    if stream.isatty():
        print_all(stream, heading, run_table(arms), *told)
        _print_picture(read_run(job.output), reusing, stream)
        print_all(stream, f"\n{job.output}", f"next: picbench report {job.output}")
        return
    print_all(
        stream,
        heading,
        run_table(arms),
        *verdict(arms, reusing),
        *told,
        *_meanings(job),
        *map(worded, cache_lines(job.config.cache, arms)),
        *_footnotes(arms),
    )


def _print_picture(run: Run, reusing: Sequence[str], stream: TextIO) -> None:
    console = PipedConsole(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    for line in ("", *bar_lines(run.summary, min(console.width, WIDTH)), ""):
        console.print(line, markup=False, no_wrap=True, overflow="crop")
    print_all(stream, *sentences(run, reusing))


def _footnotes(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What else was counted, where there is something: memory, servers, tiers."""
    yield from memory_lines(arms)
    yield from server_lines(arms)
    yield from moved_lines(arms)


#: Below this share of prompt tokens, caches have next to nothing to reuse.
_LITTLE = 0.05


def low_reuse(job: Job) -> Iterator[str]:
    """A line where next to nothing can be reused, and how to ask for more."""
    wanted = any(arm.reuse is Reuse.CHUNKS for arm in job.arms)
    if wanted and not job.workload.preload and job.facts.reuse < _LITTLE:
        drawn = "`reuse=0.9` draws requests that share the rows' documents"
        more = drawn if job.config.dataset else "picbench traffic draws some that share more"
        yield f"only {job.facts.reuse:.1%} of the prompts' tokens can be reused: {more}"


def load_of(job: Job) -> str:
    """How requests are sent."""
    arrivals = job.workload.arrivals
    if arrivals is None:
        return f"concurrency {job.config.concurrency}"
    return f"{len(arrivals)} arrivals in {max(arrivals):.1f} s, {job.running} running at most"


def skipped_rows(job: Job) -> Iterator[str]:
    """A line about malformed rows, where there are any."""
    if skipped := job.workload.skipped:
        yield f"malformed rows left out: {len(skipped)}, the first: {skipped[0]}"


def moved_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What went through tiers, an arm a line."""
    for name, arm in arms.items():
        moved = [
            f"{tier} {moved.loaded_bytes / 2**20:,.1f} MiB loaded, "
            f"{moved.stored_bytes / 2**20:,.1f} MiB stored"
            for tier, moved in arm.moved.items()
            if moved.loaded_bytes or moved.stored_bytes
        ]
        if moved:
            yield f"{name}: {'; '.join(moved)}"


def delay_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What requests of an arm waited for: slow tiers, kernels that were compiled meanwhile."""
    for name, arm in arms.items():
        if arm.step_times.slow:
            took = f"{name}: tiers took {arm.step_times.share:.0%} of the arm's steps"
            yield f'{took}: `tiers=""` serves without'
        if arm.compiled:
            kernels = ", ".join(sorted(kernel.rpartition(".")[2] for kernel in arm.compiled))
            yield f"{name}: {sum(arm.compiled.values())} kernels were compiled meanwhile: {kernels}"


def _warnings(job: Job) -> Iterator[str]:
    """What must be known before numbers are believed."""
    workload, samples = job.workload, job.workload.samples
    if not workload.model.meaningful:
        yield f"* {workload.model.weights} weights: accuracy not meaningful"
    yield from skipped_rows(job)
    if job.config.drop:
        yield (
            "Prompts lack passages (`drop`): full does not know them either; KV that was compiled "
            "with context=document does."
        )
    placed = any(chunk.before for sample in samples for chunk in sample.chunks)
    if (names := [arm.name for arm in job.arms if arm.documents]) and not placed:
        yield (
            f"{', '.join(names)}: the rows do not say where in its document any chunk stands, so "
            "each is compiled alone (`places` of `columns`)."
        )
    if names := [arm.name for arm in job.arms if arm.reorders]:
        fixed = sum(sample.ordered for sample in samples)
        yield (
            f"{', '.join(names)}: prompts have their chunks in another order, each once, and "
            f"nothing tells the model the order that was given; {fixed} of {len(samples)} are "
            "consecutive text and stay as they are."
        )


def _meanings(job: Job) -> Iterator[str]:
    """What columns mean in this run."""
    yield "TTFT vs full: geometric mean over paired requests; docs/metrics.md has all columns."
    if job.workload.arrivals:
        yield (
            "Open loop: latency counts from arrival. Each arm served all requests before the next "
            "one did: ratios between arms have in them that the machine got slower or faster."
        )
    if job.objectives:
        yield f"goodput: requests that met {job.config.slo}, by the second."


def print_overview(run: Run, stream: TextIO, worded: Callable[[str], str] = str) -> None:
    """The state of a run, its table, its settings, and where its numbers come from."""
    arms = arms_of(run)
    registry, reusing = Registry(), []
    for name, arm in run.manifest["arms"].items():
        with suppress(ConfigError):  # Not all algorithms need be installed here.
            if registry.parse(arm["algorithm"]).reuse is Reuse.CHUNKS:
                reusing.append(name)
    print_all(
        stream,
        fact_table(_state(run)),
        *([run_table(arms), *verdict(arms, reusing)] if arms else ()),
    )
    if arms and run.manifest["status"] in FINAL:
        _print_picture(run, reusing, stream)
    print_all(
        stream,
        *stalled(arms),
        *map(worded, delay_lines(arms)),
        *map(worded, cache_lines(run.manifest["config"].get("cache"), arms)),
        *_footnotes(arms),
        fact_table(_origin(run, arms)),
    )


def arms_of(run: Run) -> dict[str, ArmSummary]:
    """The summaries of a run; none where it was stopped before it measured anything."""
    try:
        return dict(run.summary)
    except ConfigError:
        return {}


def _state(run: Run) -> Iterator[tuple[str, str]]:
    manifest, workload = run.manifest, run.manifest["workload"]
    yield "run", str(run.path)
    yield "status", " - ".join(filter(None, (manifest["status"], manifest["reason"])))
    for attempt in manifest["attempts"]:
        done = f", after {attempt['done']} requests" if attempt["done"] else ""
        again = f", {attempt['replayed']} served again" if attempt["replayed"] else ""
        end = attempt["ended"] or "no end (killed, or running)"
        yield "attempt", f"{attempt['began']} to {end}: {attempt['status']}{done}{again}"
    yield "requests", f"{workload['samples']} to each of {len(manifest['arms'])} arms"
    yield "data set", workload["dataset"] + (" (synthetic rows)" if workload["synthetic"] else "")
    yield "model", f"{manifest['model']['name']} ({manifest['model']['weights']} weights)"
    for name in ("cache", "fingerprint", "schema"):
        yield name, str(manifest[name])


def _origin(run: Run, arms: Mapping[str, ArmSummary]) -> Iterator[tuple[str, str]]:
    """Outcomes, settings that are not the default, sizes, versions and hardware."""
    for name, arm in arms.items():
        if arm.outcomes:
            counts = ", ".join(f"{n} {what}" for what, n in arm.outcomes.items())
            yield f"outcomes of {name}", counts
    for name, value in run.manifest["config"].items():
        known = RunConfig.model_fields.get(name)
        chosen = tuple(value) if isinstance(value, list) else value
        if known is None or known.is_required() or chosen != known.get_default():
            yield name, ",".join(value) if isinstance(value, list) else str(value)
    sizes, found = run.manifest["sizes"], run.manifest["provenance"]
    yield "context", f"{sizes['context']:,} tokens"
    yield "KV blocks", f"{sizes['pool']:,} in the pool of each arm"
    if git := found.get("git"):
        yield "commit", git["commit"] + (", changed" if git["dirty"] else "")
    yield "packages", ", ".join(f"{name} {known}" for name, known in found["packages"].items())
    yield "python", f"{found['python']} on {found['platform']}"
    yield "CPU", f"{found['cpu']['model']}, {found['cpu']['cores']} cores"
    for gpu in found["gpus"]:
        yield "GPU", f"{gpu['name']}, driver {gpu['driver']}, {gpu['memory']}"
    yield from found["environment"].items()
    yield "command", " ".join(found["command"])


def status_line(path: Path, exit_code: int) -> str:
    """One line of JSON about the run directory `path`, whose command ends with `exit_code`.

    Times are in milliseconds; null is what was not measured.
    """
    run = read_run(path)
    return json.dumps(
        {
            "run": str(path),
            "status": run.manifest["status"],
            "exit_code": exit_code,
            "fingerprint": run.manifest["fingerprint"],
            "arms": {name: headline(arm) for name, arm in arms_of(run).items()},
        }
    )


def headline(arm: ArmSummary) -> dict[str, Any]:
    """The main numbers of an arm."""
    metrics = metrics_shown([arm], "status")
    return {"provenance": arm.provenance} | {metric.name: metric.known(arm) for metric in metrics}


@dataclass(frozen=True, slots=True)
class ArmRescored:
    """Scores of an arm before and after, and how many of its rows have another score or outcome."""

    before: ScoreSummary
    after: ScoreSummary
    scores: int
    outcomes: int


def rescore(path: Path, metric: str | None = None) -> tuple[dict[str, ArmRescored], list[Path]]:
    """Score all replies of a run by `metric` (one of METRICS), or by its own as it is today.

    Rewrites samples.jsonl and summary.json. Returns what changed, by arm, and the files in which
    the old ones are kept. Raises ConfigError for what is no finished run, for one without answers,
    and for an unknown metric, and InvalidRun for one that lacks rows.
    """
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"`metric` {metric!r}: unknown", hint=f"one of {', '.join(METRICS)}")
    run = read_run(path)
    if run.manifest["status"] not in FINAL:
        hint = "give the command that began the run again first"
        raise ConfigError(f"{run.path}: not finished", hint=hint)
    if {SYNTHETIC, LOGGED} & {*run.manifest["workload"]["dataset"].split(",")}:
        raise ConfigError(
            f"{run.path}: random tokens and logs have no answers", hint="use a data set"
        )
    check_rows(run)
    with hold(path):
        shown, rows = _score_rows(run, metric)
        changed: dict[str, ArmRescored] = {}
        for arm, summary in run.summary.items():
            pairs = [(o, n) for o, n in zip(run.rows, rows, strict=True) if n.arm == arm]
            answered = [new for _, new in pairs if new.error is None]
            changed[arm] = ArmRescored(
                before=summary.score,
                after=summarise_scores(answered, shown, meaningful=summary.score.meaningful),
                scores=sum(old.score != new.score for old, new in pairs),
                outcomes=sum(old.outcome != new.outcome for old, new in pairs),
            )
        # The next numbers that are free: summary.1.json and so on.
        number = next(n for n in count(1) if not (path / f"summary.{n}.json").exists())
        kept = [path / f"samples.{number}.jsonl", path / f"summary.{number}.json"]
        for name, copy in zip((SAMPLES, SUMMARY), kept, strict=True):
            shutil.copyfile(path / name, copy)
        write_rows(path / SAMPLES, rows)
        for name in (SUMMARY, MANIFEST):
            document: dict[str, Any] = json.loads((path / name).read_bytes())
            document["workload"]["metric"] = shown
            for arm, change in changed.items() if name == SUMMARY else ():
                outcomes = count_outcomes([row for row in rows if row.arm == arm])
                new = {"score": asdict(change.after), "outcomes": outcomes}
                document["arms"][arm].update(new)
            write_json(path / name, document)
    return changed, kept


def _score_rows(run: Run, metric: str | None) -> tuple[str, list[SampleRow]]:
    """The metric's name in tables, and the run's rows with their scores by it."""
    config, restates = run.manifest["config"], run.manifest["model"]["restates"]
    tokenizer = cache(lambda: models.load_tokenizer(models.resolve(config["model"])))
    rule = parse_scoring(config["scoring"]).rule
    find = cache(lambda name: find_grader(name, rule, restates, tokenizer, metric))
    rows = []
    for row in run.rows:
        if row.error is None:
            sample = run.workload[row.sample]
            score, outcome = find(sample.dataset)[1](row.text or "", sample.answers)
            row = replace(row, score=score, outcome=outcome)
        rows.append(row)
    return find(next(iter(run.workload.values())).dataset)[0], rows
