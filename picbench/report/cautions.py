"""What to know before believing the numbers of a run."""

from collections.abc import Iterator

from picbench.output.result_table import late_kernels, slow_tiers
from picbench.output.tables.stall_lines import stalled
from picbench.report.run_contents import ArmFacts, RunContents
from picbench.statistics.quantiles import values_needed

#: Fewer requests than this have wide intervals.
_FEW = 30


def cautions(contents: RunContents) -> list[str]:
    """Warnings, the gravest first; none for a run with nothing against it."""
    return [
        *_status(contents),
        *_workload(contents),
        *_arms(contents),
        *contents.notes,
        *_sizes(contents),
        *_provenance(contents),
    ]


def _status(contents: RunContents) -> Iterator[str]:
    status, reason = contents.manifest["status"], contents.manifest["reason"]
    because = f": {reason}" if reason else ""
    if status == "invalid":
        yield f"The run is invalid{because}. Its numbers mean nothing."
    elif status == "partial":
        yield f"Requests failed{because}; means are over those that were answered."
    elif status != "complete":
        yield f"The run is {status}{because}; this is what it has so far."
    for name in contents.missing:
        yield f"The run has no {name}; what is read from it is left out."


def _workload(contents: RunContents) -> Iterator[str]:
    model, workload = contents.manifest["model"], contents.manifest["workload"]
    if not contents.meaningful:
        yield f"The model has {model['weights']} weights: scores and replies mean nothing."
    if workload["synthetic"]:
        yield "The rows are synthetic, not the data set's own."
    if contents.manifest["config"].get("drop"):
        yield "Prompts lack passages on purpose: full does not know them either."
    if workload["skipped_rows"]:
        first = workload["first_skipped"]
        yield f"{workload['skipped_rows']} malformed rows were left out, the first: {first}."
    if workload["truncated"]:
        yield f"{workload['truncated']} prompts were cut to fit the context."


def _arms(contents: RunContents) -> Iterator[str]:
    for arm in contents.arms.values():
        yield from _rows(arm)
    summaries = {name: arm.summary for name, arm in contents.arms.items()}
    for name, summary in summaries.items():
        if summary.provenance == "simulated":
            yield f"{name} is simulated: no engine computed anything, its numbers are a model's."
    for line in (*stalled(summaries), *slow_tiers(summaries), *late_kernels(summaries)):
        yield line.replace("`", "")
    for name, document in contents.manifest["arms"].items():
        for note in document["engine"].get("notes", ()):
            yield f"{name}: {note}"


def _rows(arm: ArmFacts) -> Iterator[str]:
    failed = [row.error for row in arm.rows if row.error is not None]
    if failed:
        count = f"{len(failed)} of {len(arm.rows)} requests"
        yield f"{arm.name}: {count} failed, the first: {failed[0]}"
    untimed = sum(row.error is None and not row.timed for row in arm.rows)
    if untimed:
        yield f"{arm.name}: {untimed} requests were answered but not timed."
    unparsed = arm.summary.outcomes.get("unparsed", 0)
    if unparsed:
        yield f"{arm.name}: nothing to score in {unparsed} replies, which count as 0."


def _sizes(contents: RunContents) -> Iterator[str]:
    counts = [len(arm.ttft) for arm in contents.arms.values()]
    fewest = min(counts, default=0)
    if not counts:
        yield "No request was answered."
        return
    if fewest < _FEW:
        yield f"Only {fewest} timed requests an arm: intervals are wide."
    needed = values_needed(0.99)
    if fewest < needed:
        yield f"p99 is not given: it needs {needed} timed requests, an arm has {fewest}."


def _provenance(contents: RunContents) -> Iterator[str]:
    if (contents.manifest["provenance"].get("git") or {}).get("dirty"):
        yield "The code had changes that are in no commit."
    attempts = contents.manifest["attempts"]
    if len(attempts) > 1:
        changed = sum(attempt["changed_outputs"] for attempt in attempts)
        again = f"; {changed} replies were other ones when served again" if changed else ""
        yield f"The run was continued {len(attempts) - 1} times{again}."
