"""What is measured of trained models, what is claimed, and which gaps were published."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import Field

from picbench.compare.intervals import ratio_interval
from picbench.errors import ConfigError
from picbench.experiments import serve_arms
from picbench.experiments.arm_scores import (
    Case,
    RowInterval,
    ScoredPart,
    difference_of,
    file_name,
    read_parts,
)
from picbench.figures.canvas import Panel
from picbench.figures.panels import Spot, draw_dots
from picbench.files import write_whole
from picbench.papers.data import mean_value, report_table
from picbench.papers.judge import (
    BASE,
    CONFIDENCE,
    RESAMPLES,
    ClaimVerdict,
    Evidence,
    judge_all,
    write_verdicts,
)
from picbench.papers.page import PAGE, claims_section, places_table
from picbench.papers.reproduce import SCORES
from picbench.papers.settings import (
    FILES,
    Claim,
    Device,
    ScoreQuantity,
    StrictSettings,
    arm_names,
    read_yaml,
)
from picbench.tables.table import Table, Value
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


_FULL = "full"


@dataclass(frozen=True, slots=True)
class ArmGap:
    """An arm against full recompute on the same rows; `kept` is None where that scores nothing."""

    score: float
    difference: RowInterval
    kept: RowInterval | None
    linked: float


@dataclass(frozen=True, slots=True)
class ModelScores:
    """A model's parts by data set, where they are, and what its arms come to on each."""

    model: str
    parts: Mapping[str, ScoredPart]
    folder: str
    gaps: Mapping[tuple[str, str], ArmGap] = field(default_factory=dict)

    @property
    def conditions(self) -> str:
        """Where and on which rows it was measured, in a sentence."""
        facts = [part.facts for part in self.parts.values()]
        places = (f"{f['gpu']}, vLLM {f['vllm']}, {f['dtype']}" for f in facts)
        where = ", ".join(dict.fromkeys(places))
        commits = ", ".join(dict.fromkeys(str(f["commit"])[:7] for f in facts))
        return f"{where}; commit {commits}."

    @property
    def rows(self) -> str:
        """How many rows of which sets, and where they are from."""
        return ", ".join(
            f"{dataset} {part.rows} ({part.facts.get('rows', 'bundled')})"
            for dataset, part in self.parts.items()
        )

    def gap(self, dataset: str, arm: str) -> ArmGap | None:
        """An arm on a data set; None where it has not two rows."""
        return self.gaps.get((dataset, arm))


def _gaps(parts: Mapping[str, ScoredPart], arms: Sequence[str]) -> dict[tuple[str, str], ArmGap]:
    return {
        (dataset, arm): _gap(part, arm)
        for dataset, part in parts.items()
        for arm in arms
        if arm in part.arms and part.rows > 1
    }


def _gap(part: ScoredPart, arm: str) -> ArmGap:
    rows, full = part.arms[arm], part.arms[_FULL].score
    return ArmGap(
        fmean(rows.score),
        difference_of(rows.score, full),
        _kept(rows.score, full),
        sum(rows.linked) / sum(part.chunk),
    )


def _kept(scores: Sequence[float], full: Sequence[float]) -> RowInterval | None:
    found = ratio_interval(scores, full, CONFIDENCE, RESAMPLES) if any(full) else None
    return RowInterval(fmean(scores) / fmean(full), found.low, found.high) if found else None


def write_accuracy(
    settings: AccuracySettings, folder: Path, scores: Path | None = None
) -> list[ClaimVerdict]:
    """Write page, verdicts, tables and figures from the scores below `folder`; the verdicts.

    `scores` is a folder with the testbed's, which are shown beside those of other models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        replace(one, gaps=_gaps(one.parts, settings.arms))
        for one in read_models(settings, folder, scores)
    ]
    verdicts = [verdict for one in found for verdict in judge_model(settings, one)]
    write_verdicts(verdicts, folder)
    places_table(verdicts).write(folder)
    _scores_table(settings, found).write(folder)
    lines = [*_head(found), *claims_section(verdicts)]
    for one in found:
        lines += _model_section(settings, one, folder)
    gaps = gap_table(settings, found)
    gaps.write(folder)
    lines += ["## Published gaps", "", *_ABOUT_GAPS, gaps.section(), *_AGAIN]
    write_whole(folder / PAGE, "\n".join(lines).encode())
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
    claims = [of_model(claim, one.model) for claim in settings.claims]
    return judge_all(claims, Evidence({}, parts, one.folder))


def of_model(claim: Claim, model: str) -> Claim:
    """The claim about a model's scores."""
    assert isinstance(claim.judge, ScoreQuantity)
    judge = claim.judge.model_copy(update={"arms": [f"{model}/{arm}" for arm in claim.judge.arms]})
    return claim.model_copy(update={"claim": f"{model}: {claim.claim}", "judge": judge})


def _head(found: Sequence[ModelScores]) -> Iterator[str]:
    yield "# Accuracy of trained models"
    yield ""
    trained = [one.model for one in found if one.model.partition(":")[0] != BASE]
    if trained:
        yield f"Measured: {', '.join(trained)}."
    elif not found:
        yield f"Nothing has been measured yet: `picbench reproduce {NAME} --models ID,ID`."
    else:
        yield (
            "**No trained model from elsewhere has been measured here.** What follows is the "
            "testbed's, on synthetic rows; it shows what the command makes, and nothing about "
            "other models. Whoever has weights runs:"
        )
        yield ""
        yield f"    picbench reproduce {NAME} --models ID,ID --device cuda --dry-run"
        yield f"    picbench reproduce {NAME} --models ID,ID --device cuda"
    yield ""


def _model_section(settings: AccuracySettings, one: ModelScores, folder: Path) -> Iterator[str]:
    yield f"## {one.model}"
    yield ""
    yield f"{one.conditions} Rows: {one.rows}."
    yield ""
    name = f"kept-{file_name(one.model)}"
    if _draw(settings, one, folder / name):
        yield f"![what arms keep of full recompute's score, {one.model}]({name}.svg)"
        yield ""
    yield "Mean score, and its difference to full recompute with a 95 % interval (paired by row):"
    yield ""
    head = ("arm", *one.parts)
    rows = [
        (f"`{arm}`", *(_cell(one.gap(dataset, arm), arm) for dataset in one.parts))
        for arm in settings.arms
        if any(arm in part.arms for part in one.parts.values())
    ]
    yield markdown_table(head, rows)
    yield ""


def _cell(found: ArmGap | None, arm: str) -> str:
    if found is None:
        return "-"
    return f"{found.score:.3f}" if arm == _FULL else f"{found.score:.3f}; {found.difference.signed}"


def _draw(settings: AccuracySettings, one: ModelScores, base: Path) -> bool:
    """What arms keep, with published values of the same data set hollow; whether there is any."""
    ours = {
        f"{dataset}{'' if 'rows' in part.facts else '-like'}": {
            arm: Spot(100 * kept.value, 0, 100 * kept.low, 100 * kept.high)
            for arm in settings.drawn
            if (found := one.gap(dataset, arm)) and (kept := found.kept)
        }
        for dataset, part in one.parts.items()
    }
    ours = {name: spots for name, spots in ours.items() if spots}
    if not ours:
        return False
    printed: dict[str, dict[str, Spot]] = {}
    for gap in settings.gaps:
        for name in (gap.dataset, f"{gap.dataset}-like"):
            printed.setdefault(name, {}).update(_kept_spots(gap))
    counts = sorted({part.rows for part in one.parts.values()})
    rows = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    weights = "testbed weights, synthetic rows" if one.model == BASE else one.model
    sources = ", ".join(dict.fromkeys(gap.source for gap in settings.gaps if gap.dataset))
    note = (
        f"Scores: {weights}, n={rows}; {one.conditions} Bars: 95 %. Hollow: other models and "
        f"harnesses ({sources}), bars: what they print."
    )
    draw_dots(Panel("kept, % of full recompute's score", "", note), ours, printed, base)
    return True


def _kept_spots(gap: PublishedGap) -> dict[str, Spot]:
    found = {arm: gap.kept(arm) for arm in gap.arms}
    return {arm: Spot((low + high) / 2, 0, low, high) for arm, (low, high) in found.items()}


def _scores_table(settings: AccuracySettings, found: Sequence[ModelScores]) -> Table:
    """Everything in one table, for programs."""
    rows = [
        [one.model, dataset, arm, part.rows, *_numbers(gap)]
        for one in found
        for dataset, part in one.parts.items()
        for arm in settings.arms
        if (gap := one.gap(dataset, arm)) is not None
    ]
    less, kept = ("less full", "low", "high"), ("kept", "kept low", "kept high")
    head = ("model", "data set", "arm", "rows", "score", *less, *kept, "linked")
    return report_table("arms", "Every arm on every data set", head, rows)


def _numbers(gap: ArmGap) -> Iterator[Value]:
    less, kept = gap.difference, gap.kept
    yield from (gap.score, less.value, less.low, less.high)
    yield from (kept.value, kept.low, kept.high) if kept else (None, None, None)
    yield gap.linked


_ABOUT_GAPS = (
    "Harnesses disagree about scores: full recompute by one model has 0.36 to 0.54 on 2WikiMQA. "
    "Only differences on the same rows compare, and these were measured on other prompts. In "
    "points of 100.",
    "",
)

_AGAIN = (
    "## Again",
    "",
    f"    picbench reproduce {NAME} --models ID,ID --device cuda --output DIR",
    f"    picbench figures {NAME} --data results/papers --scores results/testbed/algorithms",
    "",
    "The first measures, goes on where it was stopped, and with `--dry-run` says how long it will "
    "take; the second makes this page from `scores/` below it, and from the testbed's scores.",
    "",
)


def gap_table(settings: AccuracySettings, found: Sequence[ModelScores]) -> Table:
    """A line for each published gap and each of our models on the same data set."""
    rows: list[list[Value]] = []
    for gap in settings.gaps:
        for arm in gap.arms:
            theirs: list[Value] = [gap.source, gap.model, gap.rows, arm, _range(gap.gap(arm))]
            # Others were tuned, as those models here are not.
            ours = list(_our_gaps(gap.dataset, arm, found)) if arm in settings.arms else []
            rows += [theirs + cells for cells in ours or [[None, None, None]]]
    head = ("source", "model", "rows", "arm", "gap", "our model", "our gap", "95 %")
    return report_table("published-gaps", "Arms less full recompute", head, rows)


def _our_gaps(dataset: str, arm: str, found: Sequence[ModelScores]) -> Iterator[list[Value]]:
    for one in found:
        if dataset and (gap := one.gap(dataset, arm)) is not None:
            less = gap.difference
            yield [one.model, mean_value(100 * less.value, None, 1), _interval(less)]


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:+.1f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _interval(found: RowInterval) -> str:
    return f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"


_CONFIG = "config.json"
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
        return self.name.partition(":")[0] == "testbed"


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
    positions = found.context
    if isinstance(found.path, str):
        _check_hub(found.path)
        positions = _positions(found.path)
    return NamedModel(name_of(spec), spec, positions)


def _positions(repository: str) -> int | None:
    with engine_packages():
        from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(repository)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"`models` {repository}: {reason}", hint=_ELSEWHERE) from error
    return getattr(config, "max_position_embeddings", None)


def _check_hub(repository: str) -> None:
    """One request where the libraries that load files would try again for half a minute."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_url,
        is_offline_mode,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(repository, _CONFIG), str):
        return
    if is_offline_mode():
        raise _absent(repository, "HF_HUB_OFFLINE forbids to fetch it")
    try:
        get_hf_file_metadata(hf_hub_url(repository, _CONFIG))
    except GatedRepoError as error:
        raise ConfigError(
            f"`models` {repository}: the hub asks for a token of a user who accepted its terms",
            hint="accept them on the model's page, then HF_TOKEN=... or hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise _absent(repository, "the hub has no such model, or shows it to others") from error
    # Also errors of the HTTP library under huggingface_hub, which differs between releases.
    except Exception as error:
        raise _absent(repository, "the hub cannot be reached") from error


def _absent(repository: str, why: str) -> ConfigError:
    return ConfigError(
        f"`models` {repository}: not in the hub's cache on this machine, and {why}",
        hint=_ELSEWHERE,
    )


_NEEDLE = "needle"


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """Rows of a model that are left of all that there are, prompt tokens, seconds."""

    model: str
    left: int
    total: int
    tokens: int
    seconds: float


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

    def estimates(self, start: float) -> list[ModelEstimate]:
        """What is left, by model; an engine starts in `start` seconds. Needs no model's files."""
        return [self._estimate(NamedModel(name_of(spec), spec), start) for spec in self.models]

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
        """How a model's rows are served."""
        size = self.settings.engines[self.device]
        return serve_arms.ServeSettings(
            output=self.output / SCORES,
            commit=self.commit,
            model=model.spec,
            name=model.name,
            dataset=tuple(self.settings.datasets),
            rows=self.settings.rows,
            algo=arm_names(self.settings.arms),
            device=self.device,
            dtype=size.dtype,
            kv_blocks=size.kv_blocks,
            max_requests=size.max_requests,
            data=self._data(model),
            longest=self._longest(model),
        )

    def _longest(self, model: NamedModel) -> int | None:
        """The longest prompt with its reply. Pads of some arms take an eighth of positions."""
        if model.trained_here:
            return None  # Bundled rows were made to fit it.
        wanted = self.settings.longest
        return wanted if model.positions is None else min(wanted, model.positions * 7 // 8)

    def _data(self, model: NamedModel) -> Mapping[str, str]:
        data = self.data or (BUNDLED if model.trained_here else HUB)
        needle = self.texts or (BUNDLED if data == HUB else data)
        wanted = dict.fromkeys(self.settings.datasets, data)
        return wanted | ({_NEEDLE: needle} if _NEEDLE in wanted else {})

    def _estimate(self, model: NamedModel, start: float) -> ModelEstimate:
        speed = self.settings.speeds[self.device]
        arms, rows = len(self.settings.arms), self.settings.rows
        left, tokens, seconds = 0, 0, 0.0
        for dataset, data in self._data(model).items():
            missing = max(0, rows - self._done(model, dataset))
            prompt = self._tokens(dataset, data) * missing * arms
            reply = datasets.find(dataset).max_tokens * missing * arms
            left += missing
            tokens += prompt
            seconds += prompt / speed.prompt + reply / speed.reply
        total = rows * len(self.settings.datasets)
        return ModelEstimate(model.name, left, total, tokens, seconds + (start if left else 0))

    def _tokens(self, dataset: str, data: str) -> int:
        """About how many tokens a prompt has."""
        known = self.settings.tokens["bundled" if data == BUNDLED else "hub"]
        return known.get(dataset) or self.settings.longest // 2

    def _done(self, model: NamedModel, dataset: str) -> int:
        path = self.output / SCORES / f"{Case(model.name, dataset).name}.json"
        return len(json.loads(path.read_bytes())["prompt"]) if path.exists() else 0
