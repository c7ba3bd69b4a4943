"""A paper's tables: its printed values beside ours."""

from collections.abc import Iterator, Mapping, Sequence

from picbench.output.run_reader import HELD
from picbench.papers.experiments.experiment_data import (
    ExperimentData,
    PointData,
    SeedSpread,
    by_label,
    quartiles,
)
from picbench.papers.published import Published
from picbench.papers.report_table import Cell, MeanCell, ReportTable

#: Columns of tables by metric: title and digits. Metrics that no arm has are left out.
_COLUMNS: Mapping[str, tuple[str, int]] = {
    "makespan_s": ("makespan s", 2),
    "ttft_p50_s": ("TTFT p50 s", 2),
    "ttft_p95_s": ("TTFT p95 s", 2),
    "tokens_s": ("tokens/s", 0),
    "requests_s": ("requests/s", 2),
    "peak_pct": ("peak referenced %", 1),
    "mean_pct": ("mean referenced %", 1),
    "resident_pct": ("peak resident %", 1),
    "peak_mib": ("peak and workspace MiB", 1),
    "score": ("score", 3),
    "share": ("attention over an even share", 2),
    "first_share": ("first token, over an even share", 2),
    "sinks_share": ("first four tokens", 2),
    "projected": ("tokens with new KV", 0),
    "finished": ("tokens through the layer", 0),
    "gigaoperations": ("operations, 10^9", 2),
    "top_head_share": ("first four, head with most", 2),
}


#: Prompts are called as long as the paper's where mean lengths are within this factor, and as
#: reusable where reuse is within this many points.
_AS_LONG, _AS_REUSABLE = 1.15, 3.0


def experiment_table(data: ExperimentData) -> ReportTable:
    """What every arm did at every point of an experiment."""
    if data.single_requests:
        return _latency_table(data)
    shown = {
        metric: column
        for metric, column in _COLUMNS.items()
        if any(data.values(label, arm, metric) for label in data.labels for arm in data.arms)
    }
    rows: list[list[Cell]] = [
        [
            label,
            arm,
            *(
                data.spread(label, arm, metric).cell(digits)
                for metric, (_, digits) in shown.items()
            ),
        ]
        for label in data.labels
        for arm in data.arms
        if any(data.values(label, arm, metric) for metric in shown)
    ]
    return ReportTable(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        (data.varies, "arm", *(title for title, _ in shown.values())),
        rows,
        (f"Mean ± standard deviation over {data.repeated} {data.repeats}. {data.caption}",),
    )


def _latency_table(data: ExperimentData) -> ReportTable:
    def row(label: str, arm: str) -> list[Cell]:
        low, middle, high = quartiles(data.values(label, arm, "ttft_ms").values())
        counts = [data.spread(label, arm, name).mean for name in ("linked", "compiled")]
        times = [MeanCell(time, None, 1) for time in (middle, low, high)]
        return [label, arm, *times, *(None if n is None else int(n) for n in counts)]

    quartile = ("TTFT ms, median", "lower quartile", "upper quartile")
    return ReportTable(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        (data.varies, "arm", *quartile, "linked tokens", "compiled tokens"),
        [
            row(label, arm)
            for label in data.labels
            for arm in data.arms
            if data.values(label, arm, "ttft_ms")
        ],
        (data.caption,),
    )


def workload_table(data: ExperimentData, published: Published) -> ReportTable:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    groups = by_label(data)
    return ReportTable(
        f"table1-{data.device}",
        f"The workloads on {data.device}",
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
        [_workload_row(label, group, published) for label, group in groups.items()],
        (
            f"Paper: 300 requests; {published.label}. Ours are look-alikes under the paper's "
            f"names: synthetic rows {_likeness(groups, published)}.",
            "Ours: means over seeds. Reuse is the share of chunk tokens that lie in a chunk "
            "which came before; not reused are the tokens of new chunks and of all other text.",
        ),
    )


def _likeness(groups: Mapping[str, Sequence[PointData]], published: Published) -> str:
    """How near prompts are to the paper's, or by how much not."""
    lengths, distances = [], []
    for label, points in groups.items():
        facts, paper = points[0].facts, published.workload(label)
        if (tokens := facts["mean_tokens"]) and "tokens" in paper:
            lengths.append(tokens / paper["tokens"])
        if (reuse := facts["reuse"]) is not None and "reuse_pct" in paper:
            distances.append(abs(100 * reuse - paper["reuse_pct"]))
    farthest = max(distances, default=0.0)
    alike = farthest <= _AS_REUSABLE
    apart = f"with reuse up to {farthest:.0f} points from its"
    if not lengths or max(max(lengths), 1 / min(lengths)) <= _AS_LONG:
        return f"of about the same length {'and reuse' if alike else f'but {apart}'}"
    factors = dict.fromkeys(f"{length:.1f}" for length in (min(lengths), max(lengths)))
    longer = f"of {' to '.join(factors)} times its length"
    return f"of about the same reuse, but {longer}" if alike else f"{longer} and {apart}"


def _workload_row(label: str, points: Sequence[PointData], published: Published) -> list[Cell]:
    paper = published.workload(label)

    def facts(name: str, scale: float = 1.0) -> SeedSpread:
        values = [point.facts[name] for point in points]
        return SeedSpread.of(None if value is None else scale * value for value in values)

    requests = points[0].facts["requests"]
    return [
        f"{label}-like",
        None if requests is None else int(requests),
        paper.get("tokens"),
        facts("mean_tokens").cell(0),
        paper.get("reuse_pct"),
        facts("reuse", 100).cell(1),
        paper.get("recomputed"),
        facts("fresh_tokens").cell(0),
    ]


def result_table(data: ExperimentData, published: Published) -> ReportTable:
    """MEPIC's Table 2: latency, peak occupancy, score."""
    return ReportTable(
        f"table2-{data.device}",
        f"Total latency, peak KV occupancy and score on {data.device}",
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
        [_result_row(data, label, arm, published) for label in data.labels for arm in data.arms],
        (
            f"Paper: {published.label}. Its table has no arm prefix or full.",
            "Ours: mean ± standard deviation over seeds; peaks in percent of the pool. Referenced "
            f"blocks are held by running requests, resident ones also hold idle KV. {data.caption}",
        ),
    )


def _result_row(data: ExperimentData, label: str, arm: str, published: Published) -> list[Cell]:
    def printed(metric: str) -> MeanCell | None:
        found = published.result(label, metric, arm)
        return None if found is None else MeanCell(*found)

    return [
        f"{label}-like",
        arm,
        printed("latency_s"),
        data.spread(label, arm, "makespan_s").cell(),
        printed("peak_pct"),
        data.spread(label, arm, "peak_pct").cell(),
        data.spread(label, arm, "resident_pct").cell(),
        printed("score"),
        data.spread(label, arm, "score").cell(),
    ]


def text_table(name: str, figure: str, published: Published) -> ReportTable:
    """What the paper's text says of a figure, for comparison."""
    return ReportTable(
        name,
        "What the paper's text says of this figure",
        ("quantity", "paper"),
        [[quantity, value] for quantity, value in published.text(figure).items()],
        (f"Paper: {published.label}.",),
    )


def difference_table(data: ExperimentData) -> ReportTable:
    """Blocks by kind at the moment of each arm's peak."""
    return ReportTable(
        f"{data.name}-kinds",
        f"{data.experiment} on {data.device}: blocks by kind at the peak",
        (data.varies, "seed", "arm", *HELD, "sum"),
        list(_kind_rows(data)),
        (
            "Blocks of 16 tokens that running requests hold. chunk: shared KV of chunks; linked: "
            "recomputed tokens of chunks; private: a request's own copies; decode: replies.",
        ),
    )


def _kind_rows(data: ExperimentData) -> Iterator[list[Cell]]:
    for point in data.points:
        for arm, found in point.arms.items():
            if found.at_peak:
                kinds = [found.at_peak[kind] for kind in HELD]
                yield [point.label, point.seed, arm, *kinds, sum(kinds)]
