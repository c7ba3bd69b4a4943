"""A paper's tables: its printed values beside ours."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.files import write_whole
from picbench.papers.data import (
    ExperimentData,
    PointData,
    SeedSpread,
    by_label,
    mean_value,
    quartiles,
    report_table,
)
from picbench.papers.drawings import draw
from picbench.papers.judge import ClaimVerdict, Evidence, judge_all, number, write_verdicts
from picbench.papers.reproduce import DATA, SCORES
from picbench.papers.settings import Figure, Published, Settings, read_published
from picbench.store.reader import HELD
from picbench.tables.table import Shown, Table, Value
from picbench.tables.table import table as markdown_table

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


def experiment_table(data: ExperimentData) -> Table:
    """What every arm did at every point of an experiment."""
    if data.single_requests:
        return _latency_table(data)
    shown = {
        metric: column
        for metric, column in _COLUMNS.items()
        if any(data.values(label, arm, metric) for label in data.labels for arm in data.arms)
    }
    rows: list[list[Value]] = [
        [
            label,
            arm,
            *(
                data.spread(label, arm, metric).value(digits)
                for metric, (_, digits) in shown.items()
            ),
        ]
        for label in data.labels
        for arm in data.arms
        if any(data.values(label, arm, metric) for metric in shown)
    ]
    return report_table(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        (data.varies, "arm", *(title for title, _ in shown.values())),
        rows,
        (f"Mean ± standard deviation over {data.repeated} {data.repeats}. {data.caption}",),
    )


def _latency_table(data: ExperimentData) -> Table:
    def row(label: str, arm: str) -> list[Value]:
        low, middle, high = quartiles(data.values(label, arm, "ttft_ms").values())
        counts = [data.spread(label, arm, name).mean for name in ("linked", "compiled")]
        times = [mean_value(time, None, 1) for time in (middle, low, high)]
        return [label, arm, *times, *(None if n is None else int(n) for n in counts)]

    quartile = ("TTFT ms, median", "lower quartile", "upper quartile")
    return report_table(
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


def workload_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    groups = by_label(data)
    return report_table(
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


def _workload_row(label: str, points: Sequence[PointData], published: Published) -> list[Value]:
    paper = published.workload(label)

    def facts(name: str, scale: float = 1.0) -> SeedSpread:
        values = [point.facts[name] for point in points]
        return SeedSpread.of(None if value is None else scale * value for value in values)

    requests = points[0].facts["requests"]
    return [
        f"{label}-like",
        None if requests is None else int(requests),
        paper.get("tokens"),
        facts("mean_tokens").value(0),
        paper.get("reuse_pct"),
        facts("reuse", 100).value(1),
        paper.get("recomputed"),
        facts("fresh_tokens").value(0),
    ]


def result_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 2: latency, peak occupancy, score."""
    return report_table(
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


def _result_row(data: ExperimentData, label: str, arm: str, published: Published) -> list[Value]:
    def printed(metric: str) -> Shown | None:
        found = published.result(label, metric, arm)
        return None if found is None else mean_value(*found)

    return [
        f"{label}-like",
        arm,
        printed("latency_s"),
        data.spread(label, arm, "makespan_s").value(),
        printed("peak_pct"),
        data.spread(label, arm, "peak_pct").value(),
        data.spread(label, arm, "resident_pct").value(),
        printed("score"),
        data.spread(label, arm, "score").value(),
    ]


def text_table(name: str, figure: str, published: Published) -> Table:
    """What the paper's text says of a figure, for comparison."""
    return report_table(
        name,
        "What the paper's text says of this figure",
        ("quantity", "paper"),
        [[quantity, value] for quantity, value in published.text(figure).items()],
        (f"Paper: {published.label}.",),
    )


def difference_table(data: ExperimentData) -> Table:
    """Blocks by kind at the moment of each arm's peak."""
    return report_table(
        f"{data.name}-kinds",
        f"{data.experiment} on {data.device}: blocks by kind at the peak",
        (data.varies, "seed", "arm", *HELD, "sum"),
        list(_kind_rows(data)),
        (
            "Blocks of 16 tokens that running requests hold. chunk: shared KV of chunks; linked: "
            "recomputed tokens of chunks; private: a request's own copies; decode: replies.",
        ),
    )


def _kind_rows(data: ExperimentData) -> Iterator[list[Value]]:
    for point in data.points:
        for arm, found in point.arms.items():
            if found.at_peak:
                kinds = [found.at_peak[kind] for kind in HELD]
                yield [point.label, point.seed, arm, *kinds, sum(kinds)]


PAGE, KINDS = "README.md", "kinds.md"

_TERMS = (
    "A claim holds where all of its interval is within the bound that the claim names, fails where "
    "all of it is outside, and is undecided otherwise; a claim about several places is as good as "
    "its worst one, which is shown. Intervals of a claim cover with 95 % together (Bonferroni): "
    "scores are paired by row and resampled, times and blocks are paired by seed or repeat "
    "(Student's t). Where both arms fill the pool, their peaks are the pool's, and undecided. The "
    "papers' claims are about other models, data and machines."
)


@dataclass(frozen=True, slots=True)
class PaperPage:
    """What there is of a paper, and where its page goes."""

    name: str
    settings: Settings
    evidence: Evidence
    output: Path

    def write(self) -> list[ClaimVerdict]:
        """Write both pages, ``verdicts.json``, tables and figures; the verdicts."""
        self.output.mkdir(parents=True, exist_ok=True)
        published = read_published(self.settings.published)
        verdicts = judge_all(self.settings.claims, self.evidence)
        write_verdicts(verdicts, self.output)
        places_table(verdicts).write(self.output)
        lines = [
            f"# {self.settings.paper}: redrawn and judged",
            "",
            f"Printed values: {published.paper}; {published.label}. {published.content['note']}",
            "",
            *claims_section(verdicts),
        ]
        for name, figure in self.settings.figures.items():
            lines += self._figure(name, figure, published)
        lines += self._commands()
        write_whole(self.output / PAGE, "\n".join(lines).encode())
        self._write_kinds()
        return verdicts

    def _figure(self, name: str, figure: Figure, published: Published) -> Iterator[str]:
        yield f"## {figure.title}"
        yield ""
        made = False
        for drawing in figure.drawings:
            found = draw(drawing, figure.experiment, self.evidence, published, self.output)
            for file in found:
                yield f"![{figure.title}: {drawing.label}]({file}.svg)"
                made = True
        if made:
            yield ""
        if published.text(name):
            yield text_table(f"{name}-paper", name, published).section()
        tables = list(self._tables(name, figure, published))
        for table in tables:
            table.write(self.output)
            yield table.section()
        if any(self._kinds(figure.experiment)):
            yield f"Blocks by kind at each peak are in [{KINDS}]({KINDS})."
            yield ""
        if not made and not tables:
            yield f"Not measured yet: `picbench reproduce {self.name} --figure {name}`."
            yield ""

    def _write_kinds(self) -> None:
        """Write the blocks by kind at the peaks of all experiments that have any."""
        experiments = dict.fromkeys(one.experiment for one in self.settings.figures.values())
        tables = [table for name in experiments for table in self._kinds(name)]
        if not tables:
            return
        for table in tables:
            table.write(self.output)
        lines = [f"# {self.settings.paper}: blocks by kind at each peak", ""]
        lines += [table.section() for table in tables]
        write_whole(self.output / KINDS, "\n".join(lines).encode())

    def _kinds(self, experiment: str) -> Iterator[Table]:
        tables = map(difference_table, self.evidence.experiment(experiment))
        return (table for table in tables if table.rows)

    def _tables(self, name: str, figure: Figure, published: Published) -> Iterator[Table]:
        for data in self.evidence.experiment(figure.experiment):
            if name == "table1":
                yield workload_table(data, published)
            elif name == "table2":
                yield result_table(data, published)
            elif name != "fig6" or self.name != "mepic":
                yield experiment_table(data)

    def _commands(self) -> Iterator[str]:
        yield "## Again"
        yield ""
        yield f"    picbench reproduce {self.name} --device cpu|cuda --output DIR"
        yield f"    picbench figures {self.name} --data DIR"
        yield ""
        yield (
            "The first measures, goes on where it was stopped, and with `--dry-run` says how long "
            "it will take; the second makes this page from compact data (`data/`) and scores."
        )
        yield ""


def write_page(
    name: str, settings: Settings, folder: Path, scores: Path | None
) -> list[ClaimVerdict]:
    """Write the page of a paper into the folder with its data; the verdicts.

    `scores` is where scores row by row are; None: below the folder.
    """
    evidence = Evidence.read(folder / DATA, scores or folder / SCORES)
    return PaperPage(name, settings, evidence, folder).write()


def counts_of(verdicts: Sequence[ClaimVerdict]) -> str:
    """How many claims hold, fail and are undecided."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return f"{counts['holds']} hold, {counts['fails']} fail, {counts['undecided']} are undecided"


def claims_section(verdicts: Sequence[ClaimVerdict]) -> Iterator[str]:
    """What was claimed, and what became of it."""
    yield "## Claims"
    yield ""
    yield f"Of {len(verdicts)} verdicts {counts_of(verdicts)}. {_TERMS}"
    yield ""
    rows = [
        (
            f"**{verdict.verdict}**",
            verdict.claim,
            f"{verdict.published} ({verdict.source})",
            ours(verdict),
            verdict.why,
            verdict.run or "-",
        )
        for verdict in verdicts
    ]
    yield markdown_table(("verdict", "claim", "published", "ours", "why", "run"), rows)
    yield ""
    yield "All places of all claims are in [places.md](places.md)."
    yield ""


def ours(verdict: ClaimVerdict) -> str:
    """Estimate and interval, as cells of tables have them."""
    if verdict.ours is None:
        return "-"
    if verdict.interval is None:
        return verdict.ours
    low, high = verdict.interval
    return f"{verdict.ours} [{number(low)}, {number(high)}]"


def places_table(verdicts: Sequence[ClaimVerdict]) -> Table:
    """Every claim at every place."""
    rows = [
        [
            verdict.claim,
            cell.on,
            cell.what,
            cell.value,
            cell.interval.low if cell.interval else None,
            cell.interval.high if cell.interval else None,
            cell.verdict,
            cell.samples,
            (verdict.run or "-").partition(":")[0],
        ]
        for verdict in verdicts
        for cell in verdict.cells
    ]
    head = ("claim", "place", "quantity", "ours", "low", "high", "verdict", "n", "run")
    return report_table("places", "Every claim at every place", head, rows)
