"""Whether an engine's answers are right, by ways to serve a prompt that must give the same answer.

Three equalities hold for every model, whatever its weights: full recompute in a PIC engine is what
stock vLLM computes; chunks whose tokens are all linked are full recompute; and a chunk at the very
beginning of a prompt is a prefix that was cached. Besides, tokens that are decoded must be those
that a longer prompt gives. Answers are compared by the log-probabilities of
their tokens, generated greedily. Where a way generates another token, which rounding may cause, it
is asked again with the expected tokens so far in its prompt.

A wrong engine shows only if the model's answers depend on the prompt. The control of a check is by
how much they change when the prompt's tokens are reversed.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import ConfigError, InvalidRun

#: Largest difference in log-probability that passes, in nats, by type.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.35, "float16": 0.08}

#: Tokens of the chunks of each prompt: few and many to link. All but a prompt's first chunk have at
#: most 64, which is as many as `epic` links.
_CHUNKS = ((96, 24), (150, 64, 64, 35, 64))

#: Tokens of the question after the chunks, and generated tokens.
_QUESTION, _ANSWER = 19, 6

#: Log-probabilities a token.
_CANDIDATES = 8

#: The share of what the control shows that a difference may have.
_SHARE = 0.25


#: `Engine.generate`.
Generate = Callable[..., list[Result]]


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt and its right answers: computed from nothing, and after a prefix hit."""

    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    full: Result
    hit: Result


@dataclass(frozen=True, slots=True)
class CheckedPrompts:
    """Prompts with right answers, and by how many nats answers to reversed prompts differ."""

    prompts: tuple[CheckedPrompt, ...]
    control: float

    @property
    def rounding(self) -> float:
        """How far the right answers after a prefix hit are from those computed from nothing."""
        return max(_first_difference(prompt.full, prompt.hit) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far what was found is from what must be.

    At most `tolerance` passes, and of answers at most a share of `control`: a difference that is
    smaller says nothing where other prompts make none that is larger.
    """

    name: str
    difference: float
    tolerance: float
    control: float = math.inf

    @property
    def limit(self) -> float:
        """The largest difference that passes."""
        return min(self.tolerance, _SHARE * self.control)

    @property
    def fault(self) -> str:
        """What is wrong, "" if nothing is; a difference of NaN is wrong."""
        if self.difference <= self.limit:
            return ""
        if self.difference == math.inf:
            return f"{self.name}: no answer, or no numbers in it"
        text = f"{self.name}: off by {self.difference:.2g}"
        if self.difference <= self.tolerance:
            return f"{text}, other prompts by {self.control:.2g}: this model cannot tell"
        return f"{text}, at most {self.tolerance:.2g} passes"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The comparisons of one engine."""

    comparisons: tuple[Comparison, ...]

    @property
    def fault(self) -> str:
        """What is wrong, in one line; "" if nothing is."""
        return "; ".join(c.fault for c in self.comparisons if c.fault)

    def require(self) -> None:
        """Raise InvalidRun if something is wrong."""
        if self.fault:
            raise InvalidRun(f"the self-check failed: {self.fault}", hint="see picbench doctor")


def checked_prompts(
    generate: Generate, vocabulary: int, context: int, slots: int
) -> CheckedPrompts:
    """Random prompts, and the answers of an engine that is taken to be right.

    Its default algorithm must cache prefixes. `slots` is the size of the KV pool. Raises
    ConfigError if context or pool are too small for any prompt.
    """
    drawn = list(_draw(vocabulary, context, slots))
    if not drawn:
        raise ConfigError(
            f"a context of {context} tokens and a pool of {slots // BLOCK_SIZE} blocks are too "
            "small for the self-check",
            hint="raise `context` or `kv_blocks`, or leave `self_check` off",
        )
    asked = [Request([Text(tokens=(*_joined(chunks), *end))]) for chunks, end in drawn]
    # Its own name for each run, so that nothing of it is in the cache.
    full, hit, other = (
        _answers(generate, [replace(request, salt=salt) for request in requests])
        for salt, requests in (
            ("self-check", asked),
            ("self-check", asked),
            ("self-check reversed", [_reversed(request) for request in asked]),
        )
    )
    pairs = list(zip(drawn, full, hit, strict=True))
    control = max(_first_difference(a, b) for a, b in zip(full, other, strict=True))
    return CheckedPrompts(tuple(CheckedPrompt(*d, a, b) for d, a, b in pairs), control)


def compare_answers(
    generate: Generate, known: CheckedPrompts, dtype: str
) -> tuple[Comparison, ...]:
    """A PIC engine's answers, way by way, beside those that are known.

    Each way serves the prompts together, twice: chunks are compiled, then found.
    """
    found: dict[str, float] = {}
    for name, (way, answer) in _WAYS.items():
        requests = [way(prompt) for prompt in known.prompts]
        expected = [getattr(prompt, answer) for prompt in known.prompts]
        found[name] = max(_apart(generate, requests, expected) for _ in range(2))
    found["moved chunks, token by token"] = _token_by_token(generate, known.prompts)
    return tuple(
        Comparison(name, difference, TOLERANCE[dtype], known.control)
        for name, difference in found.items()
    )


Way = Callable[[CheckedPrompt], Request]


def _draw(
    vocabulary: int, context: int, slots: int
) -> Iterator[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """Chunks and question of each prompt that context and pool have room for."""
    source = random.Random(0)
    # The first ids are often special.
    lowest = min(16, vocabulary // 2)
    for sizes in _CHUNKS:
        drawn = [
            tuple(source.randrange(lowest, vocabulary) for _ in range(size))
            for size in (*sizes, _QUESTION)
        ]
        tokens = sum(sizes) + 2 * _QUESTION + _ANSWER
        # Linked tokens have slots of their own, and chunks are padded to whole blocks.
        if tokens <= context and 2 * tokens + BLOCK_SIZE * len(sizes) <= slots:
            yield tuple(drawn[:-1]), drawn[-1]


def _reversed(request: Request) -> Request:
    """The same tokens in the opposite order but for the last one."""
    [segment] = request.segments
    *tokens, last = segment.tokens or ()
    return replace(request, segments=[Text(tokens=(*reversed(tokens), last))])


def _joined(chunks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk)


def _chunked(prompt: CheckedPrompt, algorithm: str) -> Request:
    chunks: list[PromptSegment] = [Chunk(tokens=chunk) for chunk in prompt.chunks]
    return Request([*chunks, Text(tokens=prompt.question)], algorithm)


def _one_chunk(prompt: CheckedPrompt) -> Request:
    return Request([Chunk(tokens=_joined(prompt.chunks)), Text(tokens=prompt.question)], "naive")


#: How prompts are served, and which of the known answers they must get.
_WAYS: Mapping[str, tuple[Way, str]] = {
    "full recompute": (partial(_chunked, algorithm="full"), "full"),
    "all tokens linked": (partial(_chunked, algorithm="epic:k=64:copy=shared"), "full"),
    "all tokens linked, copied chunks": (partial(_chunked, algorithm="epic:k=64"), "full"),
    "one chunk at the start": (_one_chunk, "hit"),
}


def _token_by_token(generate: Generate, prompts: Sequence[CheckedPrompt]) -> float:
    """How far tokens that are decoded are from the same ones after a prompt that ends before them.

    The chunks are read away from where they were compiled, by the kernels of decoding and by those
    of linking, which need not agree with full recompute but with each other.
    """
    # The question comes first, so that no chunk is where it was compiled.
    questions = [Text(tokens=prompt.question) for prompt in prompts]
    chunked = (_chunked(prompt, "naive") for prompt in prompts)
    requests = [
        replace(request, segments=[question, *request.segments])
        for question, request in zip(questions, chunked, strict=True)
    ]
    decoded = _answers(generate, requests)
    worst = 0.0
    for done in range(1, _ANSWER):
        asked = [
            replace(_continued(request, answer.tokens, done), max_tokens=1)
            for request, answer in zip(requests, decoded, strict=True)
        ]
        rest = [_rest(answer, done) for answer in decoded]
        computed = _answers(generate, asked)
        worst = max(worst, *map(_first_difference, computed, rest))
    return worst


def _answers(generate: Generate, requests: Sequence[Request]) -> list[Result]:
    return generate(requests, max_tokens=_ANSWER, logprobs=_CANDIDATES, ignore_eos=True)


def _rest(answer: Result, done: int) -> Result:
    """An answer without its first `done` tokens."""
    logprobs = (answer.logprobs or ())[done:]
    return replace(answer, tokens=answer.tokens[done:], logprobs=logprobs)


def _apart(generate: Generate, requests: Sequence[Request], expected: Sequence[Result]) -> float:
    """The largest difference along the expected tokens, in nats."""
    if not all(answer.tokens for answer in expected):
        return math.inf
    done = [0] * len(requests)
    worst = 0.0
    while waiting := [i for i, answer in enumerate(expected) if done[i] < len(answer.tokens)]:
        asked = [_continued(requests[i], expected[i].tokens, done[i]) for i in waiting]
        found = _answers(generate, asked)
        for i, result in zip(waiting, found, strict=True):
            rest = _rest(expected[i], done[i])
            worst = max(worst, _first_difference(result, rest))
            done[i] += _in_common(result.tokens, rest.tokens)
    return worst


def _continued(request: Request, answer: tuple[int, ...], done: int) -> Request:
    """The request with the first `done` tokens of an answer, asked for the rest."""
    given: list[PromptSegment] = [Text(tokens=answer[:done])] if done else []
    return replace(request, segments=[*request.segments, *given], max_tokens=len(answer) - done)


def _in_common(found: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens whose log-probabilities are of the same prompt: up to the first different one."""
    same = 0
    for ours, theirs in zip(found, expected, strict=False):
        same += 1
        if ours != theirs:
            break
    return max(same, 1)


def _first_difference(found: Result, expected: Result) -> float:
    """The largest difference of log-probabilities up to the first token that differs, in nats."""
    count = _in_common(found.tokens, expected.tokens)
    steps = list(zip(found.logprobs or (), expected.logprobs or (), strict=False))[:count]
    if not steps:
        return math.inf
    return max(max(_missing(a, b), _missing(b, a)) for a, b in steps)


def _missing(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """How much more or less likely `other` finds the candidates of `one`.

    Candidates that the other does not name are at most as likely as its last one.
    """
    if any(map(math.isnan, (*one.values(), *other.values()))):
        return math.inf
    last = min(other.values())
    found = [
        abs(value - other[token]) if token in other else max(0.0, value - last)
        for token, value in one.items()
    ]
    return max(difference if math.isfinite(difference) else math.inf for difference in found)
