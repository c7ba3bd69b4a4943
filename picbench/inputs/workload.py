"""A workload as a run sees it: samples, the model that they were tokenized for, a score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from picbench.errors import ConfigError
from picbench.run.config import RunConfig
from picbench.workloads import datasets, models
from picbench.workloads.datasets.grid import parse_grid
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.chat import find_chat
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import Scorer, find_scorer
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import Origin
from picbench.workloads.sources.row import BadRows
from picbench.workloads.sources.source import locate
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer
from picbench.workloads.traffic.corpus import SYNTHETIC

#: Takes a reply and its right answers; None where a reply cannot be scored.
Score = Callable[[str, Sequence[str]], float | None]


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples in the order of the run; `score` takes a reply and its right answers.

    `skipped` says of each malformed row that was left out where it stands, `origin` where rows
    from the hub are from, and `chat` whether the tokenizer's chat template is around prompts.
    `synthetic` says that the rows were generated. `arrivals` are seconds from the start of the
    run, None in a closed loop. `preload` is run before anything is measured, so that the chunks
    in it are cached. `requests` is the fingerprint of the request file, where there is one.
    """

    dataset: str
    metric: str
    model: models.ModelSpec
    samples: tuple[Sample, ...]
    score: Score
    skipped: tuple[str, ...] = ()
    origin: Origin | None = None
    chat: bool = False
    synthetic: bool = False
    arrivals: tuple[float, ...] | None = None
    preload: tuple[Sample, ...] = ()
    requests: str | None = None


def load_workload(config: RunConfig) -> Workload:
    """Read, render and tokenize what `config` names; ConfigError or DataError if that fails."""
    dataset = datasets.find(config.dataset)
    # Before a tokenizer is loaded, which takes seconds.
    source = locate(config.data, config.dataset, offline=config.offline)
    model = models.resolve(config.model)
    tokenizer = models.load_tokenizer(model)
    chat = find_chat(config.chat, tokenizer, wanted=dataset.chat)
    bad_rows = BadRows(skip=config.on_bad_row == "skip")
    samples = load_samples(
        dataset.name,
        source.path,
        tokenizer,
        limit=config.limit,
        seed=config.seed,
        context=_context(config.context, model),
        max_tokens=config.max_tokens or reply_tokens(dataset.name, model),
        prompts=Path(config.prompts) if config.prompts else None,
        chat=chat,
        grid=parse_grid(config.grid) if config.grid else None,
        bad_rows=bad_rows,
    )
    metric, score = score_of(dataset.name, config, model, tokenizer)
    return Workload(
        dataset=dataset.name,
        metric=metric,
        model=model,
        samples=tuple(samples),
        score=score,
        skipped=tuple(bad_rows.skipped),
        origin=source.origin,
        chat=chat is not None,
        synthetic=config.data == BUNDLED,
    )


def score_of(
    dataset: str, config: RunConfig, model: models.ModelSpec, tokenizer: Tokenizer
) -> tuple[str, Score]:
    """The metric of a data set's replies, and the function that scores them."""
    if dataset == SYNTHETIC:
        return "score", _unscored
    scorer = find_scorer(datasets.find(dataset), config.scoring, tokenizer)
    if model.restates:
        return scorer.metric, partial(_score_restated, dataset, scorer)
    return scorer.metric, scorer.score


def reply_tokens(dataset: str, model: models.ModelSpec) -> int | None:
    """How many tokens a reply may have, where the model decides and not the data set."""
    return MAX_TOKENS.get(dataset) if model.restates else None


def _unscored(reply: str, answers: Sequence[str]) -> None:
    """Random tokens ask nothing."""


def _score_restated(dataset: str, scorer: Scorer, reply: str, answers: Sequence[str]) -> float:
    return scorer.score(answer(dataset, reply), answers)


def _context(wanted: int | None, model: models.ModelSpec) -> int | None:
    if wanted and model.context and wanted > model.context:
        raise ConfigError(
            f"`context` {wanted}: {model.name} has a context of {model.context} tokens",
            hint="lower `context`",
        )
    return wanted or model.context
