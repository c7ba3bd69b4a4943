"""The engine against the oracle: every algorithm, order and chunk length, in steps of 64 tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from small_engine import ANCHORS, small_config

from picbench.engines.engine import Engine
from picbench.engines.oracle import (
    Blend,
    Oracle,
    Rule,
    block_attention,
    epic,
    epic_bos,
    epic_zero,
    first,
    full,
    kvlink,
    mepic,
    naive,
)
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import ConfigError

TOLERANCE = 1e-3
APART = 0.1
BOS, PAD = 1, 0
PASSAGE, OTHER = ANCHORS.values()
TEMPERATURES = (0.5, 0.9, 2.0)

REUSING: dict[str, Rule | Blend] = {
    "naive": naive(),
    "naive:anchor=head": naive().anchored(),
    "naive:pad=paper": naive().padded(PAD),
    "epic:k=0": epic_zero(BOS),
    "epic:k=0:sinks=1": epic_zero(BOS, 1),
    "epic:k=1": epic(1),
    "epic:k=2": epic(2),
    "epic:k=4": epic(4),
    "epic:k=8": epic(8),
    "epic:k=16": epic(16),
    "epic:k=23": epic(23),
    "epic:k=32": epic(32),
    "epic:k=64": epic(64),
    "epic:k=16:pad=paper": epic(16).padded(PAD),
    "epic:k=16:anchor=head": epic(16).anchored(),
    "epic:k=16:copy=shared": epic(16),
    "epic:k=4:bos=chunk": epic_bos(4, BOS),
    "block-attention": block_attention(),
    "prompt-cache": naive(),
    "kvlink:n=0": naive(),
    "kvlink:n=1": kvlink((PAD,)),
    "kvlink:n=5:first=7": kvlink(*(range(i, i + 5) for i in range(7, 27, 5))),
    "cacheblend:r=0.15": Blend(0.15),
    "cacheblend:r=0.1:deviation=k:anchor=head": Blend(0.1, "k").anchored(),
    "cacheblend:r=0.15:select=first": first(0.15),
    "mepic": mepic(),
    "mepic:blocks=2": mepic(2),
    "mepic:pad=paper": mepic().padded(PAD),
    "mepic:anchor=head": mepic().anchored(),
    "mepic:pad=paper:anchor=head": mepic().anchored().padded(PAD),
    "naive:anchor=passage": naive().anchored(PASSAGE),
    "naive:anchor=./other.txt": naive().anchored(OTHER),
    "epic:k=0:anchor=passage": naive().anchored(PASSAGE),
    "epic:k=4:anchor=./other.txt": epic(4).anchored(OTHER),
    "cacheblend:r=0.15:anchor=passage": Blend(0.15).anchored(PASSAGE),
    "kvlink:n=1:anchor=passage": kvlink((PAD,)).anchored(PASSAGE),
    "mepic:anchor=passage": mepic().anchored(PASSAGE),
    "mepic:pad=paper:anchor=./other.txt": mepic().anchored(OTHER).padded(PAD),
    "naive:temperature=0.5": replace(naive(), temperature=0.5),
    "naive:pad=paper:anchor=passage:temperature=2.0": replace(
        naive().anchored(PASSAGE).padded(PAD), temperature=2.0
    ),
    "ape": replace(naive().anchored(), temperature=0.9),
}
RULES: dict[str, Rule | Blend] = {"full": full(), "prefix": full(), **REUSING}

#: Algorithms whose requests copy chunk KV, unless they are told to share it.
COPYING = tuple(
    spec
    for spec in REUSING
    if spec.split(":")[0] in ("epic", "cacheblend") and "shared" not in spec
)

ORDERS = ["AB", "BA", "CBA", "ABA"]
LENGTHS = {"A": 150, "B": 35, "C": 81}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    sizes = {"batch_tokens": 64, "max_requests": 8, "temperatures": TEMPERATURES}
    with Engine(small_config(llama, 2000, 1024, **sizes)) as engine:
        yield engine


class Case:
    """Builds prompts that no other test has cached, runs them, and compares."""

    def __init__(self, engine: Engine, oracle: Oracle, draw: Any, deviation: Any, seed: int):
        self.engine = engine
        self.oracle = oracle
        self.draw = draw
        self.deviation = deviation
        self.seed = seed

    def text(self, count: int, key: int = 0) -> Text:
        return Text(tokens=self.draw(count, hash((self.seed, 0, key))))

    def chunk(self, count: int, key: int = 0) -> Chunk:
        return Chunk(tokens=self.draw(count, hash((self.seed, 1, key))))

    def run(self, *requests: Request, max_tokens: int = 4) -> list[Result]:
        return self.engine.generate(requests, max_tokens=max_tokens, logprobs=8, ignore_eos=True)

    def error(self, request: Request, result: Result, rule: Rule | Blend | None = None) -> float:
        rule = rule or RULES[request.algorithm or "full"]
        return float(self.deviation(self.oracle, rule, request, result))

    def hold(self, algorithm: str, segments: Sequence[PromptSegment]) -> tuple[Result, Result]:
        """Run a request cold, then warm; both must be the oracle's."""
        request = Request(segments, algorithm=algorithm)
        cold, warm = self.run(request) + self.run(request)
        assert self.error(request, cold) < TOLERANCE
        assert self.error(request, warm) < TOLERANCE
        assert warm.tokens == cold.tokens
        return cold, warm


@pytest.fixture
def case(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any, request: pytest.FixtureRequest
) -> Case:
    return Case(engine, oracle, draw, deviation, seed=crc32(request.node.nodeid.encode()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("algorithm", RULES)
def test_algorithms_and_orders(case: Case, algorithm: str, order: str) -> None:
    chunks = [case.chunk(LENGTHS[name], ord(name)) for name in order]
    segments = [case.text(21, 1), *chunks, case.text(19, 2)]
    cold, warm = case.hold(algorithm, segments)
    if algorithm in REUSING:
        assert warm.hits.chunk + warm.hits.copied > 0
        assert bool(warm.hits.copied) == (algorithm in COPYING)
        assert warm.counts.compile_work == 0 < cold.counts.compile_work
        assert case.error(Request(segments), cold, full()) > APART
    else:
        assert cold.counts.reused == 0
        assert (warm.counts.reused > 0) == (algorithm == "prefix")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 150])
@pytest.mark.parametrize(
    "algorithm",
    [
        "naive",
        "naive:anchor=head",
        "naive:anchor=passage",
        "epic:k=0",
        "epic:k=16",
        "mepic",
        "mepic:pad=paper",
    ],
)
def test_chunk_lengths(case: Case, algorithm: str, length: int) -> None:
    chunks = [case.chunk(length, 1), case.chunk(33, 2), case.chunk(length, 3)]
    case.hold(algorithm, [case.text(5, 1), *chunks, case.text(7, 2)])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 150])
@pytest.mark.parametrize("algorithm", ["naive", "epic:k=4", "mepic", "mepic:pad=paper"])
def test_empty_question(case: Case, algorithm: str, length: int) -> None:
    case.hold(algorithm, [case.text(5), case.chunk(40, 1), case.chunk(length, 2)])


@pytest.mark.parametrize("algorithm", REUSING)
def test_text_between_chunks(case: Case, algorithm: str) -> None:
    a, b = case.chunk(40, 1), case.chunk(23, 2)
    texts = [case.text(count, count) for count in (18, 1, 16, 9)]
    case.hold(algorithm, [texts[0], a, texts[1], b, texts[2], a, texts[3]])


@pytest.mark.parametrize("algorithm", REUSING)
def test_chunk_leads_prompt(case: Case, algorithm: str) -> None:
    case.hold(algorithm, [case.chunk(40, 1), case.chunk(23, 2), case.text(9)])


@pytest.mark.parametrize("algorithm", ["naive:anchor=passage", "epic:k=0"])
def test_a_prompt_has_an_attention_sink(case: Case, algorithm: str) -> None:
    """The first token of a prompt is computed, if its chunk was compiled after others."""
    a, question = case.chunk(40, 1), case.text(9)
    _, warm = case.hold(algorithm, [a, a, question])
    assert (warm.counts.linked, warm.counts.compile_work) == (1, 0)
    _, warm = case.hold(algorithm, [case.text(3), a, a, question])
    assert (warm.counts.linked, warm.counts.compile_work) == (0, 0)


def test_two_anchors_share_no_blocks(case: Case) -> None:
    segments = [case.text(5), case.chunk(50), case.text(9)]
    for anchor in ("off", "head", "passage", "./other.txt"):
        specs = (f"{name}:anchor={anchor}" for name in ("naive", "naive", "mepic"))
        results = [case.run(Request(segments, algorithm=spec))[0] for spec in specs]
        assert [result.counts.compile_work >= 50 for result in results] == [True, False, False]


def test_temperatures_share_chunks_and_nothing_that_saw_them(case: Case) -> None:
    segments = [case.text(5), case.chunk(50), case.text(40)]
    specs = ["naive", "naive:temperature=0.5", "naive:temperature=2.0", "naive:temperature=0.5"]
    results = [case.run(Request(segments, algorithm=spec))[0] for spec in specs]
    assert [result.counts.compile_work > 0 for result in results] == [True, False, False, False]
    assert [result.hits.prefix > 0 for result in results] == [False, False, False, True]


def test_other_temperatures_are_refused(case: Case, llama: Path) -> None:
    chunk = [case.chunk(20), case.text(3)]
    with pytest.raises(ConfigError, match=r"was not started with temperature=0.3"):
        case.run(Request(chunk, algorithm="naive:temperature=0.3"))
    for wrong, message in (
        ({"temperatures": (0,)}, "`temperatures` is"),
        ({"algorithm": "ape", "keys_without_rope": True}, "has no temperatures"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(small_config(llama, 100, 512, **wrong))


@pytest.mark.parametrize("algorithm", ["naive", "mepic", "mepic:pad=paper"])
def test_chunk_alone(case: Case, algorithm: str) -> None:
    case.hold(algorithm, [case.chunk(40)])


@pytest.mark.parametrize("algorithm", ["mepic:pad=paper", "mepic:pad=paper:anchor=head"])
def test_neighbouring_texts_are_one(case: Case, algorithm: str) -> None:
    texts = [case.text(5, key) for key in range(5)]
    case.hold(algorithm, [*texts[:2], case.chunk(40), *texts[2:4], case.chunk(20), texts[4]])


@pytest.mark.parametrize("algorithm", ["naive", "mepic"])
def test_chunks_with_a_common_start(case: Case, algorithm: str) -> None:
    start, end, other_end = (case.chunk(n, n).tokens or () for n in (40, 30, 31))
    chunks = [Chunk(tokens=tokens) for tokens in (start, start + end, start + other_end)]
    case.hold(algorithm, [case.text(5), *chunks, case.text(7, 2)])


def test_same_documents_behind_another_first_one(case: Case) -> None:
    """Only the first document differs: nothing after it may be taken from the other prompt."""
    b, question = case.chunk(50, 2), case.text(40)
    for algorithm in ("mepic", "epic:k=16"):
        for key in (1, 3):
            case.hold(algorithm, [case.text(5), case.chunk(50, key), b, question])


def test_text_that_repeats_a_chunk_is_not_its_linked_tokens(case: Case) -> None:
    """The same computed tokens after the same chunks, at other positions."""
    a, b, question = case.chunk(20, 1), case.chunk(20, 2), case.text(40)
    repeated = Text(tokens=(b.tokens or ())[:4])
    case.hold("naive", [a, b, repeated, question])
    case.hold("epic:k=4", [a, b, question])


def test_follow_up_reuses_generated_tokens(case: Case) -> None:
    """The second turn repeats the first with its answer, whose blocks are cached by now."""
    segments = [case.text(5, 1), case.chunk(50), case.text(7, 2)]
    first = Request(segments, algorithm="mepic")
    [answer] = case.run(first, max_tokens=40)
    assert case.error(first, answer) < TOLERANCE
    second = Request([*segments, Text(tokens=answer.tokens), case.text(9, 3)], algorithm="mepic")
    [reply] = case.run(second)
    assert case.error(second, reply) < TOLERANCE
    assert reply.hits.prefix * 16 >= 5 + 16 + 7 + 40 - 16


def test_eight_requests_of_different_algorithms_at_once(case: Case) -> None:
    """All link the same chunks at the same time, each in its own way and order."""
    chunks = {name: case.chunk(length, ord(name)) for name, length in LENGTHS.items()}
    specs = [*RULES, "naive"]
    requests = [
        Request(
            [case.text(11), *(chunks[name] for name in ORDERS[i % 4]), case.text(13, i)],
            algorithm=spec,
        )
        for i, spec in enumerate(specs)
    ]
    results = case.run(*requests)
    errors = [case.error(r, result) for r, result in zip(requests, results, strict=True)]
    assert max(errors) < TOLERANCE, dict(zip(specs, errors, strict=True))


def test_plain_requests_beside_pic_ones(case: Case) -> None:
    shared = case.chunk(150)
    requests, rules = [], []
    for i in range(4):
        requests.append(Request([case.text(5), shared, case.text(9, i)], algorithm="naive"))
        requests.append(Request([case.text(77 + i, i)]))
        rules += [naive(), full()]
    for results in (case.run(*requests), case.run(*requests)):
        for request, result, rule in zip(requests, results, rules, strict=True):
            assert case.error(request, result, rule) < TOLERANCE


def test_plain_prompt_equal_to_a_pic_prompt(case: Case) -> None:
    """The same tokens, once with a chunk and once without, share no KV after the text."""
    segments = [case.text(20), case.chunk(50), case.text(20, 2)]
    tokens = tuple(token for segment in segments for token in segment.tokens or ())
    pic, plain = Request(segments, algorithm="naive"), Request([Text(tokens=tokens)])
    for before, after in ((pic, plain), (plain, pic)):
        case.run(before)
        [result] = case.run(after)
        rule = full() if after is plain else naive()
        assert case.error(after, result, rule) < TOLERANCE


PLACED = ("prompt-cache", "naive", "mepic", "epic:k=16:copy=shared")


@pytest.mark.parametrize("algorithm", PLACED)
def test_positions_with_gaps(case: Case, algorithm: str) -> None:
    """Gaps before a chunk, inside text and before the question; the first chunk is not at 0."""
    a, b = (case.chunk(n, n).tokens for n in (40, 70))
    segments = [
        Chunk(tokens=a, position=7),
        Text(tokens=case.text(9, 1).tokens, position=60),
        Text(tokens=case.text(5, 2).tokens, position=90),
        Chunk(tokens=b, position=128),
        Text(tokens=case.text(11, 3).tokens, position=300),
    ]
    case.hold(algorithm, segments)
    plain = [replace(segment, position=None) for segment in segments]
    request = Request(segments, algorithm=algorithm)
    [result] = case.run(request)
    assert case.error(Request(plain, algorithm=algorithm), result) > TOLERANCE


@pytest.mark.parametrize("algorithm", PLACED)
def test_slots_are_filled_by_the_request(case: Case, algorithm: str) -> None:
    """A slot at the start, one that is filled up and one that stays empty."""
    tokens = case.chunk(60).tokens or ()
    slots = ((0, 2, 5), (20, 24, 4), (50, 50, 20))
    for key in (1, 2):
        start, middle = (case.text(n, key).tokens or () for n in (2, 4))
        sent = start + tokens[2:20] + middle + tokens[24:]
        segments = [case.text(20), Chunk(tokens=sent, slots=slots), case.text(9, key)]
        cold, _ = case.hold(algorithm, segments)
        assert (cold.counts.compile_work > 0) == (key == 1)
        assert cold.counts.prompt == len(sent) + 29


def test_a_chunk_at_two_positions_is_two_of_prompt_cache_and_one_of_naive(case: Case) -> None:
    chunk, question = case.chunk(50), case.text(9)
    for algorithm, compiled in (("prompt-cache", [50, 50, 0]), ("naive", [50, 0, 0])):
        case.engine.reset()
        requests = [
            Request([replace(chunk, position=at), question], algorithm=algorithm)
            for at in (16, 100, 16)
        ]
        results = [case.run(request)[0] for request in requests]
        assert [result.counts.compile_work for result in results] == compiled
        errors = [case.error(r, result) for r, result in zip(requests, results, strict=True)]
        assert max(errors) < TOLERANCE


def test_prompts_that_cannot_be_placed_are_refused(case: Case) -> None:
    chunk, text = case.chunk(40), case.text(9)
    late = replace(text, position=30)
    refused = [
        (Request([chunk, late], algorithm="prompt-cache"), "positions overlap: a segment of 9"),
        (Request([chunk, late], algorithm="full"), "full serves prompts without positions"),
        (Request([late], algorithm="naive"), "a prompt without chunks has no positions"),
        (Request([replace(chunk, position=9), text], algorithm="mepic:pad=paper"), "pad=masked"),
        (Request([replace(chunk, position=2000), text], algorithm="naive"), "the context has"),
        (Request([replace(chunk, slots=((1, 9, 7),)), text]), "8 tokens for 7 positions"),
        (Request([chunk, text], algorithm="kvlink:n=5:first=4000000"), "adds token 4000004"),
    ]
    for request, message in refused:
        with pytest.raises(ConfigError, match=message):
            case.run(request)
