"""Accuracy of trained models: what is measured and claimed, and the page beside published gaps.

``accuracy`` scores replies; ``likelihood`` tells how likely right answers are, which small models
can be asked, too.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat

from picbench.errors import ConfigError
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_dots
from picbench.files import write_whole
from picbench.papers import arm_scores, serve_arms
from picbench.papers.arm_scores import FULL, ArmScore, Case, ScoredPart, Scores
from picbench.papers.data import START, Estimate, ends, mean_value, report_table
from picbench.papers.judge import ClaimVerdict, Evidence, judge_all, write_verdicts
from picbench.papers.page import PAGE, claims_section
from picbench.papers.reproduce import SCORES, arm_names
from picbench.papers.settings import (
    BASE,
    FILES,
    TESTBED,
    Claim,
    Device,
    ScoreQuantity,
    StrictSettings,
    read_yaml,
)
from picbench.store.summary import NO_CONTEXT
from picbench.tables.page import page
from picbench.tables.table import Table, Value
from picbench.workloads import datasets, models
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import HUB

NAME, LIKELIHOOD = "accuracy", "likelihood"


class EngineSize(StrictSettings):
    """The pool of an engine in blocks of 16 tokens, how many requests run at a time, its type."""

    kv_blocks: int = Field(ge=1024)
    max_requests: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"]


class PublishedGap(StrictSettings):
    """Scores that a source printed, in points: the lowest and the highest one.

    `dataset` is the data set here that they may be set beside.
    """

    source: str
    model: str
    rows: str
    full: tuple[float, float]
    arms: dict[str, tuple[float, float]] = Field(min_length=1)
    dataset: str = ""


class AccuracySettings(StrictSettings):
    """Models, data sets and arms; sizes by device; claims, and published gaps.

    Prompts above `longest` tokens, reply included, lose their middle. `drawn` are the arms of the
    figure. `tokens` (of a prompt, by source and data set) and `speeds` (tokens a second of all arms
    in one batch, by device) are for estimates. With `likelihood` right answers are forced, and
    their likelihood is compared with that under the arm ``nocontext``.
    """

    likelihood: bool = False
    models: list[str] = Field(min_length=1)
    datasets: list[str] = Field(min_length=1)
    rows: int = Field(ge=2)
    longest: int = Field(ge=1024)
    arms: list[str] = Field(min_length=2)
    drawn: list[str]
    engines: Mapping[Device, EngineSize]
    tokens: Mapping[Literal["bundled", "hub"], Mapping[str, int]]
    speeds: Mapping[Device, Mapping[Literal["prompt", "reply"], PositiveFloat]]
    claims: list[Claim]
    gaps: list[PublishedGap]


def read_accuracy(path: Path | None = None, name: str = NAME) -> AccuracySettings:
    """The settings of that name with picbench, or a file's; ConfigError for mistakes in them."""
    path = path or FILES / f"{name}.yaml"
    found = read_yaml(AccuracySettings, path)
    arm_names(found.arms)
    missing = [arm for arm in found.drawn if arm not in found.arms]
    if missing:
        raise ConfigError(f"`settings` {path}: drawn: {missing[0]} is not among `arms`")
    if found.likelihood != (NO_CONTEXT in found.arms):
        raise ConfigError(f"`settings` {path}: the arm {NO_CONTEXT} goes with `likelihood`")
    return found


def positions_of(spec: str) -> int | None:
    """How many tokens a model can take, None where its configuration does not say so.

    Raises ConfigError, which says what to do, where its files are neither here nor on the hub.
    """
    found = models.resolve(spec)
    if isinstance(found.path, Path):
        return found.context
    with models.engine_packages():
        from huggingface_hub import is_offline_mode
        from transformers import AutoConfig
    try:
        models.reach_model(found.path)
        config = AutoConfig.from_pretrained(found.path)
    except (OSError, ValueError) as error:
        offline = "HF_HUB_OFFLINE forbids to fetch it: " if is_offline_mode() else ""
        raise ConfigError(
            f"`models` {found.path}: {offline}{str(error).strip().splitlines()[0]}",
            hint="`models` takes OWNER/NAME on the hub (with HF_TOKEN=... or hf auth login where "
            "terms have to be accepted), a folder with its files, or testbed",
        ) from error
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return positions


def name_of(spec: str) -> str:
    """What files and tables call a model: its name on the hub, or that of its folder.

    A relative folder OWNER/NAME has its name on the hub.
    """
    path = Path(spec).expanduser()
    if not path.is_dir() or (not path.is_absolute() and len(path.parts) == 2):
        return spec
    return path.resolve().name


@dataclass(frozen=True, slots=True)
class AccuracyRun:
    """All arms on rows of all data sets, model by model; a file for each model and data set.

    `data` is where rows are (None: LongBench on the hub, bundled rows for a testbed), `texts` a
    folder with texts for needle's rows, `commit` names the code where a checkout cannot.
    """

    settings: AccuracySettings
    models: Sequence[str]
    device: Device
    output: Path
    data: str | None = None
    texts: str | None = None
    commit: str | None = None

    def run(self) -> None:
        """Measure what is missing. All models are found before anything is measured.

        Raises ConfigError for a model or data that cannot be had.
        """
        positions = [positions_of(spec) for spec in self.models]
        names = [name_of(spec) for spec in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"`models`: two are called {max(names, key=names.count)}", hint="rename a folder"
            )
        for spec, most in zip(self.models, positions, strict=True):
            serve_arms.measure(self.serving(spec, most))

    def serving(self, spec: str, positions: int | None = None) -> serve_arms.ServeSettings:
        """How a model's rows are served; bundled rows were made to fit the testbed."""
        longest = None if _is_testbed(spec) else self.settings.longest
        if longest and positions is not None:
            longest = min(longest, positions * 7 // 8)  # Pads of some arms take the rest.
        return serve_arms.ServeSettings(
            output=self.output / SCORES,
            commit=self.commit,
            model=spec,
            name=name_of(spec),
            dataset=tuple(self.settings.datasets),
            rows=self.settings.rows,
            algo=tuple(self.settings.arms),
            device=self.device,
            data=self._data(spec),
            longest=longest,
            likelihood=self.settings.likelihood,
            **self.settings.engines[self.device].model_dump(),
        )

    def _data(self, spec: str) -> Mapping[str, str]:
        data = self.data or (BUNDLED if _is_testbed(spec) else HUB)
        made = self.texts or BUNDLED
        needle = self.texts or (BUNDLED if data == HUB else data)
        return {
            name: made if datasets.find(name).generated else needle if name == "needle" else data
            for name in self.settings.datasets
        }

    def estimates(self) -> Iterator[Estimate]:
        """What is left, by model, with the start of an engine for each. Needs no model's files."""
        settings, speed = self.settings, self.settings.speeds[self.device]
        for spec in self.models:
            left, tokens, seconds = 0, 0, 0.0
            for dataset, data in self._data(spec).items():
                path = self.output / SCORES / f"{Case(name_of(spec), dataset).name}.json"
                done = len(json.loads(path.read_bytes())["prompt"]) if path.exists() else 0
                missing = max(0, settings.rows - done)
                known = settings.tokens["bundled" if data == BUNDLED else "hub"]
                about = known.get(dataset) or settings.longest // 2
                requests = missing * len(settings.arms)
                reply = datasets.find(dataset).max_tokens * requests
                left += missing
                tokens += about * requests
                seconds += about * requests / speed["prompt"] + reply / speed["reply"]
            seconds += START[self.device] if left else 0
            total = settings.rows * len(settings.datasets)
            yield Estimate(name_of(spec), "rows", left, total, tokens, seconds)


def _is_testbed(model: str) -> bool:
    """Also of the tuned ones; their rows are the bundled ones."""
    return model.partition(":")[0] == BASE


@dataclass(frozen=True, slots=True)
class ModelScores:
    """A model's parts by data set, where they are, and all arms of those with two rows or more."""

    model: str
    parts: Mapping[str, ScoredPart]
    folder: str
    scores: Scores


def read_models(settings: AccuracySettings, folder: Path, scores: Path | None) -> list[ModelScores]:
    """The models that were measured, the testbed last: whole rows of the settings' arms and sets.

    They are below `folder`; `scores` is a folder with the testbed's, which is shown beside them.
    """
    found: dict[str, ModelScores] = {}
    for place, shown, only in ((folder / SCORES, SCORES, None), (scores, str(scores), BASE)):
        every = arm_scores.read_parts(place) if place and any(place.glob("*.json")) else {}
        for model in dict.fromkeys(case.model for case in every):
            of = {}
            for dataset in settings.datasets:
                if part := every.get(Case(model, dataset)):
                    arms = {arm: part.arms[arm] for arm in settings.arms if arm in part.arms}
                    of[dataset] = replace(part, arms=arms)
            if of and model not in found and only in (None, model):
                scored = {d: arm_scores.score_arms(of[d]) for d in of if of[d].rows > 1}
                found[model] = ModelScores(model, of, shown, scored)
    return sorted(found.values(), key=lambda one: (one.model == BASE, one.model))


def judge_model(settings: AccuracySettings, one: ModelScores) -> list[ClaimVerdict]:
    """A verdict for each claim about a model."""
    claims = []
    for claim in settings.claims:
        assert isinstance(claim.judge, ScoreQuantity)
        arms = [f"{one.model}/{arm}" for arm in claim.judge.arms]
        judge = claim.judge.model_copy(update={"arms": arms})
        named = {"claim": f"{one.model}: {claim.claim}", "judge": judge}
        claims.append(claim.model_copy(update=named))
    return judge_all(claims, Evidence({}, {p.case: p for p in one.parts.values()}, one.folder))


def write_accuracy(
    settings: AccuracySettings, folder: Path, scores: Path | None = None
) -> list[ClaimVerdict]:
    """Write page, verdicts, tables and figures of what `read_models` finds; the verdicts."""
    found = read_models(settings, folder, scores)
    verdicts = [verdict for one in found for verdict in judge_model(settings, one)]
    write_verdicts(verdicts, folder)
    trained = [one.model for one in found if not _is_testbed(one.model)]
    run = f"picbench reproduce {LIKELIHOOD if settings.likelihood else NAME} --models ID,ID"
    about = f"Nothing has been measured yet: `{run}`."
    if trained:
        about = f"Measured: {', '.join(trained)}."
    elif found:
        about = (
            "**No trained model from elsewhere has been measured here.** What follows is the "
            "testbed's, on synthetic rows; it shows what the command makes, and nothing about "
            f"other models. If you have weights:\n\n    {run} --device cuda"
        )
    texts = [about, claims_section(verdicts)]
    heading, cell, title = _WORDS[settings.likelihood]
    for one in found:
        texts.append(f"## {one.model}")
        name = f"kept-{arm_scores.file_name(one.model)}"
        if _draw(settings, one, folder / name):
            texts.append(f"![what arms keep of full recompute's score, {one.model}]({name}.svg)")
        texts += arm_scores.score_section(one.parts.values(), one.scores, {heading: cell})
    note = (
        "Harnesses disagree about scores: full recompute by one model has 0.36 to 0.54 on "
        "2WikiMQA. Only differences on the same rows compare, and these were measured on other "
        "prompts. In points of 100."
    )
    if settings.gaps:
        gaps = gap_table(settings, found)
        gaps.write(folder)
        texts += ["## Published gaps", note, gaps.section().strip()]
    write_whole(folder / PAGE, page(title, *texts).encode())
    return verdicts


def _beside_full(arm: str, score: ArmScore) -> str:
    return f"{score.score:.3f}" + ("" if arm == FULL else f"; {score.difference:+.3f}")


def _kept(arm: str, score: ArmScore) -> str:
    if arm == FULL or score.kept is None:
        return f"{score.score:.3f} nats"
    return f"{score.kept:.3f}; {score.linked:,.0f}"


#: By whether likelihood was measured: what stands above tables, in their cells, and above the page.
_WORDS: Mapping[bool, tuple[str, Callable[[str, ArmScore], str], str]] = {
    False: (
        "Mean score, and its difference to full recompute with a 95 % interval (paired by row):",
        _beside_full,
        "Accuracy of trained models",
    ),
    True: (
        "Under full recompute, by how many nats a token the right answer is likelier than without "
        "the chunks. Under other arms, the share of that which is kept, with a 95 % interval "
        "(paired by row); linked tokens a request:",
        _kept,
        "How likely trained models find right answers",
    ),
}


def _draw(settings: AccuracySettings, one: ModelScores, base: Path) -> bool:
    """What arms keep, with published values of the same data set hollow; whether there is any."""
    ours: dict[str, dict[str, Spot]] = {}
    for dataset, arms in one.scores.items():
        name = f"{dataset}{'' if 'rows' in one.parts[dataset].provenance else '-like'}"
        for arm, score in arms.items():
            if arm in settings.drawn and score.kept:
                value, low, high = (100 * share for share in score.kept)
                ours.setdefault(name, {})[arm] = Spot(value, 0, low, high)
    if not ours:
        return False
    printed: dict[str, dict[str, Spot]] = {}
    for gap in settings.gaps:
        for arm, (least, most) in gap.arms.items():
            low, high = 100 * least / gap.full[1], 100 * most / gap.full[0]
            for name in (gap.dataset, f"{gap.dataset}-like"):
                printed.setdefault(name, {})[arm] = Spot((low + high) / 2, 0, low, high)
    where = arm_scores.where_measured(one.parts.values())
    rows = f"{ends(part.rows for part in one.parts.values())} rows of each set"
    sources = ", ".join(dict.fromkeys(gap.source for gap in settings.gaps if gap.dataset))
    note = f"Scores of {rows} ({TESTBED}: synthetic ones). {where} Bars: 95 %."
    note += f" Hollow: other models and harnesses ({sources}), as they print it." * bool(sources)
    of = "what chunks are worth" if settings.likelihood else "full recompute's score"
    draw_dots(Panel(f"kept, % of {of}", "", note), ours, printed, base)
    return True


def gap_table(settings: AccuracySettings, found: Sequence[ModelScores]) -> Table:
    """A line for each published gap and each of our models on the same data set, in points."""
    rows: list[list[Value]] = []
    for gap in settings.gaps:
        for arm, (least, most) in gap.arms.items():
            low, high = f"{least - gap.full[1]:+.1f}", f"{most - gap.full[0]:+.1f}"
            printed = low if low == high else f"{low} to {high}"
            theirs: list[Value] = [gap.source, gap.model, gap.rows, arm, printed]
            ours: list[list[Value]] = []
            # Others were tuned, as those models here are not.
            for one in found:
                if score := one.scores.get(gap.dataset, {}).get(arm):
                    less = [100 * points for points in score.difference]
                    interval = f"{less[1]:+.1f} to {less[2]:+.1f}"
                    ours.append([one.model, mean_value(less[0], None, 1), interval])
            rows += [theirs + values for values in ours or [[None, None, None]]]
    head = ("source", "model", "rows", "arm", "gap", "our model", "our gap", "95 %")
    return report_table("published-gaps", "Arms less full recompute", head, rows)
