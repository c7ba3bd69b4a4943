"""The requests of a run: rows of a data set, or a request file, with their arrival times."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from picbench.errors import ConfigError
from picbench.inputs.workload import Workload, load_workload, score_of
from picbench.run.config import RunConfig
from picbench.workloads import models
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.draw import Stream, times
from picbench.workloads.traffic.request_file import check_tokens, read_requests
from picbench.workloads.traffic.settings import Traffic


def load(config: RunConfig) -> Workload:
    """Load what `config` names; ConfigError or DataError if that fails."""
    if bool(config.requests) == bool(config.dataset):
        raise ConfigError(
            "a run takes either a data set or a request file",
            hint="name one of `dataset` and `requests`",
        )
    workload = _replayed(config) if config.requests else load_workload(config)
    if config.rate is None:
        return workload
    return replace(workload, arrivals=_drawn(config, len(workload.samples)))


def _drawn(config: RunConfig, count: int) -> tuple[float, ...] | None:
    return times(
        Traffic(requests=count, seed=config.seed, rate=config.rate, process=config.arrivals)
    )


def _replayed(config: RunConfig) -> Workload:
    path = Path(config.requests or "")
    found = read_requests(path)
    model = models.resolve(config.model)
    tokenizer = models.load_tokenizer(model)
    stream = _shortened(found.stream, config)
    check_tokens(stream, tokenizer, path)
    _check_fits(stream.samples, config.context or model.context)
    metric, score = score_of(found.header.dataset, config, model, tokenizer)
    return Workload(
        dataset=found.header.dataset,
        metric=metric,
        model=model,
        samples=stream.samples,
        score=score,
        synthetic=found.header.synthetic,
        arrivals=stream.arrivals,
        preload=_preload(stream),
        requests=found.fingerprint,
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
    """A request for each chunk to be cached, behind the text that all prompts begin with."""
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
                hint="raise `context`, or draw requests with fewer `chunks`",
            )
