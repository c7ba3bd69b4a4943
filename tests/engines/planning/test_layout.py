"""Plans: every token once, hits first, keys that name content."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.keys import is_canonical
from picbench.engines.planning.layout import Footprint, lay_out, measure
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import Anchor, ChunkPolicy, LayoutConfig, Pad, Segment

SIZE = 16
token = st.integers(3, 900)
tokens = st.lists(token, min_size=1, max_size=70).map(tuple)
contexts = st.just(()) | st.lists(token, max_size=40).map(tuple)
segments = st.lists(
    st.builds(Segment, tokens=tokens, chunk=st.booleans(), context=contexts), min_size=1, max_size=6
)
anchors = st.sampled_from([Anchor(), Anchor(head=True), Anchor(bos=4)])
pads = st.sampled_from(list(Pad))


@st.composite
def policies(draw):
    """Arbitrary links: any subset of a chunk's tokens, the same for the same chunk index."""
    seed, private = draw(st.integers(0, 2**16)), draw(st.booleans())
    anchor = draw(anchors)

    def plan_chunk(index: int, length: int) -> ChunkPolicy:
        linked = [i for i in range(length) if hash((seed, index, i)) % 3 == 0]
        return ChunkPolicy(linked, anchor, private)

    return plan_chunk


def layout(pad: Pad = Pad.MASKED, scope: str = "", *, documents: bool = True) -> LayoutConfig:
    return LayoutConfig(SIZE, scope, pad, pad_token=0, bos_token=1, documents=documents)


def none(index: int, length: int) -> ChunkPolicy:
    return ChunkPolicy()


def first(count: int):
    return lambda index, length: ChunkPolicy(range(min(count, length)))


def everything(index: int, length: int) -> ChunkPolicy:
    return ChunkPolicy(range(length))


def padded(given_segments, pad: Pad) -> list[int]:
    """The prompt that positions refer to."""
    out: list[int] = []
    for index, segment in enumerate(given_segments):
        fill = [0] * (-len(segment.tokens) % SIZE) if pad is Pad.PAPER else []
        last = index + 1 == len(given_segments)
        if segment.chunk:
            out += fill + list(segment.tokens)
        else:
            out += list(segment.tokens) + ([] if last else fill)
    return out


@given(segments, policies(), pads)
def test_every_logical_token_is_visible_exactly_once(given_segments, policy, pad):
    plan = lay_out(given_segments, policy, layout(pad))
    seen = {p: t for p, t in zip(plan.positions, plan.tokens, strict=True) if p != GAP}
    assert [seen[p] for p in sorted(seen)] == padded(given_segments, pad)
    assert sum(p != GAP for p in plan.positions) == plan.end == len(seen)
    assert plan.prompt_tokens == sum(len(p.tokens) for p in given_segments)


@given(segments, policies(), pads, st.integers(0, 40))
def test_a_plan_says_of_slots_and_blocks_what_its_pages_say(given_segments, policy, pad, first):
    plan = lay_out(given_segments, policy, layout(pad))
    compiled = [canonical.compile_plan() for canonical in plan.canonicals]
    for found in (plan, *compiled):
        pages = found.pages
        assert list(found.tokens) == [token for page in pages for token in page.tokens]
        assert found.positions == [position for page in pages for position in page.positions]
        assert found.kinds == [kind for page in pages for kind in page.kinds]
        assert found.keys == [page.key for page in pages]
        assert found.copies == tuple(page.copy_of for page in pages if page.copy_of)
        assert found.real == sum(page.real for page in pages)
        assert found.pages_from(first) == pages[first:]
        # Of a chunk, which a compile ends with, the last page is complete with fewer tokens.
        whole = [len(page.tokens) == SIZE or page.canonical for page in pages]
        assert found.filled == [*whole, False].index(False)
        assert all(found.count(kind) == found.kinds.count(kind) for kind in SlotKind)
        mapped = [page.canonical and page.copy_of is None for page in pages]
        assert found.shared == [*mapped, False].index(False)
        cached_at = [at for at, count in found.cached_at_runs() for _ in range(count)]
        slots = [page.canonical for page in pages for _ in page.tokens]
        assert [at != GAP for at in cached_at] == slots


@given(segments, policies(), pads)
def test_pages_that_are_not_computed_come_first(given_segments, policy, pad):
    """Mapped ones, then copies, then what is computed: hits are a prefix whatever is resident."""
    plan = lay_out(given_segments, policy, layout(pad))
    order = [2 - page.canonical - (page.canonical and not page.copy_of) for page in plan.pages]
    assert order == sorted(order)
    assert (order.count(0), order.count(1)) == (plan.shared, len(plan.copies))
    assert not plan.pages[-1].canonical
    assert all(page.key or page.copy_of for page in plan.pages[: plan.canonical])


@given(segments, policies(), pads)
def test_no_computed_token_sees_a_later_slot(given_segments, policy, pad):
    """The causal bound: what a query may see comes before it in compute order."""
    plan = lay_out(given_segments, policy, layout(pad))
    computed = plan.positions[plan.canonical * SIZE :]
    assert computed == sorted(computed)
    assert GAP not in computed
    assert computed[-1] == plan.end - 1


@given(segments, policies())
def test_masked_pads_add_no_token_to_the_prompt(given_segments, policy):
    plan = lay_out(given_segments, policy, layout())
    assert set(plan.tokens) == {t for segment in given_segments for t in segment.tokens}
    assert all(
        (p == GAP) == (k is SlotKind.PAD) for p, k in zip(plan.positions, plan.kinds, strict=True)
    )


@given(segments, policies(), pads)
def test_foreign_tokens_are_those_that_the_user_did_not_send(given_segments, policy, pad):
    sent = {token for segment in given_segments for token in segment.tokens}
    for pad_token in (0, min(sent)):
        config = LayoutConfig(SIZE, "", pad, pad_token=pad_token, bos_token=1)
        plan = lay_out(given_segments, policy, config)
        assert set(plan.foreign) == set(plan.tokens) - sent


@given(segments, policies(), pads)
def test_a_slot_is_a_pad_iff_it_is_none_of_the_users_tokens(given_segments, policy, pad):
    plan = lay_out(given_segments, policy, layout(pad))
    real = sum(kind is not SlotKind.PAD for kind in plan.kinds)
    assert real == plan.prompt_tokens


@given(segments, tokens, tokens, policies(), pads)
def test_another_first_document_shares_no_computed_block(others, one, other, policy, pad):
    """Invariant 2: everything after a chunk depends on it."""
    if one == other:
        return
    others = [*others, Segment((7, 8, 9))]
    plans = [lay_out([Segment(t, chunk=True), *others], policy, layout(pad)) for t in (one, other)]
    computed = [{p.key for p in plan.pages if not p.canonical} - {None} for plan in plans]
    assert not computed[0] & computed[1]


@given(segments, policies(), pads)
def test_salts_never_share(given_segments, policy, pad):
    plans = [lay_out(given_segments, policy, layout(pad, scope)) for scope in ("a", "b")]
    keys = [_all_keys(plan) for plan in plans]
    assert not keys[0] & keys[1]


@given(segments, policies(), pads)
def test_a_chunk_has_the_same_keys_at_any_place(given_segments, policy, pad):
    isolated = [p for p in given_segments if p.chunk]
    front = [Segment((5,) * 20, chunk=True), Segment((6, 6, 6))]
    plans = [
        lay_out(ps, first(0), layout(pad))
        for ps in ([*isolated, Segment((4,))], [*front, *isolated, Segment((4,))])
    ]
    keys = [{k for c in plan.canonicals for k in c.keys} for plan in plans]
    assert keys[0] <= keys[1]


@given(tokens, contexts, contexts, policies(), pads)
def test_a_chunk_in_two_documents_has_two_keys(chunk, one, other, policy, pad):
    """From its first key on, and so has everything after it; one where documents do not count."""
    prompts = [
        [Segment(chunk, chunk=True, context=context), Segment((7,) * 20)]
        for context in (one, other)
    ]
    plans = [lay_out(prompt, policy, layout(pad)) for prompt in prompts]
    shared = _all_keys(plans[0]) & _all_keys(plans[1])
    assert shared == (_all_keys(plans[0]) if one == other else set())
    plain = [lay_out(prompt, policy, layout(pad, documents=False)) for prompt in prompts]
    assert plain[0] == plain[1]


@given(tokens, contexts, policies(), pads)
def test_a_document_does_not_change_what_a_prompt_shows(chunk, context, policy, pad):
    """A context leaves no slot, and its compile has anchor, document and chunk in one sequence."""
    prompt = [Segment((9, 8)), Segment(chunk, chunk=True, context=context), Segment((7,) * 20)]
    plain = lay_out(prompt, policy, layout(pad, documents=False))
    plan = lay_out(prompt, policy, layout(pad))
    assert (plan.tokens, plan.positions, plan.kinds) == (plain.tokens, plain.positions, plain.kinds)
    for canonical, bare in zip(plan.canonicals, plain.canonicals, strict=True):
        compiled = canonical.compile_plan()
        seen = [t for t, p in zip(compiled.tokens, compiled.positions, strict=True) if p != GAP]
        own = len(bare.pages[0].tokens) * canonical.anchor.blocks
        pairs = [pair for p in bare.pages for pair in zip(p.tokens, p.positions, strict=True)]
        shown = [token for token, position in pairs if position != GAP]
        assert seen == [*bare.anchor.tokens, *context, *shown]
        assert [p for p in compiled.positions if p != GAP] == list(range(len(seen)))
        assert list(compiled.tokens[own : own + len(shown)]) == shown


@given(segments, policies(), pads)
def test_equal_keys_mean_equal_content(given_segments, policy, pad):
    plan = lay_out(given_segments, policy, layout(pad))
    compiled = [page for c in plan.canonicals for page in c.compile_plan().pages]
    content: dict[bytes, tuple[int, ...]] = {}
    for page in [*plan.pages, *compiled]:
        if page.key is not None:
            known = content.setdefault(page.key, page.tokens)
            # A compile ends with the chunk's last token, within a page.
            assert all(a == b for a, b in zip(known, page.tokens, strict=False))
            assert len(known) == len(page.tokens) or page.canonical
            assert is_canonical(page.key) == page.canonical


@given(
    st.lists(st.builds(Segment, tokens=tokens, chunk=st.booleans()), max_size=4),
    tokens,
    st.lists(token, min_size=1, max_size=12).map(lambda some: tuple(some) * 5),
    st.sampled_from([none, first(2), first(16)]),
)
def test_generated_tokens_continue_the_chain(head, question, answer, policy):
    """A follow-up prompt that contains the answer finds the answer's blocks."""
    head = [*head, Segment(question)]
    plan = lay_out(head, policy, layout())
    longer = lay_out([*head, Segment(answer)], policy, layout())
    known = [page.key for page in plan.pages if len(page.tokens) == SIZE]
    fresh = plan.generated_keys([*plan.tokens, *answer], known)
    assert [*known, *fresh] == [p.key for p in longer.pages if len(p.tokens) == SIZE]


@given(segments, policies(), pads)
def test_the_footprint_is_the_plans(given_segments, policy, pad):
    plan = lay_out(given_segments, policy, layout(pad))
    footprint = measure(given_segments, policy, layout(pad))
    spares = [c.anchor.blocks + len(c.pages) - len(c.used) for c in plan.canonicals]
    spares = [max(spares, default=0) + len(plan.copies)]
    assert footprint.slots == len(plan.tokens)
    assert footprint.end == plan.end
    assert footprint.spare == max(spares, default=0)
    compiles = [c.compile_plan() for c in plan.canonicals]
    assert footprint.compile_slots == max((len(c.tokens) for c in compiles), default=0)
    assert footprint.compile_end == max((c.end for c in compiles), default=0)
    assert footprint == Footprint.of(plan)


def test_chunks_are_counted_from_the_first_of_the_prompt():
    """With the lengths that they have; text does not count."""
    prompt = [
        Segment((1, 2)),
        *(
            part
            for length in (5, 20, 7)
            for part in (Segment((3,) * length, chunk=True), Segment((4,)))
        ),
    ]
    for plans in (lay_out, measure):
        asked: list[tuple[int, int]] = []

        def policy(index: int, length: int, asked: list[tuple[int, int]] = asked) -> ChunkPolicy:
            asked.append((index, length))
            return ChunkPolicy()

        plans(prompt, policy, layout())
        assert asked == [(0, 5), (1, 20), (2, 7)]


def test_linking_everything_leaves_no_chunk_block():
    plan = lay_out(
        [Segment((1, 2)), Segment((3,) * 40, chunk=True), Segment((4,))], everything, layout()
    )
    assert plan.shared == 0
    assert not plan.canonicals
    assert plan.positions == list(range(43))


def test_first_block_linked_maps_the_rest():
    """MEPIC on a chunk of 20: the first block is computed, the second mapped with 12 pads."""
    chunk = tuple(range(100, 120))
    plan = lay_out([Segment(chunk, chunk=True), Segment((7, 8))], first(16), layout())
    mapped, head, tail = plan.pages
    assert mapped.canonical
    assert mapped.positions == (16, 17, 18, 19, *(GAP,) * 12)
    assert head.tokens == chunk[:16]
    assert tail.tokens == (7, 8)
    assert plan.canonicals[0].used == (1,)


def test_the_same_chunk_twice_is_the_same_blocks_twice():
    chunk = Segment(tuple(range(100, 132)), chunk=True)
    plan = lay_out([chunk, Segment((5,)), chunk, Segment((6,))], none, layout())
    a, b = plan.pages[:2], plan.pages[2:4]
    assert [p.key for p in a] == [p.key for p in b]
    assert a[0].positions[0] == 0
    assert b[0].positions[0] == 33
    assert len(plan.canonicals) == 1


def test_a_prompt_that_ends_in_a_chunk_computes_its_last_token():
    plan = lay_out([Segment((1,)), Segment(tuple(range(50, 66)), chunk=True)], none, layout())
    assert plan.pages[0].positions == (*range(1, 16), GAP)
    assert plan.pages[-1].tokens == (1, 65)
    assert plan.pages[-1].positions == (0, 16)


def test_leading_text_takes_the_engines_own_keys():
    raw = [b"raw0", b"raw1", b"raw2"]
    text, chunk = tuple(range(3, 43)), tuple(range(100, 140))
    plan = lay_out(
        [Segment(text), Segment(chunk, chunk=True), Segment((9,))], none, layout(), prefix_keys=raw
    )
    computed = [p.key for p in plan.pages if not p.canonical]
    assert computed[:2] == raw[:2]
    assert raw[2] not in computed


def test_private_pages_are_copied_and_never_shared():
    def private(index: int, length: int) -> ChunkPolicy:
        return ChunkPolicy(private=True)

    plan = lay_out([Segment((3,) * 32, chunk=True), Segment((4,))], private, layout())
    assert [page.key for page in plan.pages[:2]] == [None, None]
    assert plan.copies == plan.canonicals[0].keys
    assert {kind for page in plan.pages[:2] for kind in page.kinds} == {SlotKind.PRIVATE}
    # Both blocks are in the pool while they are copied.
    assert Footprint.of(plan).spare == len(plan.copies) == 2


def test_a_chunk_with_one_missing_block_is_missing():
    plan = lay_out([Segment((3,) * 40, chunk=True), Segment((4,))], none, layout())
    (chunk,) = plan.canonicals
    assert chunk.resident(lambda key: True)
    for gone in chunk.keys:
        assert not chunk.resident(lambda key, gone=gone: key != gone)


def test_bos_anchor_is_compiled_and_discarded():
    def bos(index: int, length: int) -> ChunkPolicy:
        return ChunkPolicy(anchor=Anchor(bos=4))

    plan = lay_out([Segment((3,) * 16, chunk=True), Segment((4,))], bos, layout())
    compiled = plan.canonicals[0].compile_plan()
    assert compiled.pages[0].tokens[:4] == (1, 1, 1, 1)
    assert compiled.pages[0].positions == (0, 1, 2, 3, *(GAP,) * 12)
    assert compiled.pages[1].positions == tuple(range(4, 20))
    # Nothing else in this prompt could be an attention sink.
    assert plan.pages[0].positions == (GAP, *range(1, 16))
    assert plan.pages[1].positions == (0, 16)


def test_anchored_chunks_are_compiled_right_after_the_prefix():
    def anchored(index: int, length: int) -> ChunkPolicy:
        return ChunkPolicy(anchor=Anchor(head=True))

    text = tuple(range(200, 220))
    prompt = [
        Segment(text),
        Segment((3,) * 16, chunk=True),
        Segment((5,) * 16, chunk=True),
        Segment((4,)),
    ]
    second = lay_out(prompt, anchored, layout()).canonicals[1].compile_plan()
    assert [p for p in second.positions if p != GAP] == list(range(36))


@given(st.lists(segments, min_size=1, max_size=4), policies(), pads, st.integers(1, 60))
def test_a_cache_of_any_size_changes_no_plan(prompts, policy, pad, room):
    cache = PageCache(room)
    for prompt in [*prompts, *prompts]:
        plain = lay_out(prompt, policy, layout(pad))
        assert lay_out(prompt, policy, layout(pad), cache=cache) == plain
        assert cache.tokens <= room or len(cache) == 1
    assert len(cache) or not any(segment.chunk for prompt in prompts for segment in prompt)


def test_empty_prompt_and_stray_links_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        lay_out([Segment(())], none, layout())
    with pytest.raises(ValueError, match="leave a chunk"):
        lay_out(
            [Segment((1, 2), chunk=True), Segment((3,))], lambda i, n: ChunkPolicy([n]), layout()
        )


def _all_keys(plan: Plan) -> set[bytes]:
    keys = {page.key for page in plan.pages if page.key}
    return keys | {page.key for c in plan.canonicals for page in c.pages if page.key}


@pytest.mark.parametrize("linked", [(), range(4), range(4, 8), (1,), range(10)])
def test_canonical_blocks_are_needed_or_not(linked: Sequence[int]) -> None:
    """As a request sees them, also when the pages come from the cache."""
    cache = PageCache()
    prompt = [Segment((1, 2)), Segment(tuple(range(10, 20)), chunk=True), Segment((3,))]
    policy, config = ChunkPolicy(linked=linked), LayoutConfig(block_size=4)
    for _ in range(2):
        plan = lay_out(prompt, lambda index, length: policy, config, cache=cache)
        for found in plan.canonicals:
            assert found.keys == tuple(found.pages[i].key for i in found.used)
            others = [p.key for i, p in enumerate(found.pages) if i not in found.used]
            assert found.unused == tuple(others)
            assert found == Canonical.of(found.anchor, found.pages, found.used)
        assert len(plan.canonicals) == (len(linked) < 10)
