"""A paper's page: claims and verdicts, figures, and tables with its printed values beside ours."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, mode, stdev

import numpy as np

from picbench.figures import panels
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot
from picbench.files import write_whole
from picbench.papers.arm_scores import FULL, Case, paired, ratio_of
from picbench.papers.data import ExperimentData, ends, mean_value, report_table, spread
from picbench.papers.judge import ClaimVerdict, Evidence, judge_all, number, write_verdicts
from picbench.papers.reproduce import DATA, SCORES
from picbench.papers.settings import (
    BASE,
    TESTBED,
    Drawing,
    Figure,
    Published,
    Settings,
    read_published,
)
from picbench.store.reader import HELD
from picbench.tables.page import page, paragraphs
from picbench.tables.table import Table, Value

PAGE, KINDS = "README.md", "kinds.md"


def _whole(values: Collection[float]) -> Value:
    return int(fmean(values))


def _quantile(values: Collection[float], share: float) -> Value:
    return mean_value(float(np.quantile([*values], share)), None, 1)


#: Columns of tables: title, metric, and how its values are shown. Those that no arm has are left
#: out.
_COLUMNS: Sequence[tuple[str, str, Callable[[Collection[float]], Value]]] = (
    ("makespan s", "makespan_s", spread),
    ("TTFT p50 s", "ttft_p50_s", spread),
    ("TTFT p95 s", "ttft_p95_s", spread),
    ("tokens/s", "tokens_s", partial(spread, digits=0)),
    ("requests/s", "requests_s", spread),
    ("peak referenced %", "peak_pct", partial(spread, digits=1)),
    ("mean referenced %", "mean_pct", partial(spread, digits=1)),
    ("peak resident %", "resident_pct", partial(spread, digits=1)),
    ("peak and workspace MiB", "peak_mib", partial(spread, digits=1)),
    ("score", "score", partial(spread, digits=3)),
    ("attention over an even share", "share", spread),
    ("first token, over an even share", "first_share", spread),
    ("first four tokens", "sinks_share", spread),
    ("tokens with new KV", "projected", partial(spread, digits=0)),
    ("tokens through the layer", "finished", partial(spread, digits=0)),
    ("operations, 10^9", "gigaoperations", spread),
    ("first four, head with most", "top_head_share", spread),
    ("TTFT ms, median", "ttft_ms", partial(_quantile, share=0.5)),
    ("lower quartile", "ttft_ms", partial(_quantile, share=0.25)),
    ("upper quartile", "ttft_ms", partial(_quantile, share=0.75)),
    ("linked tokens", "linked", _whole),
    ("compiled tokens", "compiled", _whole),
)

_TERMS = (
    "A claim holds where all of its interval is within its bound, fails where all of it is "
    "outside, and is undecided otherwise; its worst place is shown. Intervals of a claim cover "
    "with 95 % together: scores are paired by row, times and blocks by seed or repeat. Peaks of "
    "full pools decide nothing. The claims are about other models, data and machines."
)

#: Arms of score panels that are joined by a line, as they differ in one number.
_FAMILIES = ("epic", "cacheblend")


def write_page(
    name: str, settings: Settings, folder: Path, scores: Path | None
) -> list[ClaimVerdict]:
    """Write a paper's pages, ``verdicts.json``, tables and figures beside its data; the verdicts.

    `scores` is where scores row by row are; None: below the folder.
    """
    evidence = Evidence.read(folder / DATA, scores or folder / SCORES)
    published = read_published(settings.published)
    verdicts = judge_all(settings.claims, evidence)
    write_verdicts(verdicts, folder)
    note = f"Printed values: {published.paper}; {published.label}. {published.note}"
    texts = [note, claims_section(verdicts)]
    for figure in settings.figures:
        texts += _figure(name, figure, settings.figures[figure], evidence, published, folder)
    text = page(f"{settings.paper}: redrawn and judged", *map(str.strip, texts))
    write_whole(folder / PAGE, text.encode())
    experiments = dict.fromkeys(figure.experiment for figure in settings.figures.values())
    measured = (data for one in experiments for data in evidence.experiment(one))
    kinds = [table for table in map(kinds_table, measured) if table.rows]
    if kinds:
        for table in kinds:
            table.write(folder)
        sections = (table.section().strip() for table in kinds)
        text = page(f"{settings.paper}: blocks by kind at each peak", *sections)
        write_whole(folder / KINDS, text.encode())
    return verdicts


def _figure(
    paper: str, name: str, figure: Figure, evidence: Evidence, published: Published, folder: Path
) -> Iterator[str]:
    yield f"## {figure.title}"
    pictures = [
        f"![{figure.title}: {drawing.label}]({file}.svg)"
        for drawing in figure.drawings
        for file in draw(drawing, figure.experiment, evidence, published, folder)
    ]
    yield "\n".join(pictures)
    if text := published.figure(name)["text"]:
        title, note = "What the paper's text says of this figure", f"Paper: {published.label}."
        rows = [*text.items()]
        yield report_table(f"{name}-paper", title, ("quantity", "paper"), rows, [note]).section()
    experiments = evidence.experiment(figure.experiment)
    tables = []
    if name == "table1":
        tables = [workload_table(data, published) for data in experiments]
    elif name == "table2":
        tables = [result_table(data, published) for data in experiments]
    elif (paper, name) != ("mepic", "fig6"):
        tables = [experiment_table(data) for data in experiments]
    for table in tables:
        table.write(folder)
        yield table.section()
    if any(kinds_table(data).rows for data in experiments):
        yield f"Blocks by kind at each peak are in [{KINDS}]({KINDS})."
    if not pictures and not tables:
        yield f"Not measured yet: `picbench reproduce {paper} --figure {name}`."


def claims_section(verdicts: Sequence[ClaimVerdict]) -> str:
    """What was claimed, and what became of it."""
    rows = []
    for one in verdicts:
        ours = one.ours or "-"
        if one.interval is not None:
            ours += " [{}, {}]".format(*map(number, one.interval))
        published = f"{one.published} ({one.source})"
        rows.append((f"**{one.verdict}**", one.claim, published, ours, one.why, one.run or "-"))
    head = ("verdict", "claim", "published", "ours", "why", "run")
    return paragraphs(
        "## Claims",
        f"Of {len(verdicts)} verdicts {counts_of(verdicts)}. {_TERMS}",
        report_table("", "", head, rows).markdown(),
        "All places of all claims are in [places.md](places.md).",
    )


def counts_of(verdicts: Sequence[ClaimVerdict]) -> str:
    """How many claims hold, fail and are undecided."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return f"{counts['holds']} hold, {counts['fails']} fail, {counts['undecided']} are undecided"


def experiment_table(data: ExperimentData) -> Table:
    """What every arm did at every point of an experiment; no columns of what no arm has."""
    head: list[str] = [data.varies, "arm", *(title for title, *_ in _COLUMNS)]
    rows: list[list[Value]] = []
    for on, arm in product(data.labels, data.arms):
        row: list[Value] = [on, arm]
        for _, metric, shown in _COLUMNS:
            values = data.values(on, arm, metric).values()
            row.append(shown(values) if values else None)
        rows += [row] if any(value is not None for value in row[2:]) else []
    kept = [n for n in range(len(head)) if n < 2 or any(row[n] is not None for row in rows)]
    over = f"Mean ± standard deviation over {data.repeated} {data.repeats}. "
    return report_table(
        data.name,
        f"{data.experiment} on {data.device}: what each arm did",
        [head[n] for n in kept],
        [[row[n] for n in kept] for row in rows],
        (("" if data.single_requests else over) + data.conditions["caption"],),
    )


def workload_table(data: ExperimentData, published: Published) -> Table:
    """MEPIC's Table 1: how long prompts are and how much of them is reused."""
    rows: list[list[Value]] = []
    for label in data.labels:
        paper = published.figure("table1")["rows"].get(label, {})
        facts = [point.facts for point in data.points if point.label == label]
        reuse = [None if one["reuse"] is None else 100 * one["reuse"] for one in facts]
        row: list[Value] = [f"{label}-like", facts[0]["requests"]]
        row += [paper.get("tokens"), spread((one["mean_tokens"] for one in facts), 0)]
        row += [paper.get("reuse_pct"), spread(reuse, 1)]
        row += [paper.get("recomputed"), spread((one["fresh_tokens"] for one in facts), 0)]
        rows.append(row)
    counted = product(("tokens", "reuse %", "not reused"), ("(paper)", "(ours)"))
    return report_table(
        f"table1-{data.device}",
        f"The workloads on {data.device}",
        ("workload", "requests", *map(" ".join, counted)),
        rows,
        (
            f"Paper: 300 requests; {published.label}. Ours: synthetic rows, means over seeds. "
            "Reuse is the share of chunk tokens in chunks that came before.",
        ),
    )


def _printed(published: Published, label: str, metric: str, arm: str) -> tuple[float, float] | None:
    """Table 2's mean and deviation of an arm (``mepic``, ``epic``, ``cacheblend``)."""
    rows = published.figure("table2")["rows"]
    found = rows.get(label, {}).get(metric, {}).get(arm.partition(":")[0])
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
            f"Paper: {published.label}. Ours: mean ± standard deviation over seeds; resident "
            f"blocks also hold idle KV. {data.conditions['caption']}",
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
    made, of_scores = [], drawing.kind == "scores"
    for whole in evidence.experiment(drawing.metric if of_scores else experiment):
        base = folder / f"{drawing.name}-{whole.device}"
        data = whole.at(drawing.points or whole.labels)
        drawn = bool(data.points)
        if drawing.kind == "scores":
            drawn = _draw_scores(drawing, evidence, data, published, base)
        elif drawn:
            kinds = {"lines": _draw_lines, "dots": _draw_dots, "bars": _draw_bars}
            kinds.get(drawing.kind, _draw_time)(drawing, data, published, base)
        made += [base.name] if drawn else []
    return made


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


def _spots(data: ExperimentData, metric: str) -> dict[tuple[str, str], Spot]:
    """A metric by point and arm, as x values, with its quartiles or its deviation."""
    found = {}
    for on, arm in product(data.labels, data.arms):
        values = [*data.values(on, arm, metric).values()]
        if values and data.single_requests:
            low, middle, high = map(float, np.quantile(values, (0.25, 0.5, 0.75)))
            found[on, arm] = Spot(middle, 0, low, high)
        elif values:
            mean, deviation = fmean(values), stdev(values) if len(values) > 1 else 0.0
            found[on, arm] = Spot(mean, 0, mean - deviation, mean + deviation)
    return found


def _draw_lines(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    # At their numbers, or in the order of the settings.
    places: dict[str, float] = {label: place for place, label in enumerate(data.labels)}
    for label in data.labels:
        with suppress(ValueError):
            places[label] = float(label)
    lines: dict[str, list[Spot]] = {arm: [] for arm in drawing.arms or data.arms}
    for (on, arm), spot in _spots(data, drawing.metric).items():
        if arm in lines:
            lines[arm].append(replace(spot, x=places[on], y=spot.x))
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
    panels.draw_lines(panel, {arm: s for arm, s in lines.items() if s}, ticks, base, printed)


def _draw_dots(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    ours: dict[str, dict[str, Spot]] = {f"{label}-like": {} for label in data.labels}
    theirs: dict[str, dict[str, Spot]] = {name: {} for name in ours}
    for (label, arm), spot in _spots(data, drawing.metric).items():
        ours[f"{label}-like"][arm] = spot
        if (printed := _printed(published, label, drawing.printed, arm)) is not None:
            mean, sd = printed
            theirs[f"{label}-like"][arm] = Spot(mean, 0, mean - sd, mean + sd)
    note = f"{_note(data)} Hollow: printed, {published.label}."
    panels.draw_dots(Panel(drawing.label, "", note, log_x=drawing.log), ours, theirs, base)


def _draw_bars(drawing: Drawing, data: ExperimentData, _: Published, base: Path) -> None:
    labels, note = data.labels, _note(data)
    if drawing.at in labels:
        labels, note = [drawing.at], f"{note} Prompt: {drawing.at} tokens."
    bars = {
        arm if len(labels) == 1 else f"{arm}, {label}": spot
        for (label, arm), spot in _spots(data, drawing.metric).items()
        if label in labels
    }
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
    one, full = paired(evidence.parts, (arm, FULL), dataset)
    found = ratio_of(one, full)
    if found is None:
        return None
    value, low, high = (100 * share for share in found)
    return Spot(x, value, low, high)


def _score_note(evidence: Evidence, datasets: Iterable[str]) -> str:
    parts = [evidence.parts[Case(BASE, name)] for name in datasets]
    where = "{gpu}, {dtype}, commit {commit:.7}".format_map(parts[0].provenance)
    counts = ends(len(part.arms[FULL].score) for part in parts)
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
    for (label, arm), ttft in _spots(data, "ttft_ms").items():
        kept = _kept(evidence, arm, drawing.dataset, ttft.x) if label == drawing.at else None
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
    lines = {}
    for dataset in evidence.datasets():
        spots = [_kept(evidence, arm, dataset, 100 * _number(arm)) for arm in drawing.arms]
        if found := [spot for spot in spots if spot is not None]:
            lines[f"{dataset}-like"] = found
    if not lines:
        return False
    ticks = {100 * _number(arm): f"{100 * _number(arm):g}" for arm in drawing.arms}
    note = _score_note(evidence, evidence.datasets())
    panel = Panel("recomputed, % of chunk tokens", drawing.label, note)
    panels.draw_lines(panel, lines, ticks, base, bottom=panels.percent_floor(lines.values()))
    return True
