"""Caches as they were: what a stopped run has measured is served again, unmeasured."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from picbench.arms.arm_server import ArmServer
from picbench.errors import InvalidRun
from picbench.output.sample_row import SampleRow
from picbench.output.store.batch_log import StoredBatch
from picbench.run.protocol import ArmBatch, Rewrite, to_requests
from picbench.workloads.sample import Sample

#: Rows of a batch, in the order of its samples.
ToRows = Callable[[ArmBatch], Sequence[SampleRow]]


@dataclass(frozen=True, slots=True)
class Refill:
    """Requests that were served again, and how many of these got another reply this time."""

    requests: int = 0
    changed_outputs: int = 0


def refill(
    servers: Mapping[str, ArmServer],
    stored: Sequence[StoredBatch],
    planned: Sequence[tuple[int, str, Sequence[Sample]]],
    *,
    concurrency: int,
    arms: Collection[str],
    rewrite: Rewrite,
    to_rows: ToRows,
) -> Refill:
    """Serve the stored batches of `arms` again, in the same order and groups.

    `planned` is the schedule, which the stored batches are the beginning of. What engines reuse
    depends on all that they served before, so that nothing less makes the requests that follow hit
    as in a run that was not stopped. Raises InvalidRun where a request now reuses other tokens than
    when it was measured: its engine is not in the state in which the run was stopped.
    """
    requests = changed = 0
    for batch, (number, arm, given) in _paired(stored, planned):
        group = rewrite(arm, given)  # Also where nothing is sent: what comes later depends on it.
        if arm not in arms or batch.line.lost is not None:
            continue
        result = servers[arm].run(to_requests(group), concurrency)
        rows = to_rows(ArmBatch(number, arm, group, result))
        for before, now in zip(batch.rows, rows, strict=True):
            _check_counters(before, now)
            changed += _output(before) != _output(now)
        requests += len(rows)
    return Refill(requests, changed)


def _paired(
    stored: Sequence[StoredBatch], planned: Sequence[tuple[int, str, Sequence[Sample]]]
) -> Iterator[tuple[StoredBatch, tuple[int, str, Sequence[Sample]]]]:
    for batch, plan in zip(stored, planned, strict=False):
        number, arm, group = plan
        names = [row.sample for row in batch.rows]
        if (batch.line.round, batch.line.arm, names) != (number, arm, [s.id for s in group]):
            raise InvalidRun(
                f"round {batch.line.round} of arm {batch.line.arm} is stored where round {number} "
                f"of arm {arm} belongs",
                hint="name a new `output` to measure again",
            )
        yield batch, plan


def _check_counters(before: SampleRow, now: SampleRow) -> None:
    if _counters(before) != _counters(now):
        raise InvalidRun(
            f"arm {now.arm}, sample {now.sample}: served again, it reused {now.tokens.reused} "
            f"tokens and not {before.tokens.reused} as when it was measured, or other blocks",
            hint="name a new `output` to measure again; tiers that outlive the engine must be "
            "empty",
        )


def _counters(row: SampleRow) -> tuple[object, ...]:
    return (row.error is None, row.tokens, row.hits)


def _output(row: SampleRow) -> tuple[object, ...]:
    return (row.output_sha256, row.finish_reason)
