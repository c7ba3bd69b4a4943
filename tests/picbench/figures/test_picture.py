"""Pictures of plans: what they show is what the oracle's masks say."""

from collections.abc import Sequence
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from picbench.engines.algorithms import Algorithm, parse
from picbench.engines.oracle import (
    ExpandedRow,
    Rule,
    epic,
    epic_bos,
    epic_zero,
    expand,
    full,
    kvlink,
    mepic,
    naive,
    visible,
)
from picbench.engines.oracle.picked import Asked, Blend, BlendedRows
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import LayoutConfig, Segment, Slot
from picbench.figures.picture import (
    PlannedToken,
    PlanPicture,
    TokenRole,
    example_picks,
    planned_tokens,
)

BOS, PAD = 1, 0
RULES: dict[str, Rule] = {
    "full": full(),
    "naive": naive(),
    "naive:anchor=head": naive().anchored(),
    "naive:pad=paper": naive().padded(PAD),
    "epic:k=0": epic_zero(BOS),
    "epic:k=0:sinks=1": epic_zero(BOS, 1),
    "epic:k=3": epic(3),
    "epic:k=5:copy=shared:anchor=head": epic(5).anchored(),
    "epic:k=4:bos=chunk": epic_bos(4, BOS),
    "kvlink:n=2": kvlink((PAD, PAD)),
    "mepic": mepic(),
    "mepic:blocks=2": mepic(2),
    "mepic:pad=paper:anchor=head": mepic().anchored().padded(PAD),
    "prompt-cache": naive(),
}

token = st.integers(3, 900)
tokens = st.lists(token, min_size=1, max_size=40).map(tuple)
prompts = st.lists(st.builds(Segment, tokens=tokens, chunk=st.booleans()), min_size=1, max_size=5)


def layout(algorithm: Algorithm) -> LayoutConfig:
    return LayoutConfig(pad=algorithm.pads, pad_token=PAD, bos_token=BOS)


def merged(prompt: Sequence[Segment]) -> list[Segment]:
    """The prompt with neighbouring texts joined, as an engine has it."""
    found: list[Segment] = []
    for chunk, run in groupby(prompt, lambda segment: segment.chunk):
        segments = list(run)
        texts = [Segment(tuple(t for segment in segments for t in segment.tokens))]
        found += segments if chunk else texts
    return found


def planned(spec: str, prompt: Sequence[Segment]) -> tuple[PlanPicture, list[PlannedToken]]:
    algorithm = parse(spec)
    arranged = algorithm.arrange(prompt, layout(algorithm))
    plan = lay_out(arranged, algorithm.plan_chunk, layout(algorithm))
    picture = PlanPicture.of(arranged, algorithm.plan_chunk, layout(algorithm))
    return picture, planned_tokens(plan, example_picks(plan))


def oracle_rows(prompt: Sequence[Segment], rule: Rule) -> list[ExpandedRow]:
    """The oracle's rows, without compiles of which a request sees nothing."""
    rows = expand([("chunk" if s.chunk else "text", s.tokens) for s in prompt], (), rule)
    seen = {row.compiled for row in rows if row.reused}
    return [row for row in rows if row.compiled in seen]


@pytest.mark.parametrize("spec", RULES)
@settings(max_examples=25, deadline=None)
@given(prompt=prompts)
def test_who_sees_what_is_the_oracles_mask(spec: str, prompt: list[Segment]) -> None:
    prompt = merged(prompt)
    picture, rows = planned(spec, prompt)
    compare(picture, rows, oracle_rows(prompt, RULES[spec]))


@settings(max_examples=25, deadline=None)
@given(prompt=prompts.filter(lambda prompt: any(segment.chunk for segment in prompt)))
def test_what_picked_tokens_see_is_the_oracles_later_mask(prompt: list[Segment]) -> None:
    prompt = merged(prompt)
    picture, rows = planned("cacheblend:r=0.3", prompt)
    blended = BlendedRows.of(
        [("chunk" if s.chunk else "text", s.tokens) for s in prompt], (), Blend(0.3)
    )
    linked = {row.position for row in rows if row.role is TokenRole.LINKED}
    assert picture.picked == blended.count
    reused = {blended.rows[i].compiled for i in blended.compiled}
    later = [r for r in blended.later(linked) if r.compiled in reused or r.compiled is None]
    compare(picture, rows, [row for row in later if row.compiled is not None or row.reused])


@settings(max_examples=25, deadline=None)
@given(prompt=prompts.filter(lambda prompt: any(segment.chunk for segment in prompt)))
def test_what_a_question_picks_sees_what_the_oracle_links(prompt: list[Segment]) -> None:
    prompt = merged([*prompt, Segment((7, 8))])
    picture, rows = planned("mepic:select=question", prompt)
    segments = [("chunk" if s.chunk else "text", s.tokens) for s in prompt]
    linked = {row.position for row in rows if row.role is TokenRole.LINKED}
    assert picture.picked == len(linked)
    compare(picture, rows, expand(segments, (), Asked().rule(segments, linked)))


def compare(
    picture: PlanPicture, rows: Sequence[PlannedToken], expected: Sequence[ExpandedRow]
) -> None:
    """Hold a plan's tokens, who sees whom, and the picture's mask to the oracle's rows."""
    # The oracle counts compiles of chunks that are linked as a whole, too.
    compiles = sorted({row.compiled for row in expected if row.compiled is not None})
    shift = min(row.position for row in expected if row.compiled is None)
    shift -= min(row.position for row in rows if row.compiled is None)
    found = [(r.token, r.position, r.compiled, r.role is not None) for r in rows]
    assert found == [
        (
            r.token,
            r.position - shift,
            None if r.compiled is None else compiles.index(r.compiled),
            r.reused,
        )
        for r in expected
    ]
    mask = visible(expected)
    assert torch.equal(torch.tensor([[q.sees(k) for k in rows] for q in rows]), mask)
    keys = {token: int(row.sum()) for token, row in zip(rows, mask, strict=True)}
    for (query, _), line in zip(picture.tokens, picture.mask, strict=True):
        assert len(line) - line.count(0) == keys[query]


@settings(max_examples=20, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=3), tokens)
def test_block_attention_is_naive_where_the_last_segment_is_text(
    chunks: list[tuple[int, ...]], text: tuple[int, ...]
) -> None:
    prompt = [Segment(text), *(Segment(chunk, chunk=True) for chunk in chunks), Segment(text)]
    assert planned("block-attention", prompt) == planned("naive", prompt)


def prompt(length: int = 40) -> list[Segment]:
    ids = iter(range(100, 1000))
    kinds = [(20, False), (length, True), (length, True), (10, False)]
    return [Segment(tuple(next(ids) for _ in range(n)), chunk) for n, chunk in kinds]


def test_what_a_picture_counts() -> None:
    picture, _ = planned("mepic", prompt())
    assert [(s.name, s.start, s.end, s.compiled, s.fill) for s in picture.segments] == [
        ("text", 0, 20, 0, 0),
        ("chunk 1", 20, 60, 40, 8),
        ("chunk 2", 60, 100, 40, 8),
        ("text", 100, 110, 0, 0),
    ]
    counts = {role: picture.count(role) for role in TokenRole}
    assert counts == {"text": 30, "linked": 32, "shared": 48, "copied": 0, "added": 0}
    assert picture.count(TokenRole.LINKED, segment=2) == 16
    assert picture.computed == 62


def test_blocks_are_those_of_the_plan() -> None:
    picture, _ = planned("epic:k=3", prompt(20))
    assert [block.kind for block in picture.blocks] == ["copied"] * 4 + ["computed"] * 3
    slots = [["." if t is None else t.role[0] for t in block.slots] for block in picture.blocks]
    assert ["".join(block) for block in slots] == [
        "c" * 16,
        "c" * 4 + "." * 12,
        "." * 3 + "c" * 13,
        "c" * 4 + "." * 12,
        "t" * 16,
        "t" * 4 + "l" * 3 + "t" * 9,
        "t",
    ]


def test_placeholders_are_seen_by_their_chunk_only() -> None:
    chunk = Segment((5, 6, PAD, PAD, 9), chunk=True, slots=(Slot(2, 2, (7,)),))
    picture, rows = planned("naive", [chunk, Segment((10,))])
    assert [t.planned.token for t in picture.tokens] == [5, 6, 7, 9, 10]
    assert [t.role for t in picture.tokens] == ["shared", "shared", "text", "shared", "text"]
    # Token 9 was compiled after the placeholders: it saw one in the place of token 7.
    assert [list(line) for line in picture.mask] == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 2, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert sum(row.role is None for row in rows) == 2


@pytest.mark.parametrize("spec", ["epic:k=0", "epic:k=0:sinks=7", "naive:anchor=head"])
def test_anchors_are_keys_before_the_prompt(spec: str) -> None:
    picture, _ = planned(spec, prompt())
    anchor = {"epic:k=0": 4, "epic:k=0:sinks=7": 7, "naive:anchor=head": 20}[spec]
    assert picture.anchor == anchor
    assert {len(line) for line in picture.mask} == {anchor + 110}
    assert picture.mask[0][:anchor] == bytes(anchor)
    assert picture.mask[20][:anchor] == picture.mask[99][:anchor] == bytes([3]) * anchor
    assert picture.mask[109][:anchor] == bytes(anchor)
