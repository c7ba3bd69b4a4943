"""Runs as frames: a row for each request, scheduler step or arm, numbers as numbers.

pandas takes most of a second to import, and is imported where a frame is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from picbench.engines.ledger import MemoryUse
from picbench.store.reader import Run
from picbench.store.records import ServerCounts
from picbench.store.summary import BASELINE, ArmSummary, CacheSummary, DecayWindow, labels_of
from picbench.tables.metrics import Metric, metrics_shown
from picbench.tables.table import NOTHING, Column, Shown, Table

if TYPE_CHECKING:
    import pandas as pd


def samples_frame(run: Run) -> "pd.DataFrame":
    """The rows of samples.jsonl; nested counts are columns such as ``tokens_prompt``."""
    return _flat(run.rows)


def ledger_frame(run: Run) -> "pd.DataFrame":
    """The block ledger: arm, step, time in seconds, pool and blocks of each kind.

    `referenced` has the blocks that running requests hold.
    """
    import pandas as pd

    frames = [
        pd.DataFrame(
            {"arm": arm, "step": range(len(of.time)), "time": of.time, "pool": of.pool}
        ).assign(**of.blocks, referenced=of.referenced)
        for arm, of in run.ledger.items()
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["arm"])


def arms_frame(run: Run) -> "pd.DataFrame":
    """What summary.json says of each arm; nested fields are columns such as ``ttft_ms_p50``."""
    frame = _flat(run.summary.values())
    frame.insert(0, "arm", list(run.summary))
    return frame.assign(weights=run.manifest["model"]["weights"])


def arms_table(rows: Sequence[tuple[Sequence[str], ArmSummary]], head: Sequence[str]) -> Table:
    """What is shown of arms, each after its names; `head` has a heading for each of these."""
    metrics = metrics_shown([arm for _, arm in rows])
    columns = [Column(metric.printed, metric.digits, metric.title_unit) for metric in metrics]
    values = [[*names, *(_shown(metric, arm) for metric in metrics)] for names, arm in rows]
    return Table("Arms", [*map(Column, head), *columns], values)


def run_table(arms: Mapping[str, ArmSummary]) -> Table:
    """What is shown of the arms of a run."""
    return arms_table([((label,), arms[name]) for name, label in labels_of(arms).items()], ["arm"])


def _shown(metric: Metric, arm: ArmSummary) -> Shown | None:
    text = metric.text(arm)
    return None if text is None else Shown(text, metric.value(arm))


def of_runs(runs: Sequence[Run], frame: Callable[[Run], "pd.DataFrame"]) -> "pd.DataFrame":
    """The frames of several runs, one after the other, with the run's name in front."""
    import pandas as pd

    return pd.concat(
        [frame(run).assign(run=_name(run.path)) for run in runs], ignore_index=True
    ).pipe(lambda whole: whole[["run", *whole.columns.drop("run")]])


def _name(path: Path) -> str:
    return path.resolve().name


def _flat(rows: Any) -> "pd.DataFrame":
    """Dataclasses as rows; a field of a nested one becomes a column of its own."""
    import pandas as pd

    frame = pd.json_normalize([asdict(row) for row in rows], sep="_")
    # A map without entries would be a column of its own beside those of other rows' entries.
    empty = [name for name in frame if frame[name].map(lambda value: isinstance(value, dict)).any()]
    return frame.drop(columns=empty)


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
        if arm.cache is None:
            continue
        if arm.cache.missed_requests:
            yield (
                f"{name}: {arm.cache.missed_requests} of {arm.requests} requests missed what had "
                f"been evicted ({_evicted(arm.cache)}): raise `kv_blocks`"
            )
        if arm.cache.decay:
            yield f"{name}: {_decay(arm.cache)}"


def _evicted(cache: CacheSummary) -> str:
    counts = (f"{count} {kind}" for kind, count in cache.evicted_blocks.items() if count)
    return f"{', '.join(counts)} blocks"


def _decay(cache: CacheSummary) -> str:
    """TTFT of windows, against full where there is such an arm, and what each found."""
    windows = cache.decay
    times = " ".join(_time(window) for window in windows)
    paired = any(window.ttft_vs_full for window in windows)
    what = "TTFT vs full" if paired else "TTFT p50 ms"
    requests = sum(window.requests for window in windows)
    shares = " ".join(_share(window) for window in windows)
    return (
        f"{what} over {len(windows)} windows of {requests} requests {times}; tokens found {shares}"
    )


def _time(window: DecayWindow) -> str:
    if window.ttft_vs_full is not None:
        return f"{window.ttft_vs_full.geomean:.2f}x"
    return NOTHING if window.ttft_ms is None else f"{window.ttft_ms.p50:.1f}"


def _share(window: DecayWindow) -> str:
    return f"{window.found_tokens / window.prompt_tokens:.0%}" if window.prompt_tokens else NOTHING


def memory_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What each arm's workers held when the run ended, and what of it is not accounted for."""
    found = {name: arm.memory for name, arm in arms.items() if arm.memory is not None}
    blocks = {memory.block_bytes for memory in found.values() if memory.block_bytes}
    if blocks:
        sizes = " or ".join(f"{size:,} bytes" for size in sorted(blocks))
        yield f"KV: a block has {sizes} in all layers of a worker; peak of what requests held."
    for name, memory in found.items():
        for worker in memory.workers:
            yield f"{name}: {_account(worker)}"


def _account(use: MemoryUse) -> str:
    parts = (
        f"weights {gib(use.weights_bytes)}, KV pool {gib(use.pool_bytes)}, "
        f"workspaces {gib(use.workspace_bytes)}"
    )
    if use.held_bytes is None or use.residual_bytes is None:
        return f"{parts} GiB"
    held = "resident on the CPU" if use.device == "cpu" else "of torch's allocator"
    line = f"{parts}, residual {gib(use.residual_bytes)}: {gib(use.held_bytes)} GiB {held}"
    if use.driver_bytes is not None:
        line += f", {gib(use.driver_bytes)} GiB by the driver's count"
    return line


def gib(count: int) -> str:
    """Bytes in GiB, to a thousandth."""
    return f"{count / 2**30:.3f}"


def server_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """A line for each server that tells something; of what it does not tell, nothing."""
    for name, arm in arms.items():
        if arm.counted is None:
            continue
        parts = list(_parts(arm, arm.counted))
        if parts:
            yield f"{name}: by its own counters {'; '.join(parts)}"


def _parts(arm: ArmSummary, counted: ServerCounts) -> Iterator[str]:
    share = counted.reused_share
    if share is not None:
        yield f"{share:.1%} of prompt tokens came from its caches"
    if counted.preemptions:
        yield f"{counted.preemptions:,} preemptions"
    if counted.peak_kv_usage is not None:
        yield f"at most {counted.peak_kv_usage:.0%} of its KV memory was seen in use"
    # Failed requests may be counted or not.
    if counted.prompt_tokens not in (None, arm.tokens.prompt) and not arm.failed:
        yield (
            f"{counted.prompt_tokens:,} prompt tokens where {arm.tokens.prompt:,} were sent: it "
            "serves others, too, and its counters are theirs as well"
        )


def stalled(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """Arms that stalled, one a line."""
    for name, arm in arms.items():
        if arm.stalls is not None and arm.stalls.steps:
            yield (
                f"{name}: stalled in {arm.stalls.steps} steps, the longest of "
                f"{arm.stalls.longest_s:.1f} s; its own slowest steps allow "
                f"{arm.stalls.allowed_s:.1f} s"
            )


def figure_labels(arms: Mapping[str, ArmSummary]) -> dict[str, str]:
    """The names of arms in figures: what is simulated and what stalled says so."""
    labels = labels_of(arms)
    for name, arm in arms.items():
        if arm.stalls is not None and arm.stalls.steps:
            labels[name] += f" (stalled: {arm.stalls.steps} steps)"
    return labels


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
    frame = arms_frame(runs[0]) if len(runs) == 1 else of_runs(runs, arms_frame)
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
        ((_name(run.path), label), run.summary[name])
        for run in runs
        for name, label in labels_of(run.summary).items()
    ]
    return arms_table(rows, ["run", "arm"])


def caption(run: Run) -> str:
    """What was run, on what: for tables and figures of a run."""
    samples, pool = run.manifest["workload"]["samples"], run.manifest["sizes"]["pool"]
    return (
        f"{_rows(run)}, {samples} requests an arm, {_model(run)}, pool of {pool} blocks, "
        f"{_hardware(run)}; {run.path.resolve().name}"
    )


def short_caption(run: Run) -> str:
    """What runs of one table have in common more often than not: rows, model, hardware."""
    return f"{_rows(run)}, {_model(run)}, {_hardware(run)}"


def _rows(run: Run) -> str:
    workload = run.manifest["workload"]
    return f"{workload['dataset']}{' (synthetic rows)' if workload['synthetic'] else ''}"


def _model(run: Run) -> str:
    model = run.manifest["model"]
    kind = "" if model["meaningful"] else f" ({model['weights']} weights)"
    return f"model {model['name']}{kind}"


def _hardware(run: Run) -> str:
    """The kind of device that engines ran on, and the first one."""
    provenance = run.manifest["provenance"]
    device = next(iter(run.manifest["arms"].values()))["engine"].get("device", "cpu")
    gpus = provenance.get("gpus") or []
    name = gpus[0]["name"] if device != "cpu" and gpus else provenance["cpu"]["model"]
    return f"{device}: {name}"


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """What a reader of runs' numbers must know: failures, simulations, weights, stalls."""
    arms = [arm for run in runs for arm in run.summary.values()]
    failed = sum(arm.failed for arm in arms)
    notes = [f"{failed} requests failed."] if failed else []
    if any(arm.provenance == "simulated" for arm in arms):
        notes.append("Simulated arms: no engine computed anything; their numbers are a model's.")
    if not all(arm.score.meaningful for arm in arms):
        notes.append("Random or dummy weights: accuracy is not meaningful.")
    return [*notes, *(f"{line}." for run in runs for line in stalled(run.summary))]


#: The algorithm that the line is about, where a run has it, and the arm that recomputes nothing
#: in the chunks that it reuses.
_PREFERRED, _UNREPAIRED = "mepic", "naive"


def verdict(arms: Mapping[str, ArmSummary], reusing: Sequence[str]) -> Iterator[str]:
    """Compare one arm with `full`; nothing where there is nothing to compare.

    The arm is MEPIC's, or else the last of `reusing`, the arms that reuse chunks. Times are paired
    (see `Ratio`), scores are differences of means: of meaningful ones, over the same requests.
    """
    full, name = arms.get(BASELINE), subject_of([name for name in reusing if name in arms])
    if full is None or name is None:
        return
    arm = arms[name]
    if arm.ttft_vs_full is None:
        return
    parts = [f"first token in {arm.ttft_vs_full.geomean:.2f}x the time"]
    if full.blocks.peak_referenced:
        blocks = arm.blocks.peak_referenced / full.blocks.peak_referenced
        parts.append(f"{blocks:.2f}x the blocks at peak")
    lost = _difference(arm, full)
    if lost is not None:
        parts.append(f"{arm.score.metric} {lost}{_of_naive(arms, name, full)}")
    yield f"{name} against {BASELINE}: {', '.join(parts)} (n={arm.ttft_vs_full.pairs})"


def subject_of(reusing: Sequence[str]) -> str | None:
    """The arm that a line about reuse is about: MEPIC's, or else the last; None of none."""
    preferred = [name for name in reusing if name.partition(":")[0] == _PREFERRED]
    return next(iter(preferred or reversed(reusing)), None)


def _of_naive(arms: Mapping[str, ArmSummary], subject: str, full: ArmSummary) -> str:
    """What reuse without recomputation loses, beside what the subject loses."""
    lost = _difference(arms[_UNREPAIRED], full) if _UNREPAIRED in arms else None
    return f" ({_UNREPAIRED} {lost})" if lost is not None and subject != _UNREPAIRED else ""


def _difference(arm: ArmSummary, full: ArmSummary) -> str | None:
    """The difference of mean scores, signed; None where means are of different requests."""
    if arm.score.mean is None or full.score.mean is None or not arm.score.meaningful:
        return None
    if arm.failed or full.failed:
        return None
    return f"{round(arm.score.mean - full.score.mean, 2) + 0.0:+.2f}"
