"""How answers are compared, over engines that only pretend."""

import math
from collections.abc import Callable, Sequence

import pytest

from picbench.engines.request import Request, Result, Text, Timings, TokenCounts
from picbench.engines.self_check import Comparison, SelfCheck, checked_prompts, compare_answers
from picbench.errors import ConfigError, InvalidRun

#: From a prompt to the log-probabilities of the next token.
Model = Callable[[tuple[int, ...], Request], dict[int, float]]


class Pretend:
    """Generates greedily from a function of the prompt; `asked` is what it was sent."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.asked: list[Request] = []

    def __call__(
        self, requests: Sequence[Request], *, max_tokens: int, logprobs: int, ignore_eos: bool
    ) -> list[Result]:
        self.asked += requests
        return [self._answer(request, request.max_tokens or max_tokens) for request in requests]

    def _answer(self, request: Request, count: int) -> Result:
        prompt = tuple(t for segment in request.segments for t in segment.tokens or ())
        tokens: tuple[int, ...] = ()
        steps = []
        for _ in range(count):
            steps.append(self.model(prompt + tokens, request))
            tokens += (max(steps[-1], key=steps[-1].__getitem__),)
        return Result(
            "", tokens, prompt, Timings(1, 1, 1, 1), TokenCounts(), None, None, tuple(steps)
        )


def peaked(prompt: tuple[int, ...], _: Request) -> dict[int, float]:
    """Likely tokens that depend on the whole prompt and its order."""
    first = sum(i * t for i, t in enumerate(prompt)) % 97
    return {first + i: -0.5 - i for i in range(8)}


def check(model: Model, known_model: Model = peaked, dtype: str = "float32") -> SelfCheck:
    known = checked_prompts(Pretend(known_model), 100, 1024, 4096)
    return SelfCheck(compare_answers(Pretend(model), known, dtype))


def test_equal_answers_have_no_fault():
    assert check(peaked).fault == ""
    check(peaked).require()


def test_every_way_is_held_to_its_own_answer():
    def wrong(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        off = 0.01 if request.algorithm == "naive" else 0.0
        return {token: value - off for token, value in peaked(prompt, request).items()}

    assert check(wrong).fault == "one chunk at the start: off by 0.01, at most 0.002 passes"
    with pytest.raises(InvalidRun, match=r"self-check failed: one chunk.*picbench doctor"):
        check(wrong).require()


def test_other_tokens_of_equal_probability_are_no_fault():
    """Rounding may choose another token; what follows is compared on the expected ones."""

    def tied(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        values = dict(peaked(prompt, request))
        first, second = list(values)[:2]
        ours, theirs = (-0.5, -0.5 + 1e-6) if request.algorithm == "full" else (-0.5 + 1e-6, -0.5)
        return values | {first: ours, second: theirs}

    pretend = Pretend(tied)
    known = checked_prompts(Pretend(tied), 100, 1024, 4096)
    assert SelfCheck(compare_answers(pretend, known, "float32")).fault == ""
    longest = max(len(r.segments) for r in pretend.asked if r.algorithm == "full")
    assert longest == max(len(prompt.chunks) for prompt in known.prompts) + 2


def test_an_error_after_another_token_is_found():
    def late(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        values = peaked(prompt, request)
        last = request.algorithm == "full" and len(prompt) in (96 + 24 + 19 + 5,)
        return {token: value - last for token, value in values.items()}

    assert check(late).fault.startswith("full recompute: off by 1,")


def test_decoding_is_held_to_the_prompt_that_ends_one_token_later():
    def wrong(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        moved = isinstance(request.segments[0], Text) and request.algorithm == "naive"
        off = 0.01 if moved and request.max_tokens == 1 else 0.0
        return {token: value - off for token, value in peaked(prompt, request).items()}

    assert check(wrong).fault == "moved chunks, token by token: off by 0.01, at most 0.002 passes"


def test_no_number_is_a_fault():
    def broken(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        return dict.fromkeys(range(8), math.nan if request.algorithm else -1.0)

    assert check(broken).fault.count("no answer") == 5

    def names_others(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        if request.algorithm:
            return dict.fromkeys(range(100, 108), math.nan)
        return dict.fromkeys(range(8), -1.0)

    assert check(names_others).fault.count("no answer") == 5
    assert Comparison("x", math.nan, 1.0).fault


def test_a_missing_candidate_counts():
    def other(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        first, *rest = peaked(prompt, request).items()
        return dict([first, *((token + 1000, value) for token, value in rest)])

    assert "off by 6" in check(other).fault


def test_a_model_that_ignores_its_prompt_cannot_be_checked():
    def flat(prompt: tuple[int, ...], request: Request) -> dict[int, float]:
        off = 1e-4 if request.algorithm == "naive" else 0.0
        order = 2e-4 * (prompt[0] % 2)
        return {i: -1.0 - i - off - order for i in range(8)}

    fault = check(flat, flat).fault
    assert fault.startswith("one chunk at the start: off by 0.0001, other prompts by ")
    assert fault.endswith("this model cannot tell")


def test_prompts_are_left_out_where_there_is_no_room():
    small = checked_prompts(Pretend(peaked), 100, 256, 4096)
    assert [len(prompt.chunks) for prompt in small.prompts] == [2]
    for context, slots in ((128, 4096), (1024, 160)):
        with pytest.raises(ConfigError, match=r"too small for the self-check.*`self_check` off"):
            checked_prompts(Pretend(peaked), 100, context, slots)
