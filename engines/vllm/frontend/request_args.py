"""A request's PIC arguments.

A vLLM request describes its chunks by spans of prompt tokens, in `SamplingParams.extra_args`::

    {"pic": {"spans": [[12, 140], [140, 300]], "algorithm": "epic:k=16"}}

or, where only flat values can be sent (`vllm_xargs` over HTTP)::

    {"pic_spans": [12, 140, 140, 300], "pic_algorithm": "epic:k=16"}

They are parsed once, on arrival, and replaced by a `RequestArgs`. When vLLM sends a request to
another process, msgspec makes that a mapping of the same fields again.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.engines.planning.policy import Segment
from picbench.errors import ConfigError

ARGS = "pic"
FLAT_SPANS = "pic_spans"
FLAT_ALGORITHM = "pic_algorithm"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RequestArgs:
    """A request's chunks as ``[start, end)`` spans of prompt tokens, and its algorithm.

    `algorithm` is a valid spec; None means the engine's default. `tag` comes back with the
    request's cost.
    """

    spans: tuple[Span, ...]
    algorithm: str | None = None
    tag: str | None = None


def request_args(request: Any, registry: Registry) -> RequestArgs | None:
    """A request's PIC arguments, parsed if they have not been; None if it has none.

    `request` has vLLM's `sampling_params` and `prompt_token_ids`. Raises what `read_args` does.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None or prompt is None:
        return None
    found = _parsed(params.extra_args)
    if found is None:
        found = read_args(params.extra_args, len(prompt), registry)
        if found is not None:
            # Callers may share one SamplingParams between requests, hence the copy.
            request.sampling_params = copy.copy(params)
            request.sampling_params.extra_args = {**params.extra_args, ARGS: found}
    return found


def read_args(
    extra_args: Mapping[str, Any] | None, prompt_tokens: int, registry: Registry
) -> RequestArgs | None:
    """Parse a request's PIC arguments; None if it has none.

    Raises ConfigError if spans overlap, are empty, or leave the prompt, if the algorithm is
    unknown, and for values of other types.
    """
    if not extra_args:
        return None
    if ARGS in extra_args:
        given = extra_args[ARGS]
        if not isinstance(given, Mapping):
            raise ConfigError(f"extra_args[{ARGS!r}] is {type(given).__name__}, not a mapping")
        spans, algorithm = given.get("spans", ()), given.get("algorithm")
        tag = given.get("tag")
    elif FLAT_SPANS in extra_args or FLAT_ALGORITHM in extra_args:
        spans = _unflatten(extra_args.get(FLAT_SPANS, ()))
        algorithm, tag = extra_args.get(FLAT_ALGORITHM), None
    else:
        return None
    for name, value in (("algorithm", algorithm), ("tag", tag)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"the {name} is {value!r}, not a string")
    if algorithm:
        registry.parse(algorithm)
    return RequestArgs(_spans(spans, prompt_tokens), algorithm or None, tag)


def describes_chunks(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request's arguments name spans; they may still be wrong."""
    if not extra_args:
        return False
    if (parsed := _parsed(extra_args)) is not None:
        return bool(parsed.spans)
    given = extra_args.get(ARGS)
    spans = given.get("spans") if isinstance(given, Mapping) else extra_args.get(FLAT_SPANS)
    return bool(spans)


def cut(tokens: Sequence[int], spans: Sequence[Span]) -> list[Segment]:
    """Prompt tokens as segments: the spans are chunks, everything between them is text."""
    segments, at = [], 0
    for start, end in spans:
        text, chunk = tuple(tokens[at:start]), tuple(tokens[start:end])
        segments += [Segment(text), Segment(chunk, chunk=True)]
        at = end
    segments.append(Segment(tuple(tokens[at:])))
    return [segment for segment in segments if segment.tokens]


def _parsed(extra_args: Mapping[str, Any] | None) -> RequestArgs | None:
    found = (extra_args or {}).get(ARGS)
    return found if isinstance(found, RequestArgs) else None


def _unflatten(flat: Any) -> list[tuple[Any, Any]]:
    if not _is_list(flat) or len(flat) % 2:
        raise ConfigError(
            f"{FLAT_SPANS} needs an even number of integers", hint="start, end, start, end, ..."
        )
    return list(zip(flat[::2], flat[1::2], strict=True))


def _spans(given: Any, prompt_tokens: int) -> tuple[Span, ...]:
    hint = "each span is [start, end] in prompt tokens"
    if not _is_list(given):
        raise ConfigError(f"spans are {given!r}, not a list", hint=hint)
    spans: list[Span] = []
    for index, span in enumerate(given):
        if not _is_list(span) or len(span) != 2 or not all(map(_is_integer, span)):
            raise ConfigError(f"spans[{index}] is {span!r}", hint=hint)
        start, end = map(int, span)
        if not 0 <= start < end <= prompt_tokens:
            raise ConfigError(
                f"spans[{index}] = [{start}, {end}] leaves the prompt of {prompt_tokens} tokens",
                hint="0 <= start < end <= prompt length, end exclusive",
            )
        if spans and start < spans[-1][1]:
            raise ConfigError(
                f"spans[{index}] = [{start}, {end}] overlaps [{spans[-1][0]}, {spans[-1][1]}]",
                hint="list spans in order, without overlap",
            )
        spans.append((start, end))
    return tuple(spans)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
