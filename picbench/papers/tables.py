"""A paper's tables: its printed values beside ours."""

from collections.abc import Callable, Iterator, Sequence

from picbench.papers.measured import Measured, Spread, arms_of, by_label
from picbench.papers.published import Published
from picbench.papers.sheet import Cell, Sheet


def workload_table(runs: Sequence[Measured], published: Published) -> Sheet:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    return Sheet(
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


def _workload_row(label: str, runs: Sequence[Measured], published: Published) -> list[Cell]:
    paper = published.workload(label)
    return [
        label,
        runs[0].facts.requests,
        paper.get("tokens"),
        Spread.of(run.facts.mean_tokens for run in runs).text(0),
        paper.get("reuse_pct"),
        Spread.of(100 * run.facts.reuse for run in runs).text(1),
        paper.get("recomputed"),
        Spread.of(run.facts.fresh_tokens for run in runs).text(0),
    ]


def result_table(runs: Sequence[Measured], published: Published) -> Sheet:
    """MEPIC's Table 2: latency, peak occupancy, score."""
    return Sheet(
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


def _result_row(label: str, runs: Sequence[Measured], arm: str, published: Published) -> list[Cell]:
    def printed(metric: str) -> str:
        found = published.result(label, metric, arm)
        return "-" if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"

    return [
        label,
        arm,
        printed("latency_s"),
        Spread.of(run.arms[arm]["makespan_s"] for run in runs).text(),
        printed("peak_pct"),
        Spread.of(run.share(arm, "peak_referenced") for run in runs).text(),
        Spread.of(run.share(arm, "peak_resident") for run in runs).text(),
        printed("score"),
        _score(runs, arm).text(),
    ]


def load_table(runs: Sequence[Measured], name: str, title: str, varies: str) -> Sheet:
    """What every arm did at every point of an experiment."""
    columns: dict[str, Callable[[Measured, str], float | None]] = {
        "makespan s": lambda run, arm: run.arms[arm]["makespan_s"],
        "TTFT p50 s": lambda run, arm: run.arms[arm]["ttft_ms"]["p50"] / 1e3,
        "TTFT p95 s": lambda run, arm: run.arms[arm]["ttft_ms"]["p95"] / 1e3,
        "tokens/s": lambda run, arm: run.arms[arm]["throughput_tok_s"],
        "peak referenced %": lambda run, arm: run.share(arm, "peak_referenced"),
        "mean referenced %": lambda run, arm: run.share(arm, "mean_referenced"),
        "peak resident %": lambda run, arm: run.share(arm, "peak_resident"),
    }
    rows: list[list[Cell]] = [
        [
            label,
            arm,
            *(Spread.of(value(r, arm) for r in group).text() for value in columns.values()),
        ]
        for label, group in by_label(runs).items()
        for arm in arms_of(group)
    ]
    return Sheet(
        name,
        title,
        (varies, "arm", *columns),
        rows,
        ("Mean ± standard deviation over seeds; occupancy in percent of the pool.",),
    )


def text_table(name: str, figure: str, published: Published) -> Sheet:
    """What the paper's text says of a figure, for comparison."""
    return Sheet(
        name,
        "What the paper's text says of this figure",
        ("quantity", "paper"),
        [[quantity, value] for quantity, value in published.text(figure).items()],
        (f"Paper: {published.label}.",),
    )


def ratio_table(
    runs: Sequence[Measured], name: str, varies: str, subject: str, reference: str
) -> Sheet:
    """How many times fewer blocks one arm references at its peak than another."""
    return Sheet(
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


def _ratio_rows(runs: Sequence[Measured], subject: str, reference: str) -> Iterator[list[Cell]]:
    for label, group in by_label(runs).items():
        ratios = Spread.of(run.peak(reference) / run.peak(subject) for run in group)
        yield [
            label,
            Spread.of(run.peak(subject) for run in group).text(0),
            Spread.of(run.peak(reference) for run in group).text(0),
            ratios.text(),
            min(ratios.values),
            max(ratios.values),
            len(group),
        ]


def _score(runs: Sequence[Measured], arm: str) -> Spread:
    scores = [run.arms[arm]["score"] for run in runs]
    return Spread.of(score["mean"] for score in scores if score["meaningful"])
