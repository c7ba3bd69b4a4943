"""Where the difference between two arms' peaks lies, block by block."""

from collections.abc import Iterator, Mapping, Sequence

from picbench.errors import InvalidRun
from picbench.output.ledger_series import HELD
from picbench.papers.measured import Measured
from picbench.papers.sheet import Cell, Sheet


def difference_table(
    runs: Sequence[Measured], name: str, varies: str, subject: str, reference: str
) -> Sheet:
    """Blocks by kind at the moment of each arm's peak, and the difference of every kind.

    Raises InvalidRun unless the kinds sum to the peaks exactly.
    """
    return Sheet(
        name,
        f"Blocks by kind at the peak: {reference} less {subject}",
        (varies, "seed", "arm", *HELD, "sum"),
        [row for run in runs for row in _rows(run, subject, reference)],
        (
            "Blocks of 16 tokens that running requests hold. chunk: shared KV of chunks; linked: "
            "recomputed tokens of chunks; private: a request's own copies; decode: replies.",
        ),
    )


def difference(subject: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Blocks that `reference` holds and `subject` does not, by kind; their sum is exact.

    Counts are multiples of 1/16, which floats hold exactly.
    """
    return {kind: reference[kind] - subject[kind] for kind in HELD}


def _rows(run: Measured, subject: str, reference: str) -> Iterator[list[Cell]]:
    peaks = {arm: run.series[arm].at_peak() for arm in (reference, subject)}
    for arm, blocks in peaks.items():
        if sum(blocks.values()) != run.peak(arm):
            raise InvalidRun(
                f"arm {arm}: the ledger's kinds sum to {sum(blocks.values())} blocks, its peak is "
                f"{run.peak(arm)}",
                hint="report this with the run directory",
            )
        yield _row(run, arm, blocks)
    yield _row(run, "difference", difference(peaks[subject], peaks[reference]))


def _row(run: Measured, arm: str, blocks: Mapping[str, float]) -> list[Cell]:
    total = sum(blocks.values())
    return [run.point.label, run.point.seed, arm, *(blocks[kind] for kind in HELD), total]
