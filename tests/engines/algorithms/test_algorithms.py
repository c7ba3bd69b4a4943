"""Algorithms: what they link, how they are written, how a third party adds one."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import (
    Algorithm,
    NumberRange,
    Registry,
    check_served,
    describe,
    names,
    of_chunks,
    parse,
)
from picbench.engines.algorithms.notation import _REMEMBERED
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import (
    Anchor,
    Deviation,
    DeviationSelection,
    LayoutConfig,
    Pad,
    QuestionSelection,
    Segment,
)
from picbench.errors import ConfigError

ALL = [parse(spec) for spec in (*names(), "epic:k=4:bos=chunk", "kvlink:n=40:first=20")]


@pytest.mark.parametrize(
    ("spec", "index", "length", "linked"),
    [
        ("full", 0, 5, 5),
        ("prefix", 3, 5, 5),
        ("naive", 1, 40, 0),
        ("epic:k=16", 0, 40, 0),
        ("epic:k=16", 1, 40, 16),
        ("epic:k=64", 2, 40, 40),
        ("epic:k=0", 2, 40, 0),
        ("epic:k=23", 2, 40, 23),
        ("cacheblend", 0, 40, 0),
        ("cacheblend:select=first", 0, 40, 6),
        ("cacheblend:r=0.15:select=first", 1, 100, 15),
        ("cacheblend:r=0.3:select=first", 2, 1, 1),
        ("cacheblend:r=0.123:select=first", 2, 100, 13),
        ("mepic", 0, 40, 16),
        ("mepic", 1, 7, 7),
        ("mepic:blocks=2", 0, 40, 32),
        ("mepic:blocks=3", 1, 40, 40),
    ],
)
def test_links(spec, index, length, linked):
    assert list(parse(spec).plan_chunk(index, length).linked) == list(range(linked))


@pytest.mark.parametrize(
    ("spec", "anchor"),
    [
        ("naive", Anchor()),
        ("epic:k=0", Anchor(bos=4)),
        ("epic:k=0:anchor=head", Anchor(head=True)),
        ("epic:k=8", Anchor()),
        ("mepic:anchor=head", Anchor(head=True)),
    ],
)
def test_anchors(spec, anchor):
    assert parse(spec).plan_chunk(1, 20).anchor == anchor


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("mepic", "mepic"),
        ("mepic:pad=masked", "mepic"),
        ("epic", "epic:k=16"),
        ("epic:pad=paper:k=4", "epic:k=4:pad=paper"),
        ("cacheblend", "cacheblend:r=0.15"),
        ("epic:copy=private", "epic:k=16"),
        ("epic:k=016", "epic:k=16"),
        ("mepic:blocks=1", "mepic"),
        ("mepic:blocks=2", "mepic:blocks=2"),
        ("cacheblend:r=1", "cacheblend:r=1.0"),
        ("cacheblend:deviation=k", "cacheblend:r=0.15:deviation=k"),
        ("cacheblend:copy=shared:select=first", "cacheblend:r=0.15:copy=shared:select=first"),
    ],
)
def test_spec_is_canonical(given, canonical):
    assert parse(given).spec == canonical
    assert parse(canonical) == parse(given)


@pytest.mark.parametrize(
    ("spec", "private"),
    [
        ("epic", True),
        ("epic:k=0", True),
        ("epic:copy=shared", False),
        ("cacheblend", True),
        ("cacheblend:select=first", True),
        ("cacheblend:select=first:copy=shared", False),
        ("naive", False),
        ("mepic", False),
    ],
)
def test_published_copies_are_private(spec, private):
    assert parse(spec).plan_chunk(1, 40).private is private


@given(
    st.lists(
        st.builds(Segment, st.lists(st.integers(3, 9), min_size=1).map(tuple), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_every_algorithm_keeps_the_users_tokens_in_their_order(prompt):
    layout = LayoutConfig(bos_token=1, link_tokens=(10, 11, 12, 13, 14))
    sent = [token for segment in prompt for token in segment.own]
    for algorithm in ALL:
        arranged = algorithm.arrange(prompt, layout)
        assert [token for segment in arranged for token in segment.own] == sent


def test_engines_serve_no_algorithm_that_changes_prompts_before():
    reorder = parse("reorder")
    assert (reorder.reorders, reorder.served) == (True, "prefix")
    assert [algorithm for algorithm in ALL if algorithm.reorders] == [reorder]
    with pytest.raises(ConfigError, match="reorder puts the chunks of prompts in order") as error:
        check_served(reorder)
    assert error.value.hint == "picbench run does that; engines serve prefix"
    for algorithm in ALL:
        if not algorithm.reorders:
            assert algorithm.served == algorithm.spec
            check_served(algorithm)


def test_bos_before_every_chunk_is_the_first_token_that_epic_links():
    chunk, text = Segment((7,) * 40, chunk=True), Segment((8,) * 5)
    layout = LayoutConfig(bos_token=1)
    framed = parse("epic:k=4:bos=chunk").arrange([text, chunk, text], layout)
    assert framed == [text, Segment((1,) + (7,) * 40, chunk=True, lead=1), text]
    for spec in ("epic:k=4", "epic:k=0:bos=chunk"):
        assert parse(spec).arrange([text, chunk, text], layout) == [text, chunk, text]
    with pytest.raises(ValueError, match="no BOS token"):
        parse("epic:k=4:bos=chunk").arrange([chunk], LayoutConfig())


def test_pad_option():
    assert parse("mepic:pad=paper").pads is Pad.PAPER
    assert parse("full").pads is Pad.MASKED


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mepik", "did you mean 'mepic'"),
        ("zzz", "there are: "),
        ("epic:q=3", "unknown option 'q=3'"),
        ("epic:k", "option k of epic has no value"),
        ("epic:k=4:k=8", "k is there twice"),
        ("epic:k=4:k=4", "k is there twice"),
        ("epic:k=-1", "k=-1 is not possible (use a whole number of at least 0)"),
        ("epic:k=1.5", "use a whole number"),
        ("epic:k=many", "use a whole number"),
        ("epic:bos=two", "use prompt, chunk"),
        ("kvlink:n=-1", "use a whole number from 0 to 2147483647"),
        ("block-attention:k=1", "block-attention takes no options"),
        ("mepic:blocks=0", "use a whole number of at least 1"),
        ("epic:k=0:sinks=4097", "use a whole number from 1 to 4096"),
        ("minipic:ssep=" + "9" * 400, "use a whole number of at least -1"),
        ("full:k=1", "full takes no options"),
        ("mepic:pad=paqer", "use masked, paper"),
        ("mepic:select=answer", "use first, question"),
        ("mepic:select=question:pad=paper", "visible pads would be among them"),
        ("cacheblend:r=1.5", "r=1.5 is not possible (use a number from 0.0 to 1.0)"),
        ("cacheblend:r=-0.1", "use a number from 0.0 to 1.0"),
        ("cacheblend:select=last", "use deviation, first"),
        ("cacheblend:deviation=q", "use v, k"),
        ("cacheblend:copy=shared", "use select=first"),
        ("cacheblend:pad=paper", "use select=first"),
        ("cacheblend:select=first:deviation=k", "compares nothing"),
        ("prophetkv:r=2", "use a number from 0.0 to 1.0"),
        ("prophetkv:pad=paper", "visible pads would be among them"),
    ],
)
def test_bad_specs_say_what_to_try(spec, message):
    with pytest.raises(ConfigError) as caught:
        parse(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("deviation", list(Deviation))
def test_cacheblend_leaves_the_choice_to_the_worker(deviation):
    policy = parse(f"cacheblend:r=0.2:deviation={deviation}").plan_chunk(1, 100)
    assert policy.selection == DeviationSelection(0.2, deviation)
    assert policy.private
    assert parse("cacheblend:select=first").plan_chunk(1, 100).selection is None


def test_mepic_leaves_the_choice_to_the_worker():
    policy = parse("mepic:select=question:blocks=2:anchor=head").plan_chunk(1, 100)
    assert policy.selection == QuestionSelection(32)
    assert (list(policy.linked), policy.anchor, policy.private) == ([], Anchor(head=True), False)
    assert parse("mepic:select=first").plan_chunk(1, 100).selection is None


def test_prophetkv_leaves_the_choice_to_the_worker():
    policy = parse("prophetkv:r=0.29").plan_chunk(1, 100)
    assert policy.selection == QuestionSelection(share=0.29)
    assert policy.selection.count([60, 40]) == 29
    assert (list(policy.linked), policy.private) == ([], True)
    assert not parse("prophetkv:copy=shared").plan_chunk(1, 100).private


def test_labels_say_what_is_static():
    assert parse("cacheblend:select=first").label == "cacheblend (static):r=0.15:select=first"
    for spec in ("cacheblend:r=0.15", "mepic", "epic:k=16"):
        assert parse(spec).label == spec


def test_all_are_listed():
    assert {"full", "prefix", "naive", "epic", "mepic"} <= set(names())
    assert {"block-attention", "kvlink", "prompt-cache"} <= set(names())
    assert all(summary for _, summary, _ in describe())


def test_a_third_party_adds_one_by_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "other_pic.py").write_text(
        "from dataclasses import dataclass\n"
        "from picbench.engines.algorithms import ChunkAlgorithm\n"
        "from picbench.engines.planning.layout import ChunkPolicy\n"
        "@dataclass(frozen=True)\n"
        "class Tail(ChunkAlgorithm):\n"
        "    name = 'tail'\n"
        "    summary = 'link the last token of every chunk'\n"
        "    def plan_chunk(self, index, length):\n"
        "        return ChunkPolicy(linked=(length - 1,), anchor=self.anchor)\n"
    )
    info = tmp_path / "other_pic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-pic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[picbench.algorithms]\ntail = other_pic:Tail\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert parse("tail").plan_chunk(0, 9).linked == (8,)
        assert names()[-1] == "tail"
    finally:
        sys.modules.pop("other_pic", None)


@pytest.mark.parametrize(
    ("numbers", "text", "value"),
    [
        (NumberRange(0), "7", 7),
        (NumberRange(0), "0", 0),
        (NumberRange(0), "-1", None),
        (NumberRange(0), "0.5", None),
        (NumberRange(0.0, 1.0), "0.15", 0.15),
        (NumberRange(0.0, 1.0), "1", 1.0),
        (NumberRange(0.0, 1.0), "1.01", None),
        (NumberRange(0.0, 1.0), "nan", None),
        (NumberRange(0.0), "inf", None),
    ],
)
def test_number_ranges(numbers, text, value):
    assert numbers.parse(text) == value


def test_number_ranges_say_what_they_are():
    assert str(NumberRange(0.0, 1.0)) == "a number from 0.0 to 1.0"
    assert str(NumberRange(1)) == "a whole number of at least 1"


def test_a_spec_is_parsed_once() -> None:
    registry = Registry()
    assert registry.parse("epic:k=8") is registry.parse("epic:k=8")


def test_specs_of_clients_do_not_fill_the_memory() -> None:
    registry = Registry()
    for k in range(3 * _REMEMBERED):
        assert registry.parse(f"epic:k={k}").spec == f"epic:k={k}"
        assert len(registry._parsed) <= _REMEMBERED


LAYOUT = LayoutConfig(bos_token=1)
BLOCKS, NAIVE = parse("block-attention"), parse("naive")
HEAD, MIDDLE, QUESTION = Segment((3,) * 20), Segment((4,) * 20), Segment((5,) * 20)
A, B = Segment((6,) * 40, chunk=True), Segment((7,) * 40, chunk=True)


def kinds(*prompt: Segment) -> str:
    arranged = BLOCKS.arrange(prompt, LAYOUT)
    assert [segment.tokens for segment in arranged] == [segment.tokens for segment in prompt]
    return "".join("c" if segment.chunk else "t" for segment in arranged)


def plan(algorithm: Algorithm, *prompt: Segment):
    return lay_out(algorithm.arrange(prompt, LAYOUT), algorithm.plan_chunk, LAYOUT)


def test_every_segment_but_the_first_text_and_the_last_is_compiled_alone():
    assert kinds(HEAD, A, B, QUESTION) == "tcct"
    assert kinds(A, B, QUESTION) == "cct"
    assert kinds(HEAD, A, MIDDLE, B, QUESTION) == "tccct"


def test_a_chunk_that_ends_the_prompt_is_the_last_block():
    assert kinds(HEAD, A, B) == "tct"
    assert kinds(A) == "t"
    last = plan(BLOCKS, HEAD, A, B)
    seen = [p for p in last.positions[last.canonical * 16 :] if p != GAP]
    assert seen == [*range(20), *range(60, 100)]


def test_naive_plans_text_chunks_and_a_question_alike():
    prompt = HEAD, A, B, QUESTION
    assert plan(BLOCKS, *prompt) == plan(NAIVE, *prompt)
    assert plan(BLOCKS, HEAD, A, MIDDLE, B) != plan(NAIVE, HEAD, A, MIDDLE, B)


@given(st.lists(st.booleans(), min_size=3, max_size=6))
def test_middle_blocks_are_found_in_any_prompt(chunks):
    """Invariant: what is compiled depends on the block alone."""
    blocks = [Segment((10 + i,) * 20, chunk=chunk) for i, chunk in enumerate(chunks)]
    there = {c.key for c in plan(BLOCKS, HEAD, *blocks, QUESTION).canonicals}
    back = {c.key for c in plan(BLOCKS, A, *blocks[::-1], QUESTION).canonicals}
    assert len(there) == len(blocks)
    assert there <= back


def test_auto_is_any_algorithm_that_compiles_chunks() -> None:
    assert parse("auto").spec == parse("auto:mepic").spec == "auto"
    found = parse("auto:epic:k=4:anchor=head")
    assert found.spec == "auto:epic:k=4:anchor=head"
    assert of_chunks(found) == parse("epic:k=4:anchor=head") == of_chunks(of_chunks(found))
    assert found.private and found.anchor_text == ""
    assert parse("auto:naive:context=document:anchor=passage").documents
    assert parse("auto:minipic:ssep=5").separators == (5,)
    assert parse("auto:kvlink:n=5").added(3) == 15
    segments = [Segment((1, 2), chunk=True), Segment((3,))]
    layout = parse("auto:mepic:pad=paper").layout()
    assert layout.pad is Pad.PAPER
    for spec in ("mepic", "kvlink:n=1:first=7", "prompt-cache"):
        inner, auto = parse(spec), parse(f"auto:{spec}")
        assert auto.arrange(segments, layout) == inner.arrange(segments, layout)
        assert auto.plan_chunk(0, 40) == inner.plan_chunk(0, 40)


def test_auto_may_have_prompts_put_in_another_order() -> None:
    for spec, served in (("auto:reorder", "auto"), ("auto:reorder:naive", "auto:naive")):
        found = parse(spec)
        assert (found.spec, found.served, found.reorders) == (spec, served, True)
        assert not parse(served).reorders


@pytest.mark.parametrize("spec", ["auto:prefix", "auto:full", "auto:auto", "auto:reorder:full"])
def test_auto_chooses_between_chunks_and_text(spec: str) -> None:
    with pytest.raises(ConfigError, match="serves no chunks"):
        parse(spec)
