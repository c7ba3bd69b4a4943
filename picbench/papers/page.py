"""A paper's page: claims and verdicts, figures, and tables with its printed values beside ours."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, mode, stdev

import numpy as np

from picbench.figures import panels
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot
from picbench.files import write_whole
from picbench.papers.arm_scores import ratio_of
from picbench.papers.data import ExperimentData, ends, mean_value, report_table, spread
from picbench.papers.judge import ClaimVerdict, Evidence, judge_all, number, write_verdicts
from picbench.papers.reproduce import DATA, SCORES
from picbench.papers.settings import TESTBED, Drawing, Figure, Published, Settings, read_published
from picbench.store.reader import HELD
from picbench.tables.table import Table, Value
from picbench.tables.table import table as markdown_table

PAGE, KINDS = "README.md", "kinds.md"

#: Columns of tables by metric: title and digits. Metrics that no arm has are left out.
_COLUMNS = {
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

_TERMS = (
    "A claim holds where all of its interval is within its bound, fails where all of it is "
    "outside, and is undecided otherwise; its worst place is shown. Intervals of a claim cover "
    "with 95 % together (Bonferroni): scores are paired by row and resampled, times and blocks "
    "are paired by seed or repeat (Student's t). Peaks of full pools decide nothing. The papers' "
    "claims are about other models, data and machines."
)

#: Arms of score panels that are joined by a line, as they differ in one number.
_FAMILIES = ("epic", "cacheblend")


def write_page(
    name: str, settings: Settings, folder: Path, scores: Path | None
) -> list[ClaimVerdict]:
    """Write a paper's pages, ``verdicts.json``, tables and figures beside its data; the verdicts.

    `scores` is where scores row by row are; None: below the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evidence = Evidence.read(folder / DATA, scores or folder / SCORES)
    published = read_published(settings.published)
    verdicts = judge_all(settings.claims, evidence)
    write_verdicts(verdicts, folder)
    places_table(verdicts).write(folder)
    lines = [
        f"# {settings.paper}: redrawn and judged",
        "",
        f"Printed values: {published.paper}; {published.label}. {published.content['note']}",
        "",
        *claims_section(verdicts),
    ]
    for figure in settings.figures:
        lines += _figure(name, figure, settings.figures[figure], evidence, published, folder)
    lines += [
        "## Again",
        "",
        f"`picbench reproduce {name} --device cpu|cuda --output DIR` measures what is missing, "
        f"`picbench figures {name} --data DIR` makes this page from compact data and scores.",
        "",
    ]
    write_whole(folder / PAGE, "\n".join(lines).encode())
    experiments = dict.fromkeys(figure.experiment for figure in settings.figures.values())
    measured = (data for one in experiments for data in evidence.experiment(one))
    if kinds := [table for table in map(kinds_table, measured) if table.rows]:
        for table in kinds:
            table.write(folder)
        sections = (table.section() for table in kinds)
        lines = [f"# {settings.paper}: blocks by kind at each peak", "", *sections]
        write_whole(folder / KINDS, "\n".join(lines).encode())
    return verdicts


def _figure(
    paper: str, name: str, figure: Figure, evidence: Evidence, published: Published, folder: Path
) -> Iterator[str]:
    yield from (f"## {figure.title}", "")
    pictures = [
        f"![{figure.title}: {drawing.label}]({file}.svg)"
        for drawing in figure.drawings
        for file in draw(drawing, figure.experiment, evidence, published, folder)
    ]
    yield from (*pictures, "") if pictures else ()
    if text := published.text(name):
        title, note = "What the paper's text says of this figure", f"Paper: {published.label}."
        rows = [*text.items()]
        yield report_table(f"{name}-paper", title, ("quantity", "paper"), rows, [note]).section()
    experiments = evidence.experiment(figure.experiment)
    tables = []
    for data in experiments:
        if name == "table1":
            tables.append(workload_table(data, published))
        elif name == "table2":
            tables.append(result_table(data, published))
        elif (paper, name) != ("mepic", "fig6"):
            tables.append(experiment_table(data))
    for table in tables:
        table.write(folder)
        yield table.section()
    if any(kinds_table(data).rows for data in experiments):
        yield from (f"Blocks by kind at each peak are in [{KINDS}]({KINDS}).", "")
    if not pictures and not tables:
        yield from (f"Not measured yet: `picbench reproduce {paper} --figure {name}`.", "")


def claims_section(verdicts: Sequence[ClaimVerdict]) -> Iterator[str]:
    """What was claimed, and what became of it."""
    rows = []
    for one in verdicts:
        ours = one.ours or "-"
        if one.interval is not None:
            low, high = one.interval
            ours += f" [{number(low)}, {number(high)}]"
        published = f"{one.published} ({one.source})"
        row = (f"**{one.verdict}**", one.claim, published, ours, one.why, one.run or "-")
        rows.append(row)
    yield from ("## Claims", "")
    yield from (f"Of {len(verdicts)} verdicts {counts_of(verdicts)}. {_TERMS}", "")
    yield markdown_table(("verdict", "claim", "published", "ours", "why", "run"), rows)
    yield from ("", "All places of all claims are in [places.md](places.md).", "")


def counts_of(verdicts: Sequence[ClaimVerdict]) -> str:
    """How many claims hold, fail and are undecided."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return f"{counts['holds']} hold, {counts['fails']} fail, {counts['undecided']} are undecided"


def places_table(verdicts: Sequence[ClaimVerdict]) -> Table:
    """Every claim at every place."""
    rows = []
    for verdict in verdicts:
        run = (verdict.run or "-").partition(":")[0]
        for cell in verdict.cells:
            ends = (cell.interval.low, cell.interval.high) if cell.interval else (None, None)
            found = (cell.value, *ends, cell.verdict, cell.samples)
            rows.append((verdict.claim, cell.on, cell.what, *found, run))
    head = ("claim", "place", "quantity", "ours", "low", "high", "verdict", "n", "run")
    return report_table("places", "Every claim at every place", head, rows)


def experiment_table(data: ExperimentData) -> Table:
    """What every arm did at every point of an experiment; no columns of what no arm has."""
    head = [title for title, _ in _COLUMNS.values()]
    over = f"Mean ± standard deviation over {data.repeated} {data.repeats}. "
    if data.single_requests:
        over, head = "", ["TTFT ms, median", "lower quartile", "upper quartile"]
        head += ["linked tokens", "compiled tokens"]
    rows: dict[tuple[str, str], list[Value]] = {}
    for label, arm in product(data.labels, data.arms):
        values: list[Value] = []
        if not data.single_requests:
            for metric, (_, digits) in _COLUMNS.items():
                values.append(data.spread(label, arm, metric, digits))
        elif times := data.values(label, arm, "ttft_ms"):
            low, middle, high = quartiles(times.values())
            values += [mean_value(time, None, 1) for time in (middle, low, high)]
            counts = (data.spread(label, arm, metric) for metric in ("linked", "compiled"))
            values += [int(count.number or 0) if count else None for count in counts]
        if any(value is not None for value in values):
            rows[label, arm] = values
    shown = [n for n in range(len(head)) if any(row[n] is not None for row in rows.values())]
    return report_table(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        (data.varies, "arm", *(head[n] for n in shown)),
        [(*key, *(row[n] for n in shown)) for key, row in rows.items()],
        (over + data.conditions["caption"],),
    )


def workload_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    rows: list[list[Value]] = []
    for label in data.labels:
        paper = published.rows("table1", label)
        facts = [point.facts for point in data.points if point.label == label]
        reuse = [None if one["reuse"] is None else 100 * one["reuse"] for one in facts]
        row: list[Value] = [f"{label}-like", facts[0]["requests"]]
        row += [paper.get("tokens"), spread((one["mean_tokens"] for one in facts), 0)]
        row += [paper.get("reuse_pct"), spread(reuse, 1)]
        row += [paper.get("recomputed"), spread((one["fresh_tokens"] for one in facts), 0)]
        rows.append(row)
    sources = ("(paper)", "(ours)")
    counted = product(("tokens", "reuse %", "not reused"), sources)
    return report_table(
        f"table1-{data.device}",
        f"The workloads on {data.device}",
        ("workload", "requests", *map(" ".join, counted)),
        rows,
        (
            f"Paper: 300 requests; {published.label}. Ours are look-alikes under the paper's "
            "names, of synthetic rows.",
            "Ours: means over seeds. Reuse is the share of chunk tokens that lie in a chunk "
            "which came before; not reused are the tokens of new chunks and of all other text.",
        ),
    )


def _printed(published: Published, label: str, metric: str, arm: str) -> tuple[float, float] | None:
    """Table 2's mean and deviation of an arm (``mepic``, ``epic``, ``cacheblend``)."""
    found = published.rows("table2", label).get(metric, {}).get(arm.partition(":")[0])
    return None if found is None else (float(found[0]), float(found[1]))


def result_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 2: latency, peak occupancy, score."""
    columns = {
        "latency s (paper)": "latency_s",
        "makespan s (ours)": "makespan_s",
        "peak % (paper)": "peak_pct",
        "peak referenced % (ours)": "peak_pct",
        "peak resident % (ours)": "resident_pct",
        "score (paper)": "score",
        "score (ours)": "score",
    }
    rows: list[list[Value]] = []
    for label, arm in product(data.labels, data.arms):
        row: list[Value] = [f"{label}-like", arm]
        for title, metric in columns.items():
            printed = _printed(published, label, metric, arm)
            theirs = mean_value(*printed) if printed else None
            row.append(theirs if "(paper)" in title else data.spread(label, arm, metric))
        rows.append(row)
    return report_table(
        f"table2-{data.device}",
        f"Total latency, peak KV occupancy and score on {data.device}",
        ("workload", "arm", *columns),
        rows,
        (
            f"Paper: {published.label}. Its table has no arm prefix or full.",
            "Ours: mean ± standard deviation over seeds; peaks in percent of the pool. Referenced "
            "blocks are held by running requests, resident ones also hold idle KV. "
            f"{data.conditions['caption']}",
        ),
    )


def kinds_table(data: ExperimentData) -> Table:
    """Blocks by kind at the moment of each arm's peak."""
    rows = []
    for point in data.points:
        for arm, found in point.arms.items():
            if found.at_peak:
                held = [found.at_peak[kind] for kind in HELD]
                rows.append((point.label, point.seed, arm, *held, sum(held)))
    return report_table(
        f"{data.name}-kinds",
        f"{data.experiment} on {data.device}: blocks by kind at the peak",
        (data.varies, "seed", "arm", *HELD, "sum"),
        rows,
        (
            "Blocks of 16 tokens that running requests hold. chunk: shared KV of chunks; linked: "
            "recomputed tokens of chunks; private: a request's own copies; decode: replies.",
        ),
    )


def draw(
    drawing: Drawing, experiment: str, evidence: Evidence, published: Published, folder: Path
) -> list[str]:
    """Draw a panel for each device that has the data; the names of files without their suffix."""
    if drawing.kind == "kept":
        return [drawing.name] if _draw_kept(drawing, evidence, folder / drawing.name) else []
    kinds = {"lines": _draw_lines, "dots": _draw_dots, "bars": _draw_bars, "time": _draw_time}
    made, of_scores = [], drawing.kind == "scores"
    for whole in evidence.experiment(drawing.metric if of_scores else experiment):
        name = f"{drawing.name}-{whole.device}"
        data = whole.at(drawing.points or whole.labels)
        if of_scores:
            drawn = _draw_scores(drawing, evidence, data, published, folder / name)
            made += [name] if drawn else []
        elif data.points:
            kinds[drawing.kind](drawing, data, published, folder / name)
            made.append(name)
    return made


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    low, middle, high = np.quantile(list(values), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _note(data: ExperimentData) -> str:
    """What spots show; points of fewer requests than most, where a whole load takes less."""
    how = f"Mean of {data.repeated} {data.repeats}, bars: sd."
    if data.single_requests:
        how = f"Median of {data.repeated} repeats, bars: quartiles."
    counts = {point.label: int(point.facts.get("requests") or 0) for point in data.points}
    usual = mode(counts.values())
    # Where every point has its own number, that is what the figure is about.
    few = counts.items() if len(set(counts.values())) < len(counts) else ()
    fewer = [f"At {on}: {count} requests, not {usual}." for on, count in few if count < usual]
    return " ".join((_origin(data), how, *fewer))


def _origin(data: ExperimentData) -> str:
    """Where points come from; hardware first, since names of models begin with small letters."""
    about, inputs = data.conditions, "random tokens" if data.single_requests else "synthetic rows"
    return f"{about['hardware']}, commit {about['commit']}; {about['model']}, {inputs}."


def _spot(data: ExperimentData, label: str, arm: str, metric: str, x: float | None) -> Spot | None:
    """A metric at `x`, or, without one, as an x value itself."""
    values = data.values(label, arm, metric).values()
    if not values:
        return None
    if data.single_requests:
        low, middle, high = quartiles(values)
    else:
        middle, deviation = fmean(values), (stdev(values) if len(values) > 1 else 0.0)
        low, high = middle - deviation, middle + deviation
    return Spot(middle, 0, low, high) if x is None else Spot(x, middle, low, high)


def _draw_lines(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    # At their numbers, or in the order of the settings.
    places: dict[str, float] = {label: place for place, label in enumerate(data.labels)}
    for label in data.labels:
        with suppress(ValueError):
            places[label] = float(label)
    lines = {}
    for arm in drawing.arms or data.arms:
        spots = [_spot(data, on, arm, drawing.metric, x) for on, x in places.items()]
        if found := [spot for spot in spots if spot is not None]:
            lines[arm] = found
    printed = {
        arm: [(places[label], value) for label, value in values.items() if label in places]
        for arm, values in drawing.published.items()
    }
    # With many points, which are then evenly spaced, every fourth is named.
    many = len(places) > 12
    ticks = {}
    for label, x in list(places.items())[:: 4 if many else 1]:
        large = label.isdigit() and int(label) >= 1024
        ticks[x] = f"{int(label) / 1024:g}k" if large else label
    least, most = min(places.values()), max(places.values())
    hollow = f" Hollow: {drawing.printed}; {published.label}." if drawing.published else ""
    log_x = least > 0 and most > 10 * least and not many
    note = _note(data) + hollow
    panel = Panel(data.varies, drawing.label, note, log_x=log_x, log_y=drawing.log)
    panels.draw_lines(panel, lines, ticks, base, printed)


def _draw_dots(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    ours: dict[str, dict[str, Spot]] = {f"{label}-like": {} for label in data.labels}
    theirs: dict[str, dict[str, Spot]] = {name: {} for name in ours}
    for label, arm in product(data.labels, data.arms):
        if (found := _spot(data, label, arm, drawing.metric, None)) is not None:
            ours[f"{label}-like"][arm] = found
        if (printed := _printed(published, label, drawing.printed, arm)) is not None:
            mean, sd = printed
            theirs[f"{label}-like"][arm] = Spot(mean, 0, mean - sd, mean + sd)
    note = f"{_note(data)} Hollow: printed, {published.label}."
    panels.draw_dots(Panel(drawing.label, "", note, log_x=drawing.log), ours, theirs, base)


def _draw_bars(drawing: Drawing, data: ExperimentData, _: Published, base: Path) -> None:
    one = drawing.at in data.labels
    bars = {}
    for label, arm in product([drawing.at] if one else data.labels, data.arms):
        if (spot := _spot(data, label, arm, drawing.metric, None)) is not None:
            alone = one or len(data.labels) == 1
            bars[arm if alone else f"{arm}, {label}"] = spot
    note = _note(data) + (f" Prompt: {drawing.at} tokens." if one else "")
    panels.draw_bars(Panel(drawing.label, "", note, log_x=drawing.log), bars, base)


def _draw_time(drawing: Drawing, data: ExperimentData, _: Published, base: Path) -> None:
    lines = {
        f"{point.label}-like": {
            arm: (found.series.time, found.series.share)
            for arm, found in point.arms.items()
            if found.series is not None
        }
        for point in data.points
        if point.seed == data.seeds[0]
    }
    panels.draw_time(Panel("time, s", drawing.label, f"{_origin(data)} One seed."), lines, base)


def _kept(evidence: Evidence, arm: str, dataset: str, x: float) -> Spot | None:
    """The share of full recompute's score that an arm keeps; None where it was not scored."""
    one, full = evidence.rows(arm, dataset), evidence.rows("full", dataset)
    if not one or not full or (found := ratio_of(one, full)) is None:
        return None
    return Spot(x, 100 * found.value, 100 * found.low, 100 * found.high)


def _score_note(evidence: Evidence, datasets: Sequence[str]) -> str:
    facts = [part.facts for name in datasets if (part := evidence.part("full", name))]
    counts = ends(len(evidence.rows("full", name)) for name in datasets)
    where = f"{facts[0]['gpu']}, {facts[0]['dtype']}, commit {facts[0]['commit'][:7]}"
    return f"Scores: {TESTBED}, synthetic rows, n={counts}; {where}; vertical bars: 95 %."


def _number(arm: str) -> float:
    """The number in an arm's name, such as its share of tokens."""
    return float(arm.partition("=")[2] or 0)


def _draw_scores(
    drawing: Drawing, evidence: Evidence, data: ExperimentData, published: Published, base: Path
) -> bool:
    """Draw what families of arms keep against their time; whether there is any."""
    families: dict[str, list[Spot]] = {}
    printed: dict[str, list[Spot]] = {}
    for arm in data.arms:
        ttft = _spot(data, drawing.at, arm, "ttft_ms", None)
        kept = _kept(evidence, arm, drawing.dataset, ttft.x) if ttft else None
        if kept is not None:
            name, _, option = arm.partition(":")
            families.setdefault(name, []).append(replace(kept, name=option))
            if theirs := drawing.published.get(arm):
                low, high = theirs["low"], theirs["high"]
                printed.setdefault(name, []).append(Spot(kept.x, (low + high) / 2, low, high))
    if not families:
        return False
    titles = {name: name for name in families}
    for name in families.keys() & set(_FAMILIES):
        spots = sorted(families[name], key=lambda spot: _number(spot.name))
        option, first = spots[0].name.split("=")
        if len(spots) > 1:
            titles[name] = f"{name}, {option} = {first} to {spots[-1].name.partition('=')[2]}"
        # The last spot shows which way a family goes; more names would cover its points.
        families[name] = [*(replace(spot, name="") for spot in spots[:-1]), spots[-1]]
    about = data.conditions
    note = (
        f"{drawing.dataset}-like. {_score_note(evidence, [drawing.dataset])} Time: {drawing.at} "
        f"random tokens, {about['hardware']}, commit {about['commit']}, median of {data.repeated} "
        "repeats."
    )
    note += f" Hollow: {drawing.printed}; {published.label}." if printed else ""
    panels.draw_scatter(
        Panel("time to the first token, ms", drawing.label, note, log_x=True),
        {titles[name]: spots for name, spots in families.items()},
        [titles[name] for name in _FAMILIES if name in titles],
        base,
        {titles[name]: spots for name, spots in printed.items()},
    )
    return True


def _draw_kept(drawing: Drawing, evidence: Evidence, base: Path) -> bool:
    """A line a data set: kept against the share of tokens, which the arms' names have."""
    datasets = evidence.datasets()
    lines = {}
    for dataset in datasets:
        spots = [_kept(evidence, arm, dataset, 100 * _number(arm)) for arm in drawing.arms]
        if found := [spot for spot in spots if spot is not None]:
            lines[f"{dataset}-like"] = found
    if not lines:
        return False
    shares = [100 * _number(arm) for arm in drawing.arms]
    panels.draw_lines(
        Panel("recomputed, % of chunk tokens", drawing.label, _score_note(evidence, datasets)),
        lines,
        {share: f"{share:g}" for share in shares},
        base,
        bottom=panels.percent_floor(lines.values()),
    )
    return True
