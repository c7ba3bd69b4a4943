"""A paper's page: claims and verdicts, figures, and tables with its printed values beside ours."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from picbench.files import write_whole
from picbench.papers.data import (
    Columns,
    ExperimentData,
    PointData,
    SeedSpread,
    by_label,
    columns_table,
    mean_value,
    quartiles,
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
    columns = dict(_latency_columns(data) if data.single_requests else _metric_columns(data))
    keys = [(label, arm) for label in data.labels for arm in data.arms]
    measured = [key for key in keys if any(value(*key) is not None for value in columns.values())]
    over = f"Mean ± standard deviation over {data.repeated} {data.repeats}. "
    return columns_table(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        {data.varies: lambda label, _: label, "arm": lambda _, arm: arm} | columns,
        measured,
        (f"{'' if data.single_requests else over}{data.conditions['caption']}",),
    )


def _metric_columns(data: ExperimentData) -> Iterator[tuple[str, Callable[[str, str], Value]]]:
    for metric, (title, digits) in _COLUMNS.items():
        value = partial(_spread, data, metric, digits)
        if any(value(label, arm) for label in data.labels for arm in data.arms):
            yield title, value


def _spread(data: ExperimentData, metric: str, digits: int, label: str, arm: str) -> Shown | None:
    return data.spread(label, arm, metric).value(digits)


def _latency_columns(data: ExperimentData) -> Iterator[tuple[str, Callable[[str, str], Value]]]:
    def time(quartile: int, label: str, arm: str) -> Value:
        found = data.values(label, arm, "ttft_ms").values()
        return mean_value(quartiles(found)[quartile], None, 1) if found else None

    def count(metric: str, label: str, arm: str) -> Value:
        mean = data.spread(label, arm, metric).mean
        return None if mean is None else int(mean)

    yield "TTFT ms, median", partial(time, 1)
    yield "lower quartile", partial(time, 0)
    yield "upper quartile", partial(time, 2)
    yield "linked tokens", partial(count, "linked")
    yield "compiled tokens", partial(count, "compiled")


def workload_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    groups = by_label(data)

    def ours(name: str, digits: int, scale: float = 1.0) -> Callable[[str], Value]:
        def value(label: str) -> Value:
            values = [point.facts[name] for point in groups[label]]
            found = SeedSpread.of(None if value is None else scale * value for value in values)
            return found.value(digits)

        return value

    def paper(name: str) -> Callable[[str], Value]:
        return lambda label: published.workload(label).get(name)

    def requests(label: str) -> Value:
        found = groups[label][0].facts["requests"]
        return None if found is None else int(found)

    return columns_table(
        f"table1-{data.device}",
        f"The workloads on {data.device}",
        {
            "workload": lambda label: f"{label}-like",
            "requests": requests,
            "tokens (paper)": paper("tokens"),
            "tokens (ours)": ours("mean_tokens", 0),
            "reuse % (paper)": paper("reuse_pct"),
            "reuse % (ours)": ours("reuse", 1, 100),
            "not reused (paper)": paper("recomputed"),
            "not reused (ours)": ours("fresh_tokens", 0),
        },
        [(label,) for label in groups],
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


def result_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 2: latency, peak occupancy, score."""

    def ours(metric: str) -> Callable[[str, str], Value]:
        return partial(_spread, data, metric, 2)

    def paper(metric: str) -> Callable[[str, str], Value]:
        def value(label: str, arm: str) -> Value:
            found = published.result(label, metric, arm)
            return None if found is None else mean_value(*found)

        return value

    return columns_table(
        f"table2-{data.device}",
        f"Total latency, peak KV occupancy and score on {data.device}",
        {
            "workload": lambda label, _: f"{label}-like",
            "arm": lambda _, arm: arm,
            "latency s (paper)": paper("latency_s"),
            "makespan s (ours)": ours("makespan_s"),
            "peak % (paper)": paper("peak_pct"),
            "peak referenced % (ours)": ours("peak_pct"),
            "peak resident % (ours)": ours("resident_pct"),
            "score (paper)": paper("score"),
            "score (ours)": ours("score"),
        },
        [(label, arm) for label in data.labels for arm in data.arms],
        (
            f"Paper: {published.label}. Its table has no arm prefix or full.",
            "Ours: mean ± standard deviation over seeds; peaks in percent of the pool. Referenced "
            "blocks are held by running requests, resident ones also hold idle KV. "
            f"{data.conditions['caption']}",
        ),
    )


def text_table(name: str, figure: str, published: Published) -> Table:
    """What the paper's text says of a figure, for comparison."""
    return columns_table(
        name,
        "What the paper's text says of this figure",
        {"quantity": lambda quantity, _: quantity, "paper": lambda _, value: value},
        published.text(figure).items(),
        (f"Paper: {published.label}.",),
    )


def difference_table(data: ExperimentData) -> Table:
    """Blocks by kind at the moment of each arm's peak."""

    def blocks(kind: str) -> Callable[[PointData, str], Value]:
        return lambda point, arm: point.arms[arm].at_peak[kind]

    columns: Columns = {
        data.varies: lambda point, _: point.label,
        "seed": lambda point, _: point.seed,
        "arm": lambda _, arm: arm,
        **{kind: blocks(kind) for kind in HELD},
        "sum": lambda point, arm: sum(point.arms[arm].at_peak[kind] for kind in HELD),
    }
    return columns_table(
        f"{data.name}-kinds",
        f"{data.experiment} on {data.device}: blocks by kind at the peak",
        columns,
        [(p, arm) for p in data.points for arm, found in p.arms.items() if found.at_peak],
        (
            "Blocks of 16 tokens that running requests hold. chunk: shared KV of chunks; linked: "
            "recomputed tokens of chunks; private: a request's own copies; decode: replies.",
        ),
    )


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
        yield from (f"## {figure.title}", "")
        pictures = [
            f"![{figure.title}: {drawing.label}]({file}.svg)"
            for drawing in figure.drawings
            for file in draw(drawing, figure.experiment, self.evidence, published, self.output)
        ]
        if pictures:
            yield from (*pictures, "")
        if published.text(name):
            yield text_table(f"{name}-paper", name, published).section()
        tables = list(self._tables(name, figure, published))
        for table in tables:
            table.write(self.output)
            yield table.section()
        if any(self._kinds(figure.experiment)):
            yield from (f"Blocks by kind at each peak are in [{KINDS}]({KINDS}).", "")
        if not pictures and not tables:
            yield from (f"Not measured yet: `picbench reproduce {self.name} --figure {name}`.", "")

    def _write_kinds(self) -> None:
        """Write the blocks by kind at the peaks of all experiments that have any."""
        experiments = dict.fromkeys(one.experiment for one in self.settings.figures.values())
        tables = [table for name in experiments for table in self._kinds(name)]
        for table in tables:
            table.write(self.output)
        if tables:
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
        yield from ("## Again", "")
        yield f"    picbench reproduce {self.name} --device cpu|cuda --output DIR"
        yield f"    picbench figures {self.name} --data DIR"
        yield from (
            "",
            "The first measures, goes on where it was stopped, and with `--dry-run` says how long "
            "it will take; the second makes this page from compact data (`data/`) and scores.",
            "",
        )


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
    yield from ("## Claims", "")
    yield from (f"Of {len(verdicts)} verdicts {counts_of(verdicts)}. {_TERMS}", "")
    yield markdown_table(("verdict", "claim", "published", "ours", "why", "run"), rows)
    yield from ("", "All places of all claims are in [places.md](places.md).", "")


def ours(verdict: ClaimVerdict) -> str:
    """Estimate and interval, as cells of tables have them."""
    if verdict.interval is None:
        return verdict.ours or "-"
    low, high = verdict.interval
    return f"{verdict.ours} [{number(low)}, {number(high)}]"


def places_table(verdicts: Sequence[ClaimVerdict]) -> Table:
    """Every claim at every place."""
    columns: Columns = {
        "claim": lambda verdict, _: verdict.claim,
        "place": lambda _, cell: cell.on,
        "quantity": lambda _, cell: cell.what,
        "ours": lambda _, cell: cell.value,
        "low": lambda _, cell: cell.interval and cell.interval.low,
        "high": lambda _, cell: cell.interval and cell.interval.high,
        "verdict": lambda _, cell: cell.verdict,
        "n": lambda _, cell: cell.samples,
        "run": lambda verdict, _: (verdict.run or "-").partition(":")[0],
    }
    keys = [(verdict, cell) for verdict in verdicts for cell in verdict.cells]
    return columns_table("places", "Every claim at every place", columns, keys)
