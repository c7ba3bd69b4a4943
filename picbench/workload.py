"""A workload as a run sees it: samples, the model that they were tokenized for, a score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from picbench.config import RunConfig
from picbench.errors import ConfigError
from picbench.workloads import datasets, models
from picbench.workloads.load import load_samples
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import score
from picbench.workloads.source import locate
from picbench.workloads.testbed.reply import MAX_TOKENS, answer


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples in the order of the run; `score` takes a reply and its right answers."""

    dataset: str
    metric: str
    model: models.Model
    samples: tuple[Sample, ...]
    score: Callable[[str, Sequence[str]], float]


def load_workload(config: RunConfig) -> Workload:
    """Read, render and tokenize what `config` names; ConfigError or DataError if that fails."""
    dataset = datasets.find(config.dataset)
    locate(config.data, config.dataset)  # Before a tokenizer is loaded, which takes seconds.
    model = models.resolve(config.model)
    samples = load_samples(
        dataset.name,
        config.data,
        models.load_tokenizer(model),
        limit=config.limit,
        seed=config.seed,
        context=_context(config.context, model),
        max_tokens=config.max_tokens or _reply_tokens(dataset.name, model),
        prompts=Path(config.prompts) if config.prompts else None,
        on_bad_row=config.on_bad_row,
    )
    reader = _score_restated if model.restates else score
    return Workload(
        dataset.name, dataset.metric, model, tuple(samples), partial(reader, dataset.name)
    )


def _reply_tokens(dataset: str, model: models.Model) -> int | None:
    return MAX_TOKENS.get(dataset) if model.restates else None


def _score_restated(dataset: str, reply: str, answers: Sequence[str]) -> float:
    return score(dataset, answer(dataset, reply), answers)


def _context(wanted: int | None, model: models.Model) -> int | None:
    if wanted and model.context and wanted > model.context:
        raise ConfigError(
            f"--context {wanted}: {model.name} has a context of {model.context} tokens",
            hint="lower --context",
        )
    return wanted or model.context
