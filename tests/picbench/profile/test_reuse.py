"""What is counted without slots is what the project's own plans come to."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mixed_traffic import Mixes, ids

from picbench.engines.algorithms import Algorithm, parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.profile.blocks import BlockKeys
from picbench.profile.reuse import ArmSimulation, SimulatedEngine
from picbench.workloads.traffic.trace import TracedRequest, TraceSegment

ARMS = (
    "mepic",
    "mepic:blocks=2",
    "naive",
    "epic:k=16",
    "epic:k=5:copy=shared",
    "epic:k=32:copy=shared",
)

#: Arms that are planned as engines plan them; the last ones put tokens of their own into prompts.
PLANNED = (
    "mepic:anchor=head",
    "naive:anchor=head:context=document",
    "epic:k=0:copy=shared",
    "cacheblend",
    "cacheblend:r=0.15:select=first:copy=shared",
    "mepic:select=question",
    "prompt-cache",
    "block-attention",
    "minipic",
)
ADDING = ("kvlink:n=5", "mepic:pad=paper", "epic:k=16:bos=chunk:copy=shared")


def plan_of(request: TracedRequest, algorithm: Algorithm) -> Plan:
    segments: list[Segment] = []
    for s in request.segments:
        if segments and not (s.chunk or segments[-1].chunk):
            segments[-1] = Segment(segments[-1].tokens + ids(s))
        else:
            segments.append(Segment(ids(s), s.chunk, context=ids(s.before)))
    layout = LayoutConfig(pad=algorithm.pads, bos_token=0, documents=algorithm.documents)
    return lay_out(algorithm.arrange(segments, layout), algorithm.plan_chunk, layout)


class Planned:
    """A cache that never evicts, of the keys in plans."""

    def __init__(self, spec: str) -> None:
        self._algorithm = parse(spec)
        self._keys: set[bytes] = set()

    def serve(self, request: TracedRequest) -> tuple[int, ...]:
        """Reused and compiled tokens, and blocks of each kind."""
        plan, compiled = plan_of(request, self._algorithm), 0
        for chunk in plan.canonicals:
            if not chunk.resident(self._keys.__contains__):
                compile_plan = chunk.compile_plan()
                hits = self._hits(compile_plan, 0)
                compiled += sum(page.real for page in compile_plan.pages_from(hits))
            self._keys |= {page.name for page in (*chunk.anchor.pages(), *chunk.pages)}
        hits = plan.canonical if plan.copies else self._hits(plan, plan.shared)
        reused = plan.real - sum(page.real for page in plan.pages_from(hits))
        self._keys |= {key for key in plan.keys if key is not None}
        return reused, compiled, plan.shared, hits - plan.canonical, len(plan.copies)

    def _hits(self, plan: Plan, hits: int) -> int:
        most = (len(plan.tokens) - 1) // 16
        while hits < most and plan.keys[hits] in self._keys:
            hits += 1
        return hits


@pytest.mark.parametrize("spec", [*ARMS, *PLANNED])
@pytest.mark.parametrize("mix", ["rag", "articles", "agents", "nothing"])
def test_counts_are_those_of_plans(spec: str, mix: str) -> None:
    trace = getattr(Mixes(5, 40), mix)()
    planned, counted = Planned(spec), ArmSimulation(parse(spec), exact=True)
    for request in trace:
        if not any(segment.chunk for segment in request.segments):
            continue  # vLLM's own keys: see the test against engines.
        found = counted.serve(request)
        assert found is not None
        assert planned.serve(request) == (
            found.reused,
            found.compiled,
            found.chunk_blocks,
            found.prefix_blocks,
            found.copied_blocks,
        )


@pytest.mark.parametrize("spec", [*ARMS, *PLANNED, *ADDING])
@pytest.mark.parametrize("blocks", [None, 400])
def test_a_request_holds_the_blocks_of_its_plan(spec: str, blocks: int | None) -> None:
    """Its own and shared ones together, until its reply ends; the last token is not stored."""
    algorithm = parse(spec)
    counted = ArmSimulation(algorithm, exact=True, blocks=blocks)
    for request in Mixes(9, 30).nothing():
        found = counted.serve(request)
        assert found is not None
        slots = len(plan_of(request, algorithm).tokens) + request.output - 1
        held = found.own_blocks + sum(count for _, count in found.shared)
        if blocks is not None:  # In a pool what others hold is counted by kind.
            held += found.chunk_blocks + found.prefix_blocks
        assert held == -(-slots // 16)


@pytest.mark.parametrize(("spec", "unmapped"), [("naive", 0), ("mepic", 1), ("mepic:blocks=2", 2)])
def test_a_compile_holds_what_its_request_does_not_map(spec: str, unmapped: int) -> None:
    """Two chunks of 45 tokens, three blocks each, and one of 10 that is linked as a whole."""
    mixes = Mixes(2, 1)
    chunks = mixes.chunk(45), mixes.chunk(45), mixes.chunk(10)
    request = mixes.request(*chunks, mixes.text(5))
    arm = ArmSimulation(parse(spec), exact=True)
    first, again = arm.serve(request), arm.serve(request)
    assert first is not None
    assert again is not None
    assert (first.compile_blocks, again.compile_blocks) == (2 * unmapped, 0)
    assert first.compiled == 90 + (10 if spec == "naive" else 0)


@pytest.mark.parametrize("spec", ["prefix", "reorder", *ARMS, *PLANNED, *ADDING])
@pytest.mark.parametrize("blocks", [None, 44])
@pytest.mark.parametrize("mix", ["rag", "nothing"])
def test_contents_without_tokens_come_to_the_same(spec: str, blocks: int | None, mix: str) -> None:
    """Where no content begins like another, names tell as much as tokens."""
    trace = [r for r in getattr(Mixes(7, 40), mix)() if not alike(r)]
    exact = ArmSimulation(parse(spec), exact=True, blocks=blocks)
    named = ArmSimulation(parse(spec), exact=False, blocks=blocks)
    for request in trace:
        bare = tuple(segment._replace(tokens=None) for segment in request.segments)
        found = named.serve(TracedRequest(bare, request.output))
        expected = exact.serve(request)
        assert (found is None) == (expected is None)
        if found and expected:
            assert (found.reused, found.compiled) == (expected.reused, expected.compiled)
    assert named.close() == exact.close()


def alike(request: TracedRequest) -> bool:
    """Whether a chunk is the one that begins like another."""
    return any(segment.chunk and segment.length == 49 for segment in request.segments)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("blocks", [None, 20])
@pytest.mark.parametrize(
    ("chunk", "reply", "outputs"),
    # Of 20 text tokens and 29 of a reply the last is not stored; where a chunk and 10 more are
    # between them, its blocks are mapped; a reply that ends early forgets nothing of 20 + 59.
    [(False, 29, [29]), (True, 29, [29]), (False, 60, [40, 5])],
)
def test_a_known_reply_is_found_by_the_next_request(
    exact: bool, blocks: int | None, chunk: bool, reply: int, outputs: list[int]
) -> None:
    mixes = Mixes(1, 1)
    first: tuple[TraceSegment, ...] = (mixes.text(20),)
    if chunk:
        first += mixes.chunk(32), mixes.text(10)
    answer, more = mixes.text(reply), mixes.text(9)
    second = (*first, answer, more)
    if not exact:
        (answer,), first, second = bare((answer,)), bare(first), bare(second)
    arm = ArmSimulation(parse("naive" if chunk else "prefix"), exact=exact, blocks=blocks)
    for output in outputs:
        arm.serve(TracedRequest(first, output, reply=answer))
    found = arm.serve(TracedRequest(second, 1))
    assert found is not None
    assert (found.chunk_blocks, found.prefix_blocks) == (2 * chunk, 3)
    assert found.reused == 32 * chunk + 48


def bare(segments: tuple[TraceSegment, ...]) -> tuple[TraceSegment, ...]:
    return tuple(segment._replace(tokens=None) for segment in segments)


def test_what_is_not_known_is_never_found_again() -> None:
    """Contents without a name: a text of two whole blocks, then a chunk."""
    text = TraceSegment(None, 32, chunk=False)
    runs = BlockKeys(exact=False).runs([text])
    assert [(run.blocks, run.forever) for run in runs] == [(1, False), (1, False)]
    alone = ArmSimulation(parse("prefix"), exact=False).serve(TracedRequest((text,), 1))
    assert alone is not None
    assert (alone.shared, alone.own_blocks) == ((), 2)
    for blocks in (None, 40):
        for content, reused in ((None, 0), (7, 32)):
            arm = ArmSimulation(parse("naive"), exact=False, blocks=blocks)
            chunk = TraceSegment(content, 32, chunk=True)
            tail = TraceSegment(None, 8, chunk=False)
            found = [arm.serve(TracedRequest((chunk, tail), 1)) for _ in range(2)]
            compiled = [counts.compiled for counts in found if counts is not None]
            assert compiled == [32, 32 - reused]


@pytest.mark.parametrize("blocks", [None, 40])
def test_the_last_token_of_a_prompt_is_computed_and_that_of_a_reply_is_not(
    blocks: int | None,
) -> None:
    """After a prompt of one block, a second one is full once 17 tokens are answered."""
    text = Mixes(1, 1).text(16)
    for output, cached in ((16, 1), (17, 2)):
        arm = ArmSimulation(parse("prefix"), exact=True, blocks=blocks)
        arm.serve(TracedRequest((text,), output))
        assert arm.close().cached_blocks == cached
        found = arm.serve(TracedRequest((text,), 1))
        assert found is not None
        assert (found.reused, found.computed) == (0, 16)


@pytest.mark.parametrize(
    ("spec", "chunks", "need"),
    [
        *[("naive", 1, 4), ("mepic", 1, 5), ("mepic", 2, 8)],
        ("naive:anchor=head:context=document", 2, 10),
    ],
)
def test_a_request_is_served_where_it_and_its_compile_just_fit(
    spec: str, chunks: int, need: int
) -> None:
    """Chunks of three blocks, each after three of its document, and five tokens.

    Mepic computes a block of each anew, and compiles it too.
    """
    mixes = Mixes(2, 1)
    some = [mixes.chunk(45)._replace(before=mixes.text(48)) for _ in range(chunks)]
    request = TracedRequest((*some, mixes.text(5)), 1)
    for blocks, fits in ((need, True), (need - 1, False)):
        arm = ArmSimulation(parse(spec), exact=True, blocks=blocks)
        assert (arm.serve(request) is not None) is fits
        assert (arm.totals.requests, arm.totals.refused) == (fits, not fits)


@pytest.mark.parametrize("spec", ["naive", "epic:k=16"])
@pytest.mark.parametrize("blocks", [None, 60])
def test_a_request_that_comes_again_compiles_nothing(spec: str, blocks: int | None) -> None:
    """Without a bound the blocks that it finds are `shared`, in a pool they are counted by kind."""
    mixes = Mixes(2, 1)
    request = TracedRequest((mixes.chunk(48), mixes.text(40)), 1)
    arm = ArmSimulation(parse(spec), exact=True, blocks=blocks)
    found = [one for one in (arm.serve(request), arm.serve(request)) if one is not None]
    assert [one.compiled for one in found] == [48, 0]
    assert [one.computed for one in found] == [
        one.prompt - one.reused + one.compiled for one in found
    ]
    if spec == "naive":
        assert [one.prefix_blocks for one in found] == [0, 2]
        own = [one.own_blocks + sum(count for _, count in one.shared) for one in found]
        assert own == ([6, 6] if blocks is None else [3, 1])


def test_a_chunk_that_begins_like_another_adds_only_the_blocks_that_are_new() -> None:
    mixes = Mixes(2, 1)
    first = mixes.chunk(48)
    second = mixes.alike(first, 32)
    arm = ArmSimulation(parse("naive"), exact=True)
    for chunk in (first, second):
        arm.serve(TracedRequest((chunk, mixes.text(5)), 1))
    assert arm.close().cached_blocks == 3 + 2
    assert arm.totals.compiled == 48 + 32


@pytest.mark.parametrize("spec", ["prefix", *ARMS, *PLANNED])
def test_a_request_that_has_ended_references_nothing(spec: str) -> None:
    """In a pool that evicts, with chunks that begin alike."""
    arm = ArmSimulation(parse(spec), exact=True, blocks=44)
    engine = arm._cache
    assert isinstance(engine, SimulatedEngine)
    pool = engine.pool
    for request in Mixes(7, 30).rag():
        arm.serve(request)
        assert pool._free + pool.keyed == pool.usable
        assert not any(run.refs for runs in pool._cached.values() for run in runs)
    assert arm.close().requests


def test_a_chunk_is_used_as_a_whole() -> None:
    """Its first block, which mepic computes anew, is not evicted before what was used earlier."""
    mixes = Mixes(2, 1)
    chunk = TracedRequest((mixes.chunk(45), mixes.text(5)), 1)
    arm = ArmSimulation(parse("mepic"), exact=True, blocks=16)
    for request in (chunk, mixes.text(96), chunk, mixes.text(112)):
        arm.serve(request if isinstance(request, TracedRequest) else TracedRequest((request,), 1))
    found = arm.serve(chunk)
    assert found is not None
    assert found.compiled == 0
    assert arm.close().evicted_blocks
