"""What is measured of trained models, what is claimed, and which gaps were published."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from picbench.errors import ConfigError
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_dots
from picbench.files import write_whole
from picbench.papers import serve_arms
from picbench.papers.arm_scores import FULL, ArmScore, Case, ScoredPart, file_name, read_parts
from picbench.papers.data import START, ends, mean_value, report_table
from picbench.papers.judge import RESAMPLES, ClaimVerdict, Evidence, judge_all, write_verdicts
from picbench.papers.page import PAGE, claims_section, places_table
from picbench.papers.reproduce import SCORES, Estimate
from picbench.papers.settings import (
    BASE,
    FILES,
    TESTBED,
    Claim,
    Device,
    ScoreQuantity,
    StrictSettings,
    arm_names,
    read_yaml,
)
from picbench.tables.page import paragraphs
from picbench.tables.table import NOTHING, Table, Value
from picbench.tables.table import table as markdown_table
from picbench.workloads import datasets, models
from picbench.workloads.models import engine_packages
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import HUB

NAME = "accuracy"


class EngineSize(StrictSettings):
    """The pool of an engine in blocks of 16 tokens, how many requests run at a time, its type."""

    kv_blocks: int = Field(ge=1024)
    max_requests: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"]


class TokenSpeed(StrictSettings):
    """Tokens a second of all arms in one batch."""

    prompt: float = Field(gt=0)
    reply: float = Field(gt=0)


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

    def gap(self, arm: str) -> tuple[float, float]:
        """What an arm loses or gains against full recompute, in points, at worst and at best."""
        low, high = self.arms[arm]
        return low - self.full[1], high - self.full[0]

    def kept(self, arm: str) -> tuple[float, float]:
        """What an arm keeps of full recompute's score, in percent, at worst and at best."""
        low, high = self.arms[arm]
        return 100 * low / self.full[1], 100 * high / self.full[0]


class AccuracySettings(StrictSettings):
    """Models, data sets and arms; sizes by device; claims, and published gaps.

    Prompts above `longest` tokens, reply included, lose their middle. `drawn` are the arms of the
    figure. `tokens` (by source and data set) and `speeds` (by device) are for estimates.
    """

    models: list[str] = Field(min_length=1)
    datasets: list[str] = Field(min_length=1)
    rows: int = Field(ge=2)
    longest: int = Field(ge=1024)
    arms: list[str] = Field(min_length=2)
    drawn: list[str]
    engines: Mapping[Literal["cpu", "cuda"], EngineSize]
    tokens: Mapping[Literal["bundled", "hub"], Mapping[str, int]]
    speeds: Mapping[Literal["cpu", "cuda"], TokenSpeed]
    claims: list[Claim]
    gaps: list[PublishedGap]


def read_accuracy(path: Path | None = None) -> AccuracySettings:
    """The settings that come with picbench, or a file's; ConfigError for mistakes in them."""
    path = path or FILES / f"{NAME}.yaml"
    found = read_yaml(AccuracySettings, path)
    arm_names(found.arms)
    missing = [arm for arm in found.drawn if arm not in found.arms]
    if missing:
        raise ConfigError(f"`settings` {path}: drawn: {missing[0]} is not among `arms`")
    return found


@dataclass(frozen=True, slots=True)
class ModelScores:
    """A model's parts by data set, and where they are."""

    model: str
    parts: Mapping[str, ScoredPart]
    folder: str

    @property
    def conditions(self) -> str:
        """Where it was measured, in a sentence."""
        facts = [part.facts for part in self.parts.values()]
        where = dict.fromkeys(f"{f['gpu']}, vLLM {f['vllm']}, {f['dtype']}" for f in facts)
        commits = dict.fromkeys(str(f["commit"])[:7] for f in facts)
        return f"{', '.join(where)}; commit {', '.join(commits)}."


#: Arms against full recompute on the same rows, by data set and arm.
Gaps = Mapping[tuple[str, str], ArmScore]


def write_accuracy(
    settings: AccuracySettings, folder: Path, scores: Path | None = None
) -> list[ClaimVerdict]:
    """Write page, verdicts, tables and figures from the scores below `folder`; the verdicts.

    `scores` is a folder with the testbed's, which are shown beside those of other models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[ModelScores, Gaps]] = []
    for one in read_models(settings, folder, scores):
        gaps: Gaps = {
            (dataset, arm): ArmScore.of(part, arm, RESAMPLES)
            for dataset, part in one.parts.items()
            for arm in settings.arms
            if arm in part.arms and part.rows > 1
        }
        found.append((one, gaps))
    verdicts = [verdict for one, _ in found for verdict in judge_model(settings, one)]
    write_verdicts(verdicts, folder)
    published = gap_table(settings, found)
    for table in (places_table(verdicts), _scores_table(found), published):
        table.write(folder)
    texts = ["# Accuracy of trained models", _measured([one.model for one, _ in found])]
    texts.append("\n".join(claims_section(verdicts)).strip())
    for one, gaps in found:
        texts += _model_section(settings, one, gaps, folder)
    texts += ["## Published gaps", _ABOUT_GAPS, published.section().strip(), "## Again", _AGAIN]
    write_whole(folder / PAGE, f"{paragraphs(*texts)}\n".encode())
    return verdicts


def read_models(settings: AccuracySettings, folder: Path, scores: Path | None) -> list[ModelScores]:
    """The models that were measured, the testbed last; whole rows of the settings' data sets."""
    found: dict[str, ModelScores] = {}
    own = folder / SCORES
    for place, only in ((own, None), (scores, BASE)):
        if place is None or not any(place.glob("*.json")):
            continue
        parts = {part.case: part for part in read_parts(place)}
        for model in dict.fromkeys(case.model for case in parts):
            if model in found or only not in (None, model):
                continue
            of = {d: parts[case] for d in settings.datasets if (case := Case(model, d)) in parts}
            if of:
                where = SCORES if place == own else place.as_posix()
                found[model] = ModelScores(model, of, where)
    return sorted(found.values(), key=lambda one: (one.model == BASE, one.model))


def judge_model(settings: AccuracySettings, one: ModelScores) -> list[ClaimVerdict]:
    """A verdict for each claim about a model."""
    parts = {part.case: part for part in one.parts.values()}
    claims = []
    for claim in settings.claims:
        assert isinstance(claim.judge, ScoreQuantity)
        arms = [f"{one.model}/{arm}" for arm in claim.judge.arms]
        judge = claim.judge.model_copy(update={"arms": arms})
        named = {"claim": f"{one.model}: {claim.claim}", "judge": judge}
        claims.append(claim.model_copy(update=named))
    return judge_all(claims, Evidence({}, parts, one.folder))


def _measured(found: Sequence[str]) -> str:
    trained = [model for model in found if model.partition(":")[0] != BASE]
    if trained:
        return f"Measured: {', '.join(trained)}."
    run = f"picbench reproduce {NAME} --models ID,ID"
    if not found:
        return f"Nothing has been measured yet: `{run}`."
    return (
        "**No trained model from elsewhere has been measured here.** What follows is the "
        "testbed's, on synthetic rows; it shows what the command makes, and nothing about other "
        f"models. Whoever has weights runs:\n\n    {run} --device cuda --dry-run\n"
        f"    {run} --device cuda"
    )


def _model_section(
    settings: AccuracySettings, one: ModelScores, gaps: Gaps, folder: Path
) -> Iterator[str]:
    def cell(dataset: str, arm: str) -> str:
        gap = gaps.get((dataset, arm))
        if gap is None:
            return NOTHING
        return f"{gap.score:.3f}" if arm == FULL else f"{gap.score:.3f}; {gap.difference.signed}"

    rows = ", ".join(
        f"{dataset} {part.rows} ({part.facts.get('rows', 'bundled')})"
        for dataset, part in one.parts.items()
    )
    yield f"## {one.model}"
    yield f"{one.conditions} Rows: {rows}."
    name = f"kept-{file_name(one.model)}"
    if _draw(settings, one, gaps, folder / name):
        yield f"![what arms keep of full recompute's score, {one.model}]({name}.svg)"
    yield "Mean score, and its difference to full recompute with a 95 % interval (paired by row):"
    lines = [
        (f"`{arm}`", *(cell(dataset, arm) for dataset in one.parts))
        for arm in settings.arms
        if any(arm in part.arms for part in one.parts.values())
    ]
    yield markdown_table(("arm", *one.parts), lines)


def _draw(settings: AccuracySettings, one: ModelScores, gaps: Gaps, base: Path) -> bool:
    """What arms keep, with published values of the same data set hollow; whether there is any."""
    ours: dict[str, dict[str, Spot]] = {}
    for (dataset, arm), gap in gaps.items():
        if arm in settings.drawn and (kept := gap.kept):
            name = f"{dataset}{'' if 'rows' in one.parts[dataset].facts else '-like'}"
            spot = Spot(100 * kept.value, 0, 100 * kept.low, 100 * kept.high)
            ours.setdefault(name, {})[arm] = spot
    if not ours:
        return False
    printed: dict[str, dict[str, Spot]] = {}
    for published in settings.gaps:
        ranges = {arm: published.kept(arm) for arm in published.arms}
        spots = {arm: Spot((low + high) / 2, 0, low, high) for arm, (low, high) in ranges.items()}
        for name in (published.dataset, f"{published.dataset}-like"):
            printed.setdefault(name, {}).update(spots)
    weights = f"{TESTBED}, synthetic rows" if one.model == BASE else one.model
    sources = ", ".join(dict.fromkeys(gap.source for gap in settings.gaps if gap.dataset))
    note = (
        f"Scores: {weights}, n={ends(part.rows for part in one.parts.values())}; {one.conditions} "
        f"Bars: 95 %. Hollow: other models and harnesses ({sources}), bars: what they print."
    )
    draw_dots(Panel("kept, % of full recompute's score", "", note), ours, printed, base)
    return True


def _scores_table(found: Sequence[tuple[ModelScores, Gaps]]) -> Table:
    """Everything in one table, for programs."""
    head = ("model", "data set", "arm", "rows", "score", "less full", "low", "high", "kept")
    rows: list[list[Value]] = []
    for one, gaps in found:
        for (dataset, arm), gap in gaps.items():
            less, kept = gap.difference, gap.kept
            ratio = (kept.value, kept.low, kept.high) if kept else (None, None, None)
            row: list[Value] = [one.model, dataset, arm, gap.rows, gap.score]
            rows.append([*row, less.value, less.low, less.high, *ratio, gap.share])
    columns = (*head, "kept low", "kept high", "linked")
    return report_table("arms", "Every arm on every data set", columns, rows)


_ABOUT_GAPS = (
    "Harnesses disagree about scores: full recompute by one model has 0.36 to 0.54 on 2WikiMQA. "
    "Only differences on the same rows compare, and these were measured on other prompts. In "
    "points of 100."
)

_AGAIN = (
    f"    picbench reproduce {NAME} --models ID,ID --device cuda --output DIR\n"
    f"    picbench figures {NAME} --data results/papers --scores results/testbed/algorithms\n\n"
    "The first measures, goes on where it was stopped, and with `--dry-run` says how long it will "
    "take; the second makes this page from `scores/` below it, and from the testbed's scores."
)


def gap_table(settings: AccuracySettings, found: Sequence[tuple[ModelScores, Gaps]]) -> Table:
    """A line for each published gap and each of our models on the same data set."""
    rows: list[list[Value]] = []
    for gap in settings.gaps:
        for arm in gap.arms:
            low, high = (f"{end:+.1f}" for end in gap.gap(arm))
            printed = low if low == high else f"{low} to {high}"
            ours: list[list[Value]] = []
            # Others were tuned, as those models here are not.
            for one, gaps in found:
                if own := gaps.get((gap.dataset, arm)):
                    less = own.difference
                    interval = f"{100 * less.low:+.1f} to {100 * less.high:+.1f}"
                    ours.append([one.model, mean_value(100 * less.value, None, 1), interval])
            theirs: list[Value] = [gap.source, gap.model, gap.rows, arm, printed]
            rows += [theirs + values for values in ours or [[None, None, None]]]
    head = ("source", "model", "rows", "arm", "gap", "our model", "our gap", "95 %")
    return report_table("published-gaps", "Arms less full recompute", head, rows)


_ELSEWHERE = "`models` takes OWNER/NAME on the hub, a folder with its files, or testbed"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model: what files and tables call it, what an engine loads, how many tokens it can take.

    `positions` is None where its configuration does not say so, or was not read.
    """

    name: str
    spec: str
    positions: int | None = None

    @property
    def trained_here(self) -> bool:
        """Whether it is a testbed, whose rows are the bundled ones."""
        return self.name.partition(":")[0] == BASE


def name_of(spec: str) -> str:
    """What files and tables call a model: its name on the hub, or that of its folder.

    A relative folder OWNER/NAME has its name on the hub.
    """
    path = Path(spec).expanduser()
    if not path.is_dir() or (not path.is_absolute() and len(path.parts) == 2):
        return spec
    return path.resolve().name


def find_model(spec: str) -> NamedModel:
    """The model called `spec`, whose files are here or can be fetched.

    Raises ConfigError, which says what to do, where they cannot.
    """
    found = models.resolve(spec)
    if isinstance(found.path, Path):
        return NamedModel(name_of(spec), spec, found.context)
    _check_hub(found.path)
    with engine_packages():
        from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(found.path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"`models` {found.path}: {reason}", hint=_ELSEWHERE) from error
    return NamedModel(name_of(spec), spec, getattr(config, "max_position_embeddings", None))


def _check_hub(repository: str) -> None:
    """One request where the libraries that load files would try again for half a minute."""
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def absent(why: str) -> ConfigError:
        where = "not in the hub's cache on this machine"
        return ConfigError(f"`models` {repository}: {where}, and {why}", hint=_ELSEWHERE)

    file = "config.json"
    if isinstance(hub.try_to_load_from_cache(repository, file), str):
        return
    if hub.is_offline_mode():
        raise absent("HF_HUB_OFFLINE forbids to fetch it")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, file))
    except GatedRepoError as error:
        raise ConfigError(
            f"`models` {repository}: the hub asks for a token of a user who accepted its terms",
            hint="accept them on the model's page, then HF_TOKEN=... or hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise absent("the hub has no such model, or shows it to others") from error
    # Also errors of the HTTP library under huggingface_hub, which differs between releases.
    except Exception as error:
        raise absent("the hub cannot be reached") from error


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

    def estimates(self) -> list[Estimate]:
        """What is left, by model, with the start of an engine for each. Needs no model's files."""
        return [self._estimate(NamedModel(name_of(spec), spec)) for spec in self.models]

    def run(self) -> None:
        """Measure what is missing. All models are found before anything is measured.

        Raises ConfigError for a model or data that cannot be had.
        """
        found = [find_model(spec) for spec in self.models]
        names = [model.name for model in found]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"`models`: two are called {max(names, key=names.count)}", hint="rename a folder"
            )
        for model in found:
            serve_arms.measure(self.serving(model))

    def serving(self, model: NamedModel) -> serve_arms.ServeSettings:
        """How a model's rows are served; bundled rows were made to fit the testbed."""
        longest = None if model.trained_here else self.settings.longest
        if longest and model.positions is not None:
            longest = min(longest, model.positions * 7 // 8)  # Pads of some arms take the rest.
        return serve_arms.ServeSettings(
            output=self.output / SCORES,
            commit=self.commit,
            model=model.spec,
            name=model.name,
            dataset=tuple(self.settings.datasets),
            rows=self.settings.rows,
            algo=arm_names(self.settings.arms),
            device=self.device,
            data=self._data(model),
            longest=longest,
            **self.settings.engines[self.device].model_dump(),
        )

    def _data(self, model: NamedModel) -> Mapping[str, str]:
        data = self.data or (BUNDLED if model.trained_here else HUB)
        needle = self.texts or (BUNDLED if data == HUB else data)
        return {name: needle if name == "needle" else data for name in self.settings.datasets}

    def _estimate(self, model: NamedModel) -> Estimate:
        settings, speed = self.settings, self.settings.speeds[self.device]
        left, tokens, seconds = 0, 0, 0.0
        for dataset, data in self._data(model).items():
            path = self.output / SCORES / f"{Case(model.name, dataset).name}.json"
            done = len(json.loads(path.read_bytes())["prompt"]) if path.exists() else 0
            missing = max(0, settings.rows - done)
            known = settings.tokens["bundled" if data == BUNDLED else "hub"]
            about = known.get(dataset) or settings.longest // 2
            prompt = about * missing * len(settings.arms)
            reply = datasets.find(dataset).max_tokens * missing * len(settings.arms)
            left += missing
            tokens += prompt
            seconds += prompt / speed.prompt + reply / speed.reply
        seconds += START[self.device] if left else 0
        total = settings.rows * len(settings.datasets)
        return Estimate(model.name, "rows", left, total, tokens, seconds)
