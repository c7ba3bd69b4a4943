"""The table of runs as Markdown, LaTeX and CSV."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pandas as pd

from picbench.output import markdown
from picbench.output.run_reader import Run
from picbench.output.tables.arm_columns import NOTHING, ArmColumn, arm_columns
from picbench.output.tables.frames import arms_frame, of_runs, shown_frame
from picbench.output.tables.stall_lines import stalled


def as_markdown(runs: Sequence[Run]) -> str:
    """The columns of the printed table, and what holds for them, in Markdown."""
    frame, columns = _shown(runs)
    texts = frame.astype(object).where(frame.notna(), None)
    for column in columns:
        texts[column.title] = [plain(value, column.digits) for value in texts[column.title]]
    lines = [list(map(str, line)) for line in texts.to_numpy()]
    head = list(map(str, frame.columns))
    table = markdown.table(head, lines, right=len(head) - len(columns))
    return "\n\n".join([*_captions(runs), table, *warnings_of(runs)]) + "\n"


def as_latex(runs: Sequence[Run]) -> str:
    """The columns of the printed table as a LaTeX ``tabular``, with rules of booktabs.

    What holds for it stands before it in comments.
    """
    frame, columns = _shown(runs)
    formatters = {
        column.title: lambda value, digits=column.digits: plain(value, digits) for column in columns
    }
    table = str(frame.to_latex(index=False, na_rep=NOTHING, escape=True, formatters=formatters))
    return "".join(f"% {line}\n" for line in (*_captions(runs), *warnings_of(runs))) + table


def as_csv(runs: Sequence[Run]) -> str:
    """All numbers of the runs' summaries, an arm a line; empty where nothing was measured."""
    frame = arms_frame(runs[0]) if len(runs) == 1 else of_runs(runs, arms_frame)
    return str(frame.to_csv(index=False))


#: What makes a text of runs, by the name of the format.
TABLE_FORMATS: Mapping[str, Callable[[Sequence[Run]], str]] = MappingProxyType(
    {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
)


def _shown(runs: Sequence[Run]) -> tuple[pd.DataFrame, list[ArmColumn]]:
    arms = [arm for run in runs for arm in run.summary.values()]
    metrics = list(dict.fromkeys(arm.score.metric for arm in arms))
    columns = arm_columns(arms, "/".join(metrics))
    if len(runs) == 1:
        return shown_frame(runs[0].summary, columns), columns
    return of_runs(runs, lambda run: shown_frame(run.summary, columns)), columns


def plain(value: float | None, digits: int) -> str:
    """A number for programs, a dash for what was not measured."""
    return NOTHING if value is None or pd.isna(value) else f"{value:.{digits}f}"


def _captions(runs: Sequence[Run]) -> list[str]:
    return [caption(run) for run in runs]


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
