"""What is shown of runs: frames with numbers, tables of arms, and the lines below them.

pandas takes most of a second to import, and is imported where a frame is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from picbench.errors import ConfigError
from picbench.store.reader import Run
from picbench.store.summary import BASELINE, ArmSummary, labels_of
from picbench.tables.metrics import METRICS, SCORE, metrics_shown
from picbench.tables.table import NOTHING, Column, Shown, Table, Value, bar

if TYPE_CHECKING:
    import pandas as pd


def samples_frame(run: Run) -> "pd.DataFrame":
    """The rows of samples.jsonl; nested counts are columns such as ``tokens_prompt``."""
    return _flat(run.rows)


def arms_frame(run: Run) -> "pd.DataFrame":
    """What summary.json says of each arm; nested fields are columns such as ``ttft_ms_p50``."""
    frame = _flat(run.summary.values())
    frame.insert(0, "arm", list(run.summary))
    return frame.assign(weights=run.manifest["model"]["weights"])


def _flat(rows: Any) -> "pd.DataFrame":
    """Dataclasses as rows; a field of a nested one becomes a column of its own."""
    import pandas as pd

    frame = pd.json_normalize([asdict(row) for row in rows], sep="_")
    # A map without entries would be a column of its own beside those of other rows' entries.
    empty = [name for name in frame if frame[name].map(lambda value: isinstance(value, dict)).any()]
    return frame.drop(columns=empty)


def arms_table(rows: Sequence[tuple[Sequence[str], ArmSummary]], head: Sequence[str]) -> Table:
    """What is shown of arms, each after its names; `head` has a heading for each of these."""
    metrics = metrics_shown([arm for _, arm in rows])
    values: list[list[Value]] = []
    for names, arm in rows:
        texts = [(metric.text(arm), metric.value(arm)) for metric in metrics]
        values.append([*names, *(None if t is None else Shown(t, number) for t, number in texts)])
    return Table("Arms", [*map(Column, head), *(metric.column for metric in metrics)], values)


def run_table(arms: Mapping[str, ArmSummary]) -> Table:
    """What is shown of the arms of a run."""
    return arms_table([((label,), arms[name]) for name, label in labels_of(arms).items()], ["arm"])


def as_markdown(runs: Sequence[Run]) -> str:
    """The columns of the printed table, and what holds for them, in Markdown."""
    names = 1 if len(runs) == 1 else 2
    table = _table_of_runs(runs).markdown(right=names, plain=True)
    return "\n\n".join([*map(caption, runs), table, *warnings_of(runs)]) + "\n"


def as_latex(runs: Sequence[Run]) -> str:
    """The columns of the printed table as a LaTeX ``tabular``, with rules of booktabs.

    What holds for it stands before it in comments.
    """
    comments = (f"% {line}\n" for line in (*map(caption, runs), *warnings_of(runs)))
    return "".join(comments) + _table_of_runs(runs).latex()


def as_csv(runs: Sequence[Run]) -> str:
    """All numbers of the runs' summaries, an arm a line; empty where nothing was measured."""
    import pandas as pd

    frame = pd.concat(map(arms_frame, runs), ignore_index=True)
    if len(runs) > 1:
        frame.insert(0, "run", [run.path.resolve().name for run in runs for _ in run.summary])
    return str(frame.to_csv(index=False))


#: What makes a text of runs, by the name of the format.
TABLE_FORMATS: Mapping[str, Callable[[Sequence[Run]], str]] = MappingProxyType(
    {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
)


def _table_of_runs(runs: Sequence[Run]) -> Table:
    """The arms of a run, or of several, whose names then stand first."""
    if len(runs) == 1:
        return run_table(runs[0].summary)
    rows = [
        ((run.path.resolve().name, label), run.summary[name])
        for run in runs
        for name, label in labels_of(run.summary).items()
    ]
    return arms_table(rows, ["run", "arm"])


def caption(run: Run) -> str:
    """What was run, on what: for tables and figures of a run."""
    rows, model, hardware = _subject(run)
    samples, pool = run.manifest["workload"]["samples"], run.manifest["sizes"]["pool"]
    sizes = f"{samples} requests an arm, {model}, pool of {pool} blocks"
    return f"{rows}, {sizes}, {hardware}; {run.path.resolve().name}"


def short_caption(run: Run) -> str:
    """What runs of one table have in common more often than not: rows, model, hardware."""
    return ", ".join(_subject(run))


def _subject(run: Run) -> tuple[str, str, str]:
    """The rows, the model, and the first device that engines ran on."""
    workload, model = run.manifest["workload"], run.manifest["model"]
    provenance = run.manifest["provenance"]
    device = next(iter(run.manifest["arms"].values()))["engine"].get("device", "cpu")
    gpus = provenance.get("gpus") if device != "cpu" else None
    weights = "" if model["meaningful"] else f" ({model['weights']} weights)"
    return (
        f"{workload['dataset']}{' (synthetic rows)' if workload['synthetic'] else ''}",
        f"model {model['name']}{weights}",
        f"{device}: {gpus[0]['name'] if gpus else provenance['cpu']['model']}",
    )


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """What a reader of runs' numbers must know: failures, simulations, weights, stalls."""
    arms = [arm for run in runs for arm in run.summary.values()]
    failed = sum(arm.failed for arm in arms)
    notes = [f"{failed} requests failed."] if failed else []
    if any(arm.provenance == "simulated" for arm in arms):
        notes.append("Simulated arms: no engine computed anything; their numbers are a model's.")
    if not all(arm.score.meaningful for arm in arms):
        notes.append("Random or dummy weights: accuracy is not meaningful.")
    for run in runs:
        engines = {name: arm["engine"] for name, arm in run.manifest["arms"].items()}
        notes += (f"{line}." for line in (*unlike_lines(engines), *stalled(run.summary)))
    return notes


def unlike_lines(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line if engines, by arm, are known to have other vLLMs, threads, or cores to spare."""
    unlike = []
    for field in ("vllm", "threads", "reserved_cores"):
        found = {name: engine.get(field) for name, engine in engines.items()}
        told = [f"{name} {value}" for name, value in found.items() if value is not None]
        if len({*found.values()} - {None}) > 1:
            unlike.append(f"{field.replace('_', ' ')}: {', '.join(told)}")
    if unlike:
        yield f"arms do not run alike, and times tell of that, too ({'; '.join(unlike)})"


def figure_labels(arms: Mapping[str, ArmSummary]) -> dict[str, str]:
    """The names of arms in figures: what is simulated and what stalled says so."""
    labels = labels_of(arms)
    for name, arm in arms.items():
        if arm.stalls is not None and arm.stalls.steps:
            labels[name] += f" (stalled: {arm.stalls.steps} steps)"
    return labels


def stalled(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """Arms that stalled, one a line."""
    for name, arm in arms.items():
        if (found := arm.stalls) is not None and found.steps:
            yield (
                f"{name}: stalled in {found.steps} steps, the longest of {found.longest_s:.1f} s; "
                f"its own slowest steps allow {found.allowed_s:.1f} s"
            )


_STATES = {
    "cold": "dropped before each group of requests, which share no more than what they have in "
    "common",
    "warm": "filled with every chunk before the first request was measured",
    "steady": "kept over a stream of different prompts",
}


def cache_lines(state: str | None, arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """The declared state, what was missed in a warm cache, and how gains decay in a steady one."""
    if state is None:
        return
    yield f"Cache {state}: {_STATES[state]}; verified from counters."
    for name, arm in arms.items():
        if arm.cache is not None and arm.cache.missed_requests:
            evicted = (f"{n} {kind}" for kind, n in arm.cache.evicted_blocks.items() if n)
            yield (
                f"{name}: {arm.cache.missed_requests} of {arm.requests} requests missed what had "
                f"been evicted ({', '.join(evicted)} blocks): raise `kv_blocks`"
            )
        if arm.cache is None or not arm.cache.decay:
            continue
        windows, times, shares = arm.cache.decay, [], []
        for window in windows:
            tokens, time = window.prompt_tokens, NOTHING
            if window.ttft_vs_full is not None:
                time = f"{window.ttft_vs_full.geomean:.2f}x"
            elif window.ttft_ms is not None:
                time = f"{window.ttft_ms.p50:.1f}"
            times.append(time)
            shares.append(f"{window.found_tokens / tokens:.0%}" if tokens else NOTHING)
        paired = any(window.ttft_vs_full for window in windows)
        yield (
            f"{name}: {METRICS['ttft_vs_full' if paired else 'ttft_p50_ms'].title} over "
            f"{len(windows)} windows of {sum(window.requests for window in windows)} requests "
            f"{' '.join(times)}; tokens found {' '.join(shares)}"
        )


def memory_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What each arm's workers held when the run ended, and what of it is not accounted for."""
    found = {name: arm.memory for name, arm in arms.items() if arm.memory is not None}
    blocks = {memory.block_bytes for memory in found.values() if memory.block_bytes}
    if blocks:
        sizes = " or ".join(f"{size:,} bytes" for size in sorted(blocks))
        yield f"KV: a block has {sizes} in all layers of a worker; peak of what requests held."
    for name, use in ((name, use) for name, memory in found.items() for use in memory.workers):
        line = (
            f"{name}: weights {gib(use.weights_bytes)}, KV pool {gib(use.pool_bytes)}, "
            f"workspaces {gib(use.workspace_bytes)}"
        )
        if use.held_bytes is None or use.residual_bytes is None:
            yield f"{line} GiB"
            continue
        held = "resident on the CPU" if use.device == "cpu" else "of torch's allocator"
        line += f", residual {gib(use.residual_bytes)}: {gib(use.held_bytes)} GiB {held}"
        driver = use.driver_bytes
        yield line if driver is None else f"{line}, {gib(driver)} GiB by the driver's count"


def gib(count: int) -> str:
    """Bytes in GiB, to a thousandth."""
    return f"{count / 2**30:.3f}"


def server_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """A line for each server that tells something; of what it does not tell, nothing."""
    for name, arm in arms.items():
        counted, parts = arm.counted, []
        if counted is None:
            continue
        if (share := counted.reused_share) is not None:
            parts.append(f"{share:.1%} of prompt tokens came from its caches")
        if counted.preemptions:
            parts.append(f"{counted.preemptions:,} preemptions")
        if counted.peak_kv_usage is not None:
            parts.append(f"at most {counted.peak_kv_usage:.0%} of its KV memory was seen in use")
        # Failed requests may be counted or not.
        if counted.prompt_tokens not in (None, arm.tokens.prompt) and not arm.failed:
            parts.append(
                f"{counted.prompt_tokens:,} prompt tokens where {arm.tokens.prompt:,} were sent: "
                "it serves others, too, and its counters are theirs as well"
            )
        if parts:
            yield f"{name}: by its own counters {'; '.join(parts)}"


#: The algorithm that the line is about, where a run has it, and the arm that recomputes nothing
#: in the chunks that it reuses.
_PREFERRED, _UNREPAIRED = "mepic", "naive"


def verdict(arms: Mapping[str, ArmSummary], reusing: Sequence[str]) -> Iterator[str]:
    """Compare one arm with `full`; nothing where there is nothing to compare.

    The arm is MEPIC's, or else the last of `reusing`, the arms that reuse chunks. Times are paired
    (see `Ratio`), scores are differences of means: of meaningful ones, over the same requests.
    """
    full, name = arms.get(BASELINE), subject_of([name for name in reusing if name in arms])
    ratio = arms[name].ttft_vs_full if name is not None else None
    if full is None or name is None or ratio is None:
        return
    arm, losses = arms[name], {}
    for other in (name, _UNREPAIRED):
        mean = arms[other].score.mean if other in arms and not arms[other].failed else None
        if mean is not None and full.score.mean is not None and not full.failed:
            losses[other] = f"{round(mean - full.score.mean, 2) + 0.0:+.2f}"
    parts = [f"first token in {ratio.geomean:.2f}x the time"]
    if full.blocks.peak_referenced:
        blocks = arm.blocks.peak_referenced / full.blocks.peak_referenced
        parts.append(f"{blocks:.2f}x the blocks at peak")
    if name in losses and arm.score.meaningful:
        own = losses.pop(name)
        beside = f" ({_UNREPAIRED} {losses[_UNREPAIRED]})" if _UNREPAIRED in losses else ""
        parts.append(f"{arm.score.metric} {own}{beside}")
    yield f"{name} against {BASELINE}: {', '.join(parts)} (n={ratio.pairs})"


#: What bars compare: a heading, the metric that is drawn, and the one that ratios are made of.
_BARS = (("first token", "ttft_p50_ms"), ("KV memory, peak", "peak_gib"), ("answers", "score"))


def reference_of(arms: Mapping[str, ArmSummary]) -> str | None:
    """The arm that others are held against: prefix caching, or else full recompute."""
    return next((name for name in ("prefix", BASELINE) if name in arms and len(arms) > 1), None)


def bar_lines(arms: Mapping[str, ArmSummary], width: int) -> Iterator[str]:
    """Bars of times, memory and scores in lines of `width`, as multiples of the reference's."""
    reference, labels = reference_of(arms), labels_of(arms)
    if reference is None:
        return
    names = min(max(map(len, labels.values())), width // 3)
    for heading, metric in _BARS:
        ratios = {name: _relative(arms, name, reference, metric) for name in arms}
        known = [ratio for ratio in ratios.values() if ratio is not None]
        if len(known) < 2:
            continue
        unit = f" ({arms[reference].score.metric})" if metric == SCORE else ""
        yield f"{heading}{unit}, against {reference}"
        for name, ratio in ratios.items():
            if ratio is not None:
                drawn = bar(ratio / max(known), width - names - 25)
                shown = f"{METRICS[metric].text(arms[name])} {METRICS[metric].unit}"
                yield f"  {labels[name][:names]:{names}} {ratio:5.2f}x {shown:>12} {drawn}"


def _relative(
    arms: Mapping[str, ArmSummary], name: str, reference: str, metric: str
) -> float | None:
    """An arm's value over the reference's; of times over paired requests where both have these."""
    arm, other = arms[name], arms[reference]
    if metric == "ttft_p50_ms" and arm.ttft_vs_full and other.ttft_vs_full:
        return arm.ttft_vs_full.geomean / other.ttft_vs_full.geomean
    own, theirs = (METRICS[metric].known(each) for each in (arm, other))
    if metric == "peak_gib" and not (own and theirs):
        own, theirs = arm.blocks.peak_referenced, other.blocks.peak_referenced
    return own / theirs if own is not None and theirs else None


def sentences(run: Run, reusing: Sequence[str]) -> Iterator[str]:
    """What each arm that reuses chunks gains and costs against prefix caching, as one would say it.

    An answer changes where its score does; what has random weights has no answers.
    """
    arms = run.summary
    reference = reference_of(arms)
    if reference is None:
        return
    try:
        rows = run.rows
    except ConfigError:  # Results that are kept for long have the summary alone.
        rows = ()
    scores = {(row.arm, row.sample, row.round): row.score for row in rows if not row.error}
    samples = {(row.sample, row.round) for row in rows if row.arm == reference}
    for name in (name for name in reusing if name in arms):
        time = _relative(arms, name, reference, "ttft_p50_ms")
        memory = _relative(arms, name, reference, "peak_gib")
        found = [] if time is None else [f"first token {times_sooner(time)}"]
        found += [] if memory is None else [f"{_share_less(memory)} memory"]
        pairs = [(scores.get((name, *at)), scores.get((reference, *at))) for at in samples]
        known = [own != theirs for own, theirs in pairs if own is not None and theirs is not None]
        means = [METRICS[SCORE].known(arms[each]) for each in (name, reference)]
        ends = []
        if known and None not in means:
            own, theirs = means
            changed = f"; {_count_changed(sum(known), len(known))}"
            ends = [f"{changed} ({arms[name].score.metric} {own:.2f} for {theirs:.2f})"]
        if found:
            yield f"{name}: {', '.join(found)}{''.join(ends)}"


def times_sooner(ratio: float) -> str:
    """2.8 times sooner, 12 % later."""
    word, factor = ("later", ratio) if ratio > 1 else ("sooner", 1 / ratio)
    if factor < 1.02:
        return "as soon"
    if factor >= 1.5:
        return f"{factor:.1f} times {word}"
    return f"{abs(ratio - 1):.0%} {word}".replace("%", " %")


def _share_less(ratio: float) -> str:
    """A fifth less, 12 % more, as much."""
    change = abs(ratio - 1)
    if change < 0.01:
        return "as much"
    word = "more" if ratio > 1 else "less"
    shares = {"half": 1 / 2, "a third": 1 / 3, "a quarter": 1 / 4, "a fifth": 1 / 5}
    named = next((name for name, share in shares.items() if abs(change - share) <= 0.015), None)
    return f"{named or f'{100 * change:.0f} %'} {word}"


def _count_changed(changed: int, count: int) -> str:
    """1 answer in 4 changes."""
    if changed == 0:
        return f"none of {count} answers changes"
    if 2 * changed > count:
        return f"{changed} of {count} answers change"
    return f"1 answer in {count / changed:.0f} changes"


def subject_of(reusing: Sequence[str]) -> str | None:
    """The arm that a line about reuse is about: MEPIC's, or else the last; None of none."""
    preferred = [name for name in reusing if name.partition(":")[0] == _PREFERRED]
    return next(iter(preferred or reversed(reusing)), None)
