"""How the replies to a data set's questions are scored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from picbench.errors import ConfigError
from picbench.run.arm import parse_arms
from picbench.settings import RunConfig
from picbench.store.records import Grader
from picbench.workloads import datasets, models
from picbench.workloads.datasets import Dataset
from picbench.workloads.datasets.grid import parse_grid
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.chat import find_chat
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import Rule, Scorer, find_scorer
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import Origin
from picbench.workloads.sources.row import BadRows
from picbench.workloads.sources.source import locate
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer
from picbench.workloads.traffic.corpus import SYNTHETIC
from picbench.workloads.traffic.draw import Stream, times
from picbench.workloads.traffic.file import check_tokens, read_requests
from picbench.workloads.traffic.settings import Traffic


def find_grader(
    dataset: str, rule: Rule, model: models.ModelSpec, tokenizer: Tokenizer
) -> tuple[str, Grader]:
    """The metric of a data set's replies, and the grader of them.

    Raises ConfigError where a package is missing.
    """
    if dataset == SYNTHETIC:
        return "score", Grader(_unscored)
    found = datasets.find(dataset)
    scorer = find_scorer(found, rule, lambda: tokenizer)
    return scorer.metric, make_grader(found, scorer, restates=model.restates)


def make_grader(dataset: Dataset, scorer: Scorer, *, restates: bool) -> Grader:
    """The grader of a data set's replies; of those that restate facts it takes the answer."""
    if not restates:
        return Grader(scorer.score, dataset.abstained)
    return Grader(
        partial(_score_restated, dataset.name, scorer),
        lambda reply: dataset.abstained(answer(dataset.name, reply)),
    )


def _unscored(reply: str, answers: Sequence[str]) -> None:
    """Random tokens have no answer."""


def _score_restated(dataset: str, scorer: Scorer, reply: str, answers: Sequence[str]) -> float:
    return scorer.score(answer(dataset, reply), answers)


#: Settings that requests in a file have had already.
_OF_DATASETS = ("drop", "data", "columns", "prompts", "grid", "chat")


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples in the order of the run; `grader` takes a reply and its right answers.

    `skipped` names the place of each malformed row that was left out, `origin` where rows from the
    hub are from, and `chat` whether the tokenizer's chat template is around prompts.
    `synthetic` rows were generated. `arrivals` are seconds from the start of the
    run, None in a closed loop. `preload` is run before anything is measured, so that the chunks
    in it are cached. `requests` is the fingerprint of the request file, where there is one.
    Chunks have documents only where an arm compiles them after these.
    """

    dataset: str
    metric: str
    model: models.ModelSpec
    samples: tuple[Sample, ...]
    grader: Grader
    skipped: tuple[str, ...] = ()
    origin: Origin | None = None
    chat: bool = False
    synthetic: bool = False
    arrivals: tuple[float, ...] | None = None
    preload: tuple[Sample, ...] = ()
    requests: str | None = None


def load_workload(config: RunConfig) -> Workload:
    """Read, render and tokenize what `config` names: a data set, or a request file.

    Raises ConfigError or DataError if that fails.
    """
    if bool(config.requests) == bool(config.dataset):
        raise ConfigError(
            "a run takes either a data set or a request file",
            hint="name one of `dataset` and `requests`",
        )
    if config.rate is None and config.arrivals != RunConfig.model_fields["arrivals"].default:
        raise ConfigError(f"`arrivals` {config.arrivals}: there is no rate", hint="give a `rate`")
    workload = _load_requests(config) if config.requests else _load_dataset(config)
    if config.rate is None:
        return workload
    return replace(workload, arrivals=_draw_arrivals(config, len(workload.samples)))


def _draw_arrivals(config: RunConfig, count: int) -> tuple[float, ...] | None:
    return times(
        Traffic(requests=count, seed=config.seed, rate=config.rate, process=config.arrivals)
    )


def _load_dataset(config: RunConfig) -> Workload:
    dataset = datasets.find(config.dataset)
    # Before the tokenizer, which takes seconds to load.
    source = locate(
        config.data,
        config.dataset,
        columns=config.columns,
        offline=config.offline,
        stream=config.limit is not None and not config.seed,
    )
    model = models.resolve(config.model)
    tokenizer = models.load_tokenizer(model)
    chat = find_chat(config.chat, tokenizer, wanted=dataset.chat)
    bad_rows = BadRows(skip=config.on_bad_row == "skip")
    samples = load_samples(
        dataset.name,
        source,
        tokenizer,
        limit=config.limit,
        seed=config.seed,
        context=_context(config.context, model),
        max_tokens=config.max_tokens or reply_tokens(dataset.name, model),
        prompts=Path(config.prompts) if config.prompts else None,
        chat=chat,
        grid=parse_grid(config.grid) if config.grid else None,
        bad_rows=bad_rows,
        documents=_wants_documents(config),
        drop=config.drop,
    )
    metric, grader = find_grader(dataset.name, config.scoring, model, tokenizer)
    return Workload(
        dataset=dataset.name,
        metric=metric,
        model=model,
        samples=tuple(samples),
        grader=grader,
        skipped=tuple(bad_rows.skipped),
        origin=source.origin,
        chat=chat is not None,
        synthetic=config.data == BUNDLED,
    )


def _load_requests(config: RunConfig) -> Workload:
    for name in _OF_DATASETS:
        if getattr(config, name) != RunConfig.model_fields[name].default:
            raise ConfigError(
                f"`{name}` and `requests`: requests are replayed as they were written",
                hint=f"leave `{name}` out, or name a `dataset`",
            )
    path = Path(config.requests or "")
    found = read_requests(path)
    model = models.resolve(config.model)
    stream = _shortened(found.stream, config)
    # First, as tokenizers need a minute and gigabytes for a text that no context holds.
    _check_fits(stream.samples, _context(config.context, model))
    tokenizer = models.load_tokenizer(model)
    check_tokens(stream, tokenizer, path)
    if not _wants_documents(config):
        stream = _without_documents(stream)
    metric, grader = find_grader(found.header.dataset, config.scoring, model, tokenizer)
    return Workload(
        dataset=found.header.dataset,
        metric=metric,
        model=model,
        samples=stream.samples,
        grader=grader,
        synthetic=found.header.synthetic,
        arrivals=stream.arrivals,
        preload=_preload(stream),
        requests=found.fingerprint,
    )


def _wants_documents(config: RunConfig) -> bool:
    return any(arm.documents for arm in parse_arms(config.algo))


def _without_documents(stream: Stream) -> Stream:
    return replace(
        stream,
        samples=tuple(sample.without_documents() for sample in stream.samples),
        preload=tuple(replace(chunk, before=None) for chunk in stream.preload),
    )


def _shortened(stream: Stream, config: RunConfig) -> Stream:
    count = config.limit or len(stream.samples)
    length = config.max_tokens
    samples = stream.samples[:count]
    return replace(
        stream,
        samples=tuple(replace(s, max_tokens=length) for s in samples) if length else samples,
        users=stream.users[:count],
        arrivals=stream.arrivals[:count] if stream.arrivals else None,
    )


def _preload(stream: Stream) -> tuple[Sample, ...]:
    """A request for each chunk to be cached, after the text that all prompts begin with."""
    first = stream.samples[0].segments[0]
    head = [first] if first.kind == "text" else []
    return tuple(
        Sample(f"preload-{number}", stream.samples[0].dataset, (*head, chunk), (), max_tokens=1)
        for number, chunk in enumerate(stream.preload)
    )


def _check_fits(samples: Sequence[Sample], context: int | None) -> None:
    for sample in samples:
        length = sample.prompt_tokens + sample.max_tokens
        if context is not None and length > context:
            raise ConfigError(
                f"{sample.source}: {length} tokens of prompt and reply, a context of {context}",
                hint="raise `context`, name another `model`, or draw requests of fewer chunks",
            )


def reply_tokens(dataset: str, model: models.ModelSpec) -> int | None:
    """How many tokens a reply may have, where the model decides and not the data set."""
    return MAX_TOKENS.get(dataset) if model.restates else None


def _context(wanted: int | None, model: models.ModelSpec) -> int | None:
    if wanted and model.context and wanted > model.context:
        raise ConfigError(
            f"`context` {wanted}: {model.name} has a context of {model.context} tokens",
            hint="lower `context`",
        )
    return wanted or model.context
