"""A paper's tables: its printed values beside ours."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from picbench.errors import InvalidRun
from picbench.output.run_reader import HELD
from picbench.papers.measured_runs import MeasuredRun, SeedSpread, arms_of, by_label
from picbench.papers.published import Published
from picbench.papers.report_table import Cell, MeanCell, ReportTable


def workload_table(runs: Sequence[MeasuredRun], published: Published) -> ReportTable:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    return ReportTable(
        "table1",
        "Table 1: the workloads",
        (
            "workload",
            "requests",
            "tokens (paper)",
            "tokens (ours)",
            "reuse % (paper)",
            "reuse % (ours)",
            "not reused (paper)",
            "not reused (ours)",
        ),
        [_workload_row(label, group, published) for label, group in by_label(runs).items()],
        (
            f"Paper: 300 requests; {published.label}.",
            "Ours: means over seeds. Reuse is the share of chunk tokens that lie in a chunk "
            "which came before; not reused are the tokens of new chunks and of all other text.",
        ),
    )


def _workload_row(label: str, runs: Sequence[MeasuredRun], published: Published) -> list[Cell]:
    paper = published.workload(label)
    return [
        label,
        runs[0].facts.requests,
        paper.get("tokens"),
        SeedSpread.of(run.facts.mean_tokens for run in runs).cell(0),
        paper.get("reuse_pct"),
        SeedSpread.of(100 * run.facts.reuse for run in runs).cell(1),
        paper.get("recomputed"),
        SeedSpread.of(run.facts.fresh_tokens for run in runs).cell(0),
    ]


def result_table(runs: Sequence[MeasuredRun], published: Published) -> ReportTable:
    """MEPIC's Table 2: latency, peak occupancy, score."""
    return ReportTable(
        "table2",
        "Table 2: total latency, peak KV occupancy, score",
        (
            "workload",
            "arm",
            "latency s (paper)",
            "makespan s (ours)",
            "peak % (paper)",
            "peak referenced % (ours)",
            "peak resident % (ours)",
            "score (paper)",
            "score (ours)",
        ),
        [
            _result_row(label, group, arm, published)
            for label, group in by_label(runs).items()
            for arm in arms_of(group)
        ],
        (
            f"Paper: {published.label}. Its table has no arm prefix or full.",
            "Ours: mean ± standard deviation over seeds; peaks in percent of the pool. Referenced "
            "blocks are held by running requests, resident ones also hold idle KV.",
        ),
    )


def _result_row(
    label: str, runs: Sequence[MeasuredRun], arm: str, published: Published
) -> list[Cell]:
    def printed(metric: str) -> MeanCell | None:
        found = published.result(label, metric, arm)
        return None if found is None else MeanCell(*found)

    return [
        label,
        arm,
        printed("latency_s"),
        SeedSpread.of(run.arm(arm).makespan_s for run in runs).cell(),
        printed("peak_pct"),
        SeedSpread.of(run.share(arm, "peak_referenced") for run in runs).cell(),
        SeedSpread.of(run.share(arm, "peak_resident") for run in runs).cell(),
        printed("score"),
        _score(runs, arm).cell(),
    ]


def load_table(runs: Sequence[MeasuredRun], name: str, title: str, varies: str) -> ReportTable:
    """What every arm did at every point of an experiment."""
    columns: dict[str, Callable[[MeasuredRun, str], float | None]] = {
        "makespan s": lambda run, arm: run.arm(arm).makespan_s,
        "TTFT p50 s": lambda run, arm: run.arm(arm).ttft_s("p50"),
        "TTFT p95 s": lambda run, arm: run.arm(arm).ttft_s("p95"),
        "tokens/s": lambda run, arm: run.arm(arm).throughput_tok_s,
        "peak referenced %": lambda run, arm: run.share(arm, "peak_referenced"),
        "mean referenced %": lambda run, arm: run.share(arm, "mean_referenced"),
        "peak resident %": lambda run, arm: run.share(arm, "peak_resident"),
    }
    rows: list[list[Cell]] = [
        [
            label,
            arm,
            *(SeedSpread.of(value(r, arm) for r in group).cell() for value in columns.values()),
        ]
        for label, group in by_label(runs).items()
        for arm in arms_of(group)
    ]
    return ReportTable(
        name,
        title,
        (varies, "arm", *columns),
        rows,
        ("Mean ± standard deviation over seeds; occupancy in percent of the pool.",),
    )


def text_table(name: str, figure: str, published: Published) -> ReportTable:
    """What the paper's text says of a figure, for comparison."""
    return ReportTable(
        name,
        "What the paper's text says of this figure",
        ("quantity", "paper"),
        [[quantity, value] for quantity, value in published.text(figure).items()],
        (f"Paper: {published.label}.",),
    )


def ratio_table(
    runs: Sequence[MeasuredRun], name: str, varies: str, subject: str, reference: str
) -> ReportTable:
    """How many times fewer blocks one arm references at its peak than another."""
    return ReportTable(
        name,
        f"Peak referenced KV: {reference} over {subject}",
        (
            varies,
            f"{subject}, blocks",
            f"{reference}, blocks",
            "ratio",
            "lowest",
            "highest",
            "seeds",
        ),
        list(_ratio_rows(runs, subject, reference)),
        ("Peaks of the same run, on the same pool and requests; mean ± standard deviation.",),
    )


def _ratio_rows(runs: Sequence[MeasuredRun], subject: str, reference: str) -> Iterator[list[Cell]]:
    for label, group in by_label(runs).items():
        ratios = SeedSpread.of(run.peak(reference) / run.peak(subject) for run in group)
        yield [
            label,
            SeedSpread.of(run.peak(subject) for run in group).cell(0),
            SeedSpread.of(run.peak(reference) for run in group).cell(0),
            ratios.cell(),
            min(ratios.values),
            max(ratios.values),
            len(group),
        ]


def difference_table(
    runs: Sequence[MeasuredRun], name: str, varies: str, subject: str, reference: str
) -> ReportTable:
    """Blocks by kind at the moment of each arm's peak, and the difference of every kind.

    Raises InvalidRun unless the kinds sum to the peaks exactly.
    """
    return ReportTable(
        name,
        f"Blocks by kind at the peak: {reference} less {subject}",
        (varies, "seed", "arm", *HELD, "sum"),
        [row for run in runs for row in _difference_rows(run, subject, reference)],
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


def _difference_rows(run: MeasuredRun, subject: str, reference: str) -> Iterator[list[Cell]]:
    peaks = {arm: run.data.ledger[arm].at_peak() for arm in (reference, subject)}
    for arm, blocks in peaks.items():
        if sum(blocks.values()) != run.peak(arm):
            raise InvalidRun(
                f"arm {arm}: the ledger's kinds sum to {sum(blocks.values())} blocks, its peak is "
                f"{run.peak(arm)}",
                hint="report this with the run directory",
            )
        yield _difference_row(run, arm, blocks)
    yield _difference_row(run, "difference", difference(peaks[subject], peaks[reference]))


def _difference_row(run: MeasuredRun, arm: str, blocks: Mapping[str, float]) -> list[Cell]:
    total = sum(blocks.values())
    return [run.point.label, run.point.seed, arm, *(blocks[kind] for kind in HELD), total]


def _score(runs: Sequence[MeasuredRun], arm: str) -> SeedSpread:
    scores = [run.arm(arm).score for run in runs]
    return SeedSpread.of(score.mean for score in scores if score.meaningful)
