"""MiniPIC: how separators are read, what is recomputed, and which algorithms they make."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import Registry
from picbench.engines.planning.layout import lay_out, measure
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Marks, Segment
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut, marked_args
from picbench.errors import ConfigError

SSEP, PDEP, PAD, SIZE = 10, 31, 27, 16
LAYOUT = LayoutConfig(pad_token=PAD)
parse = Registry().parse
TOKENS = "minipic:ssep=10:pdep=31"

words = st.lists(st.integers(40, 60), min_size=1, max_size=40)
documents = st.lists(words, min_size=1, max_size=4)


def filled(*tokens: int) -> list[int]:
    """Tokens, padded to whole blocks."""
    return [*tokens, *[PAD] * (-len(tokens) % SIZE)]


def planned(spec: str, prompt: list[int], args: RequestArgs) -> Plan:
    algorithm = parse(spec)
    args = marked_args(args, prompt, algorithm, SIZE)
    segments = algorithm.arrange(cut(prompt, args, PAD), LAYOUT)
    plan = lay_out(segments, algorithm.plan_chunk, LAYOUT)
    footprint = measure(segments, algorithm.plan_chunk, LAYOUT)
    assert (footprint.slots, footprint.end) == (len(plan.tokens), plan.end)
    return plan


def read(prompt: list[int], spec: str = TOKENS) -> Marks:
    return parse(spec).read_marks(prompt, SIZE)


def spans(parts: list[list[int]], first: int = 0) -> tuple[tuple[int, int], ...]:
    """Where each part is in a prompt that begins with `first` other tokens."""
    found = []
    for part in parts:
        found.append((first, first + len(part)))
        first += len(part)
    return tuple(found)


def test_spans_reach_from_separator_to_separator():
    text, one, two = filled(5), filled(SSEP, *range(40, 70)), filled(SSEP, 41)
    prompt = [*text, *one, *two, PDEP, 6, 7]
    assert read(prompt) == Marks(((16, 48), (48, 64)), ((64, 67),))
    assert read([*text, *one]) == Marks(((16, 48),), ())


def test_prompts_without_separators_mark_nothing():
    for spec in ("minipic", TOKENS, "naive"):
        assert read([5] * 40, spec) == Marks()
    assert read([SSEP, 5, PDEP], "minipic") == Marks()
    args = RequestArgs(((0, 20),))
    assert marked_args(args, [SSEP] * 40, parse(TOKENS), SIZE) == args


def test_joined_spans_begin_with_the_dependent_tokens_before_them():
    parts = [filled(5), filled(PDEP, 6), filled(SSEP, 7), filled(SSEP, 8), [PDEP, 9]]
    prompt = [token for part in parts for token in part]
    dependent = ((16, 32), (64, 66))
    assert read(prompt) == Marks(((32, 48), (48, 64)), dependent)
    assert read(prompt, f"{TOKENS}:spans=joined") == Marks(((16, 48), (48, 64)), dependent)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 17 + [SSEP], "prompt token 17, ssep=10, is inside a block of 16 tokens"),
        ([SSEP] + [5] * 20 + [PDEP, 5], "prompt token 21, pdep=31, is inside a block"),
    ],
)
def test_separators_inside_blocks_are_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        read(prompt)


def test_one_token_cannot_be_both_separators():
    with pytest.raises(ConfigError, match="one token has two meanings"):
        parse("minipic:ssep=10:pdep=10")


@given(documents, words, words)
def test_block_attention_is_a_span_a_document(texts, head, question):
    parts = [filled(SSEP, *text) for text in texts]
    head = filled(*head)
    prompt = [*head, *(token for part in parts for token in part), PDEP, *question]
    named = RequestArgs(spans(parts, len(head)))
    ours = planned("block-attention", prompt, named)
    assert planned(TOKENS, prompt, RequestArgs(())) == ours
    assert planned("minipic", prompt, named) == ours


@given(documents, words, words, st.integers(1, 3))
def test_epic_is_spans_after_dependent_blocks(texts, head, question, blocks):
    """Dependent tokens in whole blocks, so that the span's separator begins a block."""
    head, k = filled(*head), blocks * SIZE
    parts = [
        [*filled(*([PDEP] if index else []), *[42] * (k - 1))[:k], *filled(SSEP, *text)]
        for index, text in enumerate(texts)
    ]
    parts[0] = filled(SSEP, *texts[0])
    prompt = [*head, *(token for part in parts for token in part), PDEP, *question]
    named = RequestArgs(spans(parts, len(head)))
    ours = planned(f"epic:k={k}:copy=shared", prompt, named)
    assert planned(f"{TOKENS}:spans=joined", prompt, RequestArgs(())) == ours


@given(documents, words, st.integers(1, 50))
def test_epic_is_spans_with_dependent_tokens(texts, question, k):
    prompt = [*(token for text in texts for token in text), *question]
    named = RequestArgs(spans(texts))
    asked = tuple((start, min(start + k, end)) for start, end in named.spans[1:])
    ours = planned(f"epic:k={k}:copy=shared", prompt, named)
    assert planned("minipic", prompt, replace(named, dependent=asked)) == ours


@given(documents, words, st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_prompt_cache_is_spans_at_positions(texts, question, gaps):
    """All but the names of its blocks, which hold keys that are never rotated again."""
    prompt = [*(token for text in texts for token in text), *question]
    named = RequestArgs(spans(texts))
    starts = [start for start, _ in named.spans]
    moved = tuple((s, s + sum(gaps[: i + 1])) for i, s in enumerate([*starts, starts[-1]]))
    args = replace(named, positions=moved[: len(starts)])
    ours, theirs = planned("minipic", prompt, args), planned("prompt-cache", prompt, args)
    for name in ("tokens", "positions", "kinds", "prompt_tokens", "end", "shared", "real"):
        assert getattr(ours, name) == getattr(theirs, name)


@given(documents, words, words, words, st.sampled_from(["alone", "joined"]))
def test_prompts_with_other_first_spans_share_no_dependent_block(
    texts, first, other, question, how
):
    def computed(begin: list[int]) -> tuple[list[bytes | None], list[bytes | None]]:
        parts = [filled(SSEP, *begin), filled(PDEP, *question)]
        parts += [filled(SSEP, *text) for text in texts]
        prompt = [*(token for part in parts for token in part), *filled(PDEP, *question)]
        plan = planned(f"{TOKENS}:spans={how}", prompt, RequestArgs(()))
        return plan.keys[: plan.canonical], plan.keys[plan.canonical :]

    (spans_of_one, one), (spans_of_other, two) = computed(first), computed(other)
    assert len(one) > 1
    assert None not in one
    assert bool(set(one) & set(two)) == (filled(*first) == filled(*other))
    assert set(spans_of_one) & set(spans_of_other) or how == "joined"


@given(documents, words)
def test_visible_pads_fill_blocks_and_take_positions(texts, question):
    prompt = [*(token for text in texts for token in text), *question]
    plan = planned("minipic:pad=visible", prompt, RequestArgs(spans(texts)))
    written = [*(token for text in texts for token in filled(*text)), *question]
    assert plan.end == len(written)
    seen = {p: t for p, t in zip(plan.positions, plan.tokens, strict=True) if p != GAP}
    assert [seen[position] for position in range(plan.end)] == written
    assert plan.prompt_tokens == len(prompt)
    assert len(plan.tokens) == plan.end


def test_visible_pads_have_no_positions():
    with pytest.raises(ConfigError, match="visible pads move positions"):
        parse("minipic:pad=visible").arrange([Segment((5,), position=4)], LAYOUT)
