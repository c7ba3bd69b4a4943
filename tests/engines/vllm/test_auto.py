"""Chunks or text: what `auto` serves how, and that answers are those of the way that served."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import engine_ahead
from small_engine import ANCHORS, check_drained, small_config

from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, Rule, mepic, naive
from picbench.engines.planning.policy import Segment
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.scheduler.chooser import names_of
from picbench.engines.vllm.scheduler.machine_costs import MEASURED, MachineCosts
from picbench.experiments.oracle import as_oracle, as_served
from picbench.experiments.storm import serve

TOLERANCE = 1e-3


def steady(engine: Engine) -> Engine:
    """The engine with the costs of the testbed on the measured machine, which no step corrects."""
    chooser: Any = engine._running.scheduler.chooser
    chooser.costs = MachineCosts("cpu", MEASURED["cpu"][0], 0)
    return engine


@pytest.fixture(scope="module")
def auto(llama: Path) -> Iterator[Engine]:
    config = small_config(llama, 600, 2048, tiers="", batch_tokens=512, algorithm="auto")
    with Engine(config) as engine:
        yield steady(engine)


@pytest.fixture
def fresh(auto: Engine) -> Engine:
    """The engine, which has seen nothing."""
    auto.reset()
    return auto


def emptied(engine: Engine) -> Engine:
    """The engine, which has seen chunks of others, and each of them once."""
    engine.reset()
    chooser: Any = engine._running.scheduler.chooser
    for number in range(400):
        segments = [Segment((number,), chunk=True)]
        assert chooser.without_plan(segments, names_of(segments, "another tenant"), 0)
    return engine


@pytest.fixture
def empty(auto: Engine) -> Engine:
    """The engine, in which new chunks are not expected to recur."""
    return emptied(auto)


@pytest.fixture
def docs(draw: Any) -> list[Chunk]:
    return [Chunk(tokens=draw(150 + 7 * i, 40 + i)) for i in range(6)]


def ask(engine: Engine, request: Request, **more: Any) -> Result:
    [result] = engine.generate([request], max_tokens=4, ignore_eos=True, **more)
    return result


def prompt(draw: Any, chunks: Sequence[Chunk], name: int, **more: Any) -> Request:
    return Request([Text(tokens=draw(21, 7)), *chunks, Text(tokens=draw(9, name))], **more)


def compiled(result: Result) -> int:
    return result.counts.compile_work


def test_documents_are_compiled_when_they_recur_and_then_reused(
    empty: Engine, draw: Any, docs: list[Chunk]
) -> None:
    first = ask(empty, prompt(draw, docs[:4], 1))
    assert first.choice is not None and first.choice.texts == (0, 1, 2, 3)
    assert compiled(first) == first.hits.chunk == 0
    second = ask(empty, prompt(draw, [docs[3], docs[1], docs[0]], 2))
    assert second.choice is not None and second.choice.texts == ()
    assert compiled(second) == sum(len(docs[i].tokens or ()) for i in (0, 1, 3))
    for number, order in enumerate(((0, 3, 1), (1, 0, 3), (3, 0)), 3):
        again = ask(empty, prompt(draw, [docs[i] for i in order], number))
        assert again.choice is not None and again.choice.texts == ()
        assert compiled(again) == 0
        assert again.hits.chunk > 0
    mixed = ask(empty, prompt(draw, [docs[0], docs[5], docs[2], docs[1]], 9))
    assert mixed.choice is not None and mixed.choice.texts == (1,)
    assert compiled(mixed) == len(docs[2].tokens or ())
    check_drained(empty)


def test_new_documents_are_compiled_until_new_ones_do_not_recur(fresh: Engine, draw: Any) -> None:
    ways = []
    for number in range(6):
        chunks = [Chunk(tokens=draw(220, 2000 + 10 * number + i)) for i in range(4)]
        found = ask(fresh, prompt(draw, chunks, 300 + number))
        assert found.choice is not None
        ways.append(len(found.choice.texts))
    assert ways[0] == 0 and ways[-3:] == [4] * 3
    # Some that come again are worth it for the next new ones.
    for number in range(6):
        chunks = [Chunk(tokens=draw(220, 2000 + 10 * number + i)) for i in range(4)]
        ask(fresh, prompt(draw, chunks, 400 + number))
    chunks = [Chunk(tokens=draw(220, 3000 + i)) for i in range(4)]
    found = ask(fresh, prompt(draw, chunks, 500))
    assert found.choice is not None and found.choice.texts == ()


def test_one_off_chunks_cost_no_compile_and_answer_as_prefix_caching(
    empty: Engine, draw: Any
) -> None:
    planner: Any = empty._running.scheduler._planner
    known = len(planner._pages)
    for number in range(6):
        chunks = [Chunk(tokens=draw(170, 1000 + 10 * number + i)) for i in range(3)]
        request = prompt(draw, chunks, 200 + number)
        found = ask(empty, request, logprobs=5)
        assert found.choice is not None and found.choice.texts == (0, 1, 2)
        assert compiled(found) == found.counts.linked == found.counts.padded == 0
        # Nothing of a plan was made for it.
        assert len(planner._pages) == known
        emptied(empty)
        plain = Request([Text(tokens=found.prompt_tokens)])
        for same in (plain, Request(request.segments, "prefix")):
            other = ask(empty, same, logprobs=5)
            assert (other.tokens, other.logprobs) == (found.tokens, found.logprobs)
            emptied(empty)
    assert len(empty._running.scheduler.chunk_store) == 0


def test_what_is_served_as_text_is_a_plain_request(empty: Engine, draw: Any) -> None:
    chunks = [Chunk(tokens=draw(100, 70 + i)) for i in range(2)]
    request = prompt(draw, chunks, 1, max_tokens=1)
    tokens = tuple(t for segment in request.segments for t in segment.tokens or ())
    plain = Request([Text(tokens=tokens)], max_tokens=1)
    for one in (request, plain):
        empty.submit(one, ignore_eos=True)
    text, other = empty._running.scheduler.requests.values()
    assert text.block_hashes == other.block_hashes and len(text.block_hashes) == 230 // 16
    assert text.prompt_token_ids == other.prompt_token_ids == list(tokens)
    assert text._block_hasher is not None
    empty.drain()
    empty.step()


def test_a_prompt_that_prefix_caching_has_is_text(
    empty: Engine, draw: Any, docs: list[Chunk]
) -> None:
    talk = prompt(draw, docs[:3], 1)
    ask(empty, talk)
    for number in range(2, 5):
        longer = Request([*talk.segments, Text(tokens=draw(30, number))])
        found = ask(empty, longer)
        assert found.choice is not None and found.choice.texts == (0, 1, 2)
        assert (found.counts.reused or 0) >= 480
        assert found.hits.prefix == (found.counts.reused or 0) // 16
        talk = longer


def test_requests_that_name_an_algorithm_are_as_in_other_engines(
    empty: Engine, draw: Any, docs: list[Chunk]
) -> None:
    for name, reuses in (("mepic", True), ("naive", True), ("prefix", False), ("full", False)):
        found = ask(empty, prompt(draw, docs[:2], 1, algorithm=name))
        assert found.choice is None
        assert (found.hits.chunk > 0) is reuses
    # What they compile is seen by it.
    empty.reset()
    ask(empty, prompt(draw, docs[4:], 1, algorithm="mepic"))
    empty.reset(tiers=False)
    found = ask(empty, prompt(draw, docs[4:], 2))
    assert found.choice is not None and found.choice.texts == ()


def test_chunks_that_are_named_for_keeping_are_compiled_at_once(
    empty: Engine, draw: Any, docs: list[Chunk]
) -> None:
    empty.cache.warm(docs[:2], pin=True)
    found = ask(empty, prompt(draw, [docs[1], docs[5], docs[0]], 3))
    assert found.choice is not None and found.choice.texts == (1,)
    assert compiled(found) == 0 and found.hits.chunk > 0
    empty.cache.unpin(docs[:2])


def test_tenants_do_not_see_what_others_have(empty: Engine, draw: Any, docs: list[Chunk]) -> None:
    ask(empty, prompt(draw, docs[:2], 1, salt="one"))
    other = ask(empty, prompt(draw, docs[:2], 2, salt="another"))
    assert other.choice is not None and other.choice.texts == (0, 1)
    again = ask(empty, prompt(draw, docs[1::-1], 3, salt="one"))
    assert again.choice is not None and again.choice.texts == ()


def test_what_only_chunks_can_do_is_served_as_chunks(empty: Engine, draw: Any) -> None:
    placed = Request([Chunk(tokens=draw(40, 1), position=9), Text(tokens=draw(9, 2), position=90)])
    found = ask(empty, placed)
    assert found.choice is not None
    assert (found.choice.texts, found.choice.expected) == ((), None)
    assert found.hits.chunk > 0


RULES: dict[str, Rule] = {
    "auto": mepic(),
    "auto:naive": naive(),
    "auto:naive:anchor=passage": naive().anchored(ANCHORS["passage"]),
    "auto:mepic:pad=paper": mepic().padded(0),
    "auto:mepic:context=document": mepic(),
    "auto:epic:k=0:copy=shared:anchor=passage": naive().anchored(ANCHORS["passage"]),
}


@pytest.mark.parametrize("algorithm", RULES)
def test_answers_are_the_oracles_of_the_way_that_served(
    algorithm: str, empty: Engine, llama: Path, draw: Any, docs: list[Chunk]
) -> None:
    oracle, ways = Oracle(str(llama)), Counter[str]()
    orders = ((0, 1, 2), (2, 1), (3, 1, 4, 2), (1, 5, 2), (0, 5))
    for number, order in enumerate(orders):
        asked = prompt(draw, [docs[i] for i in order], number, algorithm=algorithm)
        found = ask(empty, asked, logprobs=5)
        assert found.choice is not None and found.logprobs is not None
        texts = len(found.choice.texts)
        ways["text" if texts == len(order) else "mixed" if texts else "chunks"] += 1
        served = as_served(asked, found.choice)
        segments = as_oracle(served.segments, 0)
        known = oracle.logprobs(segments, RULES[algorithm], found.tokens)
        for step, row in zip(found.logprobs, known, strict=True):
            for token, value in step.items():
                assert value == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert ask(empty, served).tokens == found.tokens
    assert set(ways) == {"text", "mixed", "chunks"}


def test_picked_tokens_copies_and_link_tokens_mix_with_text(
    empty: Engine, draw: Any, docs: list[Chunk]
) -> None:
    """The oracle of these is compared in `picbench measure oracle`."""
    for inner in ("prophetkv:r=0.2", "cacheblend:r=0.2", "epic:k=16", "kvlink:n=1:first=7"):
        for number, order in enumerate(((0, 1, 2), (2, 1), (3, 1, 4, 2))):
            asked = prompt(draw, [docs[i] for i in order], number, algorithm=f"auto:{inner}")
            found = ask(empty, asked)
            assert found.choice is not None
            assert ask(empty, as_served(asked, found.choice)).tokens == found.tokens
        empty.reset()


#: Of storms.
ALGORITHMS = ("auto", "auto:naive", "auto:epic:k=4", "auto:kvlink:n=1:first=7", "mepic", "prefix")


def storm_requests(draw: Any, count: int) -> list[Request]:
    dice = random.Random(5)
    chunks = [Chunk(tokens=draw(dice.choice((15, 16, 17, 33, 60, 90)), 600 + i)) for i in range(30)]
    return [
        Request(
            [
                *([Text(tokens=draw(21, 7))] * dice.randint(0, 1)),
                *dice.choices(chunks, k=dice.randint(1, 5)),
                Text(tokens=draw(dice.randint(1, 20), 5000 + index)),
            ],
            dice.choice(ALGORITHMS),
            dice.choice((1, 3, 24)),
            dice.choice((None, None, "another tenant")),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("tiers", ["", "host:4MiB"])
def test_a_storm_answers_as_what_was_chosen(
    ahead: bool, tiers: str, pebble: Path, draw: Any
) -> None:
    requests = storm_requests(draw, 160)
    begin = engine_ahead if ahead else Engine
    config = small_config(pebble, 70, 512, batch_tokens=128, max_requests=24, tiers=tiers)
    with begin(config) as engine:
        found, run = serve(steady(engine), requests, flying=40, aborts=random.Random(3))
        assert run["drained"] and not run["unsound"]
        assert len(found) + run["aborted"] == len(requests)
        check_drained(engine)
        assert not engine._running.scheduler.linker._texts
    choices = {n: result.choice for n, result in found.items()}
    chosen = [as_served(request, choices.get(n)) for n, request in enumerate(requests)]
    with Engine(small_config(pebble, 3000, 512, tiers="")) as engine:
        expected, _ = serve(engine, chosen)
    assert {n: result.tokens for n, result in found.items()} == {
        n: expected[n].tokens for n in found
    }
    texts = [(len(c.texts), c.chunks) for c in choices.values() if c is not None]
    assert any(0 < some < count for some, count in texts)
    assert any(some == 0 for some, _ in texts) and any(some == count for some, count in texts)


def test_requests_alone_correct_the_costs_where_auto_serves(llama: Path, draw: Any) -> None:
    for algorithm, corrected in (("mepic", False), ("auto", True)):
        with Engine(small_config(llama, 300, 1024, tiers="", algorithm=algorithm)) as engine:
            scheduler: Any = engine._running.scheduler
            costs = scheduler.chooser.costs
            scheduler._first_tokens._clock = lambda: 1e12
            ask(engine, prompt(draw, [Chunk(tokens=draw(200, 3))], 1))
            # That is far too long: each correction is bounded.
            assert (costs._slowness > 1) is corrected
            assert all(1 <= one < 1.2 for one in (costs._slowness, *costs._corrections))
            before = costs._slowness
            for name in (2, 3):
                engine.submit(prompt(draw, [Chunk(tokens=draw(200, 3))], name))
            engine.drain()
            assert costs._slowness == before
