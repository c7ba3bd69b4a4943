"""The requests of a run, and how replies to them are scored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from picbench.errors import ConfigError, DataError
from picbench.run.arm import all_arms
from picbench.settings import RunConfig
from picbench.store.records import Grader
from picbench.workloads import datasets, models
from picbench.workloads.datasets.grid import parse_grid
from picbench.workloads.load import load_samples
from picbench.workloads.metrics.chinese import unspaced
from picbench.workloads.metrics.f1 import wordless
from picbench.workloads.prompts.chat import find_chat
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import (
    Rule,
    find_scorer,
    parse_scoring,
    right_answers,
    scorer_by_name,
)
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.hub import Origin
from picbench.workloads.sources.row import BadRows, placed
from picbench.workloads.sources.source import locate
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer
from picbench.workloads.traffic.chunk_source import ChunkSource, build
from picbench.workloads.traffic.corpus import LOGGED, SYNTHETIC
from picbench.workloads.traffic.draw import Stream, draw, times
from picbench.workloads.traffic.file import check_tokens
from picbench.workloads.traffic.replay import open_requests
from picbench.workloads.traffic.settings import Traffic

#: Requests that are drawn where no number is given, and the exponent of their chunks' popularity.
_DRAWN, _ZIPF = 48, 0.8


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples in the order of the run; `grader` takes a reply and its right answers.

    `skipped` names the place of each malformed row that was left out, `origin` where rows from the
    hub are from, and `chat` whether the tokenizer's chat template is around prompts. `arrivals` are
    seconds from the start of the run, None in a closed loop. `preload` is run before anything is
    measured, so that the chunks in it are cached. `requests` is the fingerprint of the request
    file. Chunks have documents only where an arm compiles them after these. `golds` are the token
    ids of right answers by sample, where their likelihood is measured.
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
    golds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def load_workload(config: RunConfig) -> Workload:
    """Read, render and tokenize what `config` names: a data set, or a file of requests.

    Raises ConfigError or DataError if that fails.
    """
    if bool(config.requests) == bool(config.dataset):
        raise ConfigError(
            "a run takes either a data set or a request file",
            hint="name one of `dataset` and `requests`",
        )
    if config.rate is None and config.arrivals != RunConfig.model_fields["arrivals"].default:
        raise ConfigError(f"`arrivals` {config.arrivals}: there is no rate", hint="give a `rate`")
    # Servers elsewhere have the weights, and what is read here is the tokenizer alone.
    model = models.resolve(config.model, weights=any(config.algo))
    if config.context and model.context and config.context > model.context:
        raise ConfigError(
            f"`context` {config.context}: {model.name} has a context of {model.context} tokens",
            hint="lower `context`",
        )
    if config.requests:
        load = _load_requests
    else:
        load = _load_dataset if config.reuse is None else _draw_requests
    workload = load(config, model, config.context or model.context)
    if config.rate is None:
        return workload
    requests, process = len(workload.samples), config.arrivals
    traffic = Traffic(requests=requests, seed=config.seed, rate=config.rate, process=process)
    return replace(workload, arrivals=times(traffic))


def _load_dataset(config: RunConfig, model: models.ModelSpec, context: int | None) -> Workload:
    dataset = datasets.find(config.dataset)
    # Before the tokenizer, which takes seconds to load.
    source = locate(
        config.data,
        config.dataset,
        columns=config.columns,
        offline=config.offline,
        stream=config.limit is not None and not config.seed,
        generated=dataset.generated,
    )
    scoring, tokenizer = parse_scoring(config.scoring), models.load_tokenizer(model)
    chat = find_chat(config.chat, tokenizer, wanted=dataset.chat)
    bad_rows = BadRows(skip=config.on_bad_row == "skip")
    loaded = load_samples(
        dataset.name,
        source,
        tokenizer,
        limit=config.limit,
        seed=config.seed,
        context=context,
        max_tokens=config.max_tokens or reply_tokens(dataset.name, model),
        prompts=Path(config.prompts) if config.prompts else None,
        chat=chat,
        grid=parse_grid(config.grid) if config.grid else None,
        bad_rows=bad_rows,
        documents=any(arm.documents for arm in all_arms(config)),
        drop=config.drop,
    )
    samples = _countable(loaded, scoring.rule, bad_rows)
    metric, grader = find_grader(dataset.name, scoring.rule, model.restates, lambda: tokenizer)
    return Workload(
        dataset=dataset.name,
        metric=metric,
        model=model,
        samples=samples,
        grader=grader,
        skipped=tuple(bad_rows.skipped),
        origin=source.origin,
        chat=chat is not None,
        synthetic=config.data == BUNDLED,
        golds=right_answers(samples, tokenizer) if scoring.likelihood else {},
    )


def _load_requests(config: RunConfig, model: models.ModelSpec, context: int | None) -> Workload:
    _refuse(
        config,
        ("drop", "data", "columns", "prompts", "grid", "chat", "reuse"),
        "`requests`: requests are replayed as they were written",
        "name a `dataset`",
    )
    path, load = Path(config.requests or ""), cache(lambda: models.load_tokenizer(model))
    found = open_requests(path, load)
    bad = BadRows(skip=config.on_bad_row == "skip")
    # First, as tokenizers need a minute for a text that is longer.
    of_file = _fitting(found.stream, config.max_tokens, config.limit, context, bad)
    tokenizer = load()
    check_tokens(of_file, tokenizer, path)
    header = found.header
    workload = _of_stream(config, model, of_file, header.dataset, tokenizer)
    return replace(
        workload,
        synthetic=header.synthetic,
        requests=found.fingerprint,
        skipped=tuple(bad.skipped),
    )


def _draw_requests(config: RunConfig, model: models.ModelSpec, context: int | None) -> Workload:
    _refuse(
        config,
        ("drop", "prompts", "grid", "chat"),
        "`reuse`: requests are drawn from the rows' chunks",
        "`reuse`",
    )
    source = ChunkSource(
        dataset=config.dataset,
        data=config.data,
        columns=config.columns,
        max_tokens=config.max_tokens or reply_tokens(config.dataset, model),
    )
    tokenizer = models.load_tokenizer(model)
    corpus = build(source, tokenizer, 0)
    topics = [len(topic.chunks) for topic in corpus.topics]
    # The topic's own chunks, and as many of other topics before and after them.
    chunks = min(2 * max(topics), sum(topics))
    traffic = Traffic(
        requests=config.limit or _DRAWN,
        seed=config.seed,
        chunks=(chunks, chunks),
        zipf=_ZIPF,
        cached=config.reuse,
    )
    drawn = draw(traffic, corpus)
    drawn = _fitting(drawn, None, None, context, BadRows())
    workload = _of_stream(config, model, drawn, config.dataset, tokenizer)
    return replace(workload, synthetic=source.synthetic)


def _refuse(config: RunConfig, names: Sequence[str], why: str, other: str) -> None:
    """Raise ConfigError for settings that mean nothing beside another one."""
    for name in names:
        if getattr(config, name) != RunConfig.model_fields[name].default:
            hint = f"leave `{name}` out, or {other}"
            raise ConfigError(f"`{name}` and {why}", hint=hint)


def _fitting(
    found: Stream, most: int | None, limit: int | None, context: int | None, bad: BadRows
) -> Stream:
    """The first `limit` requests with replies of `most` tokens; those too long go to `bad`."""
    kept: list[int] = []
    samples = [replace(sample, max_tokens=most or sample.max_tokens) for sample in found.samples]
    for number, sample in enumerate(samples):
        if len(kept) == limit:
            break
        needed = sample.prompt_tokens + sample.max_tokens
        if context is None or needed <= context:
            kept.append(number)
            continue
        problem = DataError(
            f"{needed} tokens of prompt and reply, a context of {context}",
            hint="raise `context`, name another `model`, or draw requests of fewer chunks",
        )
        bad.reject(placed(sample.source or sample.id, problem))
    if not kept:
        raise DataError("no request fits the context", hint=f"the first: {bad.skipped[0]}")
    arrivals = tuple(found.arrivals[number] for number in kept) if found.arrivals else None
    users = tuple(found.users[number] for number in kept)
    return Stream(tuple(samples[number] for number in kept), users, arrivals, found.preload)


def _of_stream(
    config: RunConfig, model: models.ModelSpec, found: Stream, dataset: str, tokenizer: Tokenizer
) -> Workload:
    """The workload of requests that were drawn."""
    samples, scoring = found.samples, parse_scoring(config.scoring)
    # Chunks to be cached come after the text that all prompts begin with.
    first, arrivals = samples[0].segments[0], found.arrivals
    head = [first] if first.kind == "text" else []
    preload = tuple(
        Sample(f"preload-{number}", samples[0].dataset, (*head, chunk), (), max_tokens=1)
        for number, chunk in enumerate(found.preload)
    )
    if not any(arm.documents for arm in all_arms(config)):
        samples = tuple(sample.without_documents() for sample in samples)
        preload = tuple(sample.without_documents() for sample in preload)
    samples = _countable(samples, scoring.rule, BadRows())
    metric, grader = find_grader(dataset, scoring.rule, model.restates, lambda: tokenizer)
    return Workload(
        dataset=dataset,
        metric=metric,
        model=model,
        samples=samples,
        grader=grader,
        arrivals=arrivals[: len(samples)] if arrivals else None,
        preload=preload,
        golds=right_answers(samples, tokenizer) if scoring.likelihood else {},
    )


def _countable(samples: Iterable[Sample], rule: Rule, bad: BadRows) -> tuple[Sample, ...]:
    """The samples with answers whose words `rule` can count; the others go to `bad`."""
    hint = "`scoring=longbench-zh` counts Chinese words, `scoring=cacheblend` tokens"
    found = []
    for sample in samples:
        if problem := _problem(sample.answers, rule):
            bad.reject(placed(sample.source, DataError(problem, hint=hint)))
        else:
            found.append(sample)
    if not found:
        raise DataError("no row is left", hint=f"the first: {bad.skipped[0]}")
    return tuple(found)


def _problem(answers: Sequence[str], rule: Rule) -> str:
    """Why `rule` scores no reply against these answers; empty where it does."""
    if answers and all(map(wordless, answers)):
        return f"no reply can match {answers[0]!r}, which has no word"
    language = unspaced(answers)
    if not language or rule == "cacheblend" or (rule, language) == ("longbench-zh", "Chinese"):
        return ""
    return f"answers in {language}, which `scoring={rule}` cannot score"


def reply_tokens(dataset: str, model: models.ModelSpec) -> int | None:
    """How many tokens a reply may have, where the model decides and not the data set."""
    return MAX_TOKENS.get(dataset) if model.restates else None


def find_grader(
    name: str, rule: Rule, restates: bool, load: Callable[[], Tokenizer], metric: str | None = None
) -> tuple[str, Grader]:
    """The metric of a data set's replies (`metric`, or its own under `rule`), and their grader.

    Of replies that restate facts it takes the answer. Raises ConfigError where a package is
    missing.
    """
    if name in (SYNTHETIC, LOGGED):
        return "score", Grader(lambda reply, answers: None)  # There is no right answer.
    dataset = datasets.find(name)
    if metric is None:
        scorer = find_scorer(dataset, rule, load)
    else:
        scorer = scorer_by_name(dataset, metric, load)

    def said(reply: str) -> str:
        return answer(dataset.name, reply) if restates else reply

    return scorer.metric, Grader(
        lambda reply, answers: scorer.score(said(reply), answers),
        lambda reply: dataset.abstained(said(reply)),
    )
