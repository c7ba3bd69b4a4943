"""A paper redrawn and judged from compact data and scores: page, tables, figures, verdicts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.output import markdown
from picbench.papers.judging.evidence import Evidence
from picbench.papers.judging.judgement import ClaimVerdict, judge_all, number, write_verdicts
from picbench.papers.paper_drawings import draw
from picbench.papers.paper_settings import Figure, Settings
from picbench.papers.published import Published, read_published
from picbench.papers.report_table import ReportTable
from picbench.papers.reproduction import DATA, SCORES
from picbench.papers.tables import (
    difference_table,
    experiment_table,
    result_table,
    text_table,
    workload_table,
)
from picbench.whole_files import write_whole

PAGE = "README.md"

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
        """Write ``README.md``, ``verdicts.json``, tables and figures; the verdicts."""
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
        return verdicts

    def _figure(self, name: str, figure: Figure, published: Published) -> Iterator[str]:
        yield f"## {figure.title}"
        yield ""
        made = False
        for drawing in figure.drawings:
            found = draw(drawing, figure.experiment, self.evidence, published, self.output)
            for file in found:
                yield f"![{figure.title}: {drawing.label}]({file}.png)"
                made = True
        if made:
            yield ""
        if published.text(name):
            yield text_table(f"{name}-paper", name, published).markdown()
        tables = list(self._tables(name, figure, published))
        for table in tables:
            table.write(self.output)
            yield table.markdown()
        for data in self.evidence.experiment(figure.experiment):
            if (kinds := difference_table(data)).rows:
                kinds.write(self.output)
                yield f"Blocks by kind at each peak are in [{kinds.name}.md]({kinds.name}.md)."
                yield ""
        if not made and not tables:
            yield f"Not measured yet: `picbench reproduce {self.name} --figure {name}`."
            yield ""

    def _tables(self, name: str, figure: Figure, published: Published) -> Iterator[ReportTable]:
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
    yield markdown.table(("verdict", "claim", "published", "ours", "why", "run"), rows)
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


def places_table(verdicts: Sequence[ClaimVerdict]) -> ReportTable:
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
    return ReportTable("places", "Every claim at every place", head, rows)
