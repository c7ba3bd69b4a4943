"""Chunks that are found: what recurs, whole, in any order, and nothing else."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.traffic.found_chunks import LEAST, find_chunks

DATA = Path(os.environ.get("PICBENCH_DATA", Path(__file__).parents[4] / "shared" / "data"))
ROWS = [f"{name}.jsonl" for name in ("musique/musique_original", "hotpotqa/hotpotqa_distractor")]

Prompt = Sequence[int]


def texts(prompts: Sequence[Prompt]) -> list[list[tuple[int, ...]]]:
    """The tokens of the chunks of each prompt."""
    spans = find_chunks(prompts)
    return [
        [tuple(prompt[start:end]) for start, end in found]
        for prompt, found in zip(prompts, spans, strict=True)
    ]


def drawn(source: Random, length: int) -> tuple[int, ...]:
    return tuple(source.choices(range(10_000), k=length))


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[int]], list[Prompt]]:
    """Documents of random tokens, which of them each prompt has, and the prompts."""
    source = Random(draw(st.integers(0, 1 << 30)))
    documents = [drawn(source, source.randint(LEAST, 300)) for _ in range(draw(st.integers(3, 9)))]
    count = draw(st.integers(6, 20))
    orders = [
        source.sample(range(len(documents)), source.randint(2, len(documents)))
        for _ in range(count)
    ]
    gap = draw(st.sampled_from([(), (5,), (5, 6, 7)]))
    head = draw(st.sampled_from([(), tuple(range(20_000, 20_040))]))
    prompts = []
    for order in orders:
        body = [token for number in order for token in (*documents[number], *gap)]
        prompts.append([*head, *body, *drawn(source, 12)])
    return documents, orders, prompts


@given(shuffled())
def test_a_document_is_the_same_chunk_in_any_order(
    made: tuple[list[tuple[int, ...]], list[list[int]], list[Prompt]],
) -> None:
    """One of those that stand between different ones, or after a beginning that differs."""
    documents, orders, prompts = made
    uses = Counter(number for order in orders for number in order)
    before: dict[int, set[int]] = {}
    after: dict[int, set[int]] = {}
    for order in orders:
        for one, other in pairwise((-1, *order, -2)):
            after.setdefault(one, set()).add(other)
            before.setdefault(other, set()).add(one)
    found = texts(prompts)
    for number, document in enumerate(documents):
        mixed = len(before.get(number, ())) > 1 and len(after.get(number, ())) > 1
        if uses[number] < 3 or not mixed:
            continue
        # Gaps belong to the text around them, or to one of their documents.
        holding = [c for chunks in found for c in chunks if contains(c, document[3:-3])]
        assert len(holding) == uses[number]
        assert len(set(holding)) == 1
        assert all(len(chunk) <= len(document) + 6 for chunk in holding)


def contains(chunk: Prompt, part: Prompt) -> bool:
    return any(
        tuple(chunk[at : at + len(part)]) == tuple(part) for at in range(len(chunk) - len(part) + 1)
    )


#: Prompts of few different tokens, cut from one another, as bad as can be.
wild = st.lists(
    st.lists(st.sampled_from([(1,) * 40, (2,), (3, 4) * 30, tuple(range(50)), (1, 2, 3)])).map(
        lambda parts: [token for part in parts for token in part]
    ),
    max_size=8,
)


@given(wild)
def test_chunks_are_apart_long_enough_and_recur(prompts: list[Prompt]) -> None:
    spans = find_chunks(prompts)
    assert len(spans) == len(prompts)
    for prompt, found in zip(prompts, spans, strict=True):
        ends = [0, *(place for span in found for place in span), len(prompt)]
        assert ends == sorted(ends)
        assert all(end - start >= LEAST for start, end in found)
    every = Counter(chunk for found in texts(prompts) for chunk in found)
    assert all(count > 1 for count in every.values())


@given(st.integers(0, 1 << 30))
def test_what_never_recurs_has_none(seed: int) -> None:
    source = Random(seed)
    assert find_chunks([drawn(source, 200) for _ in range(5)]) == [[]] * 5


@given(st.integers(0, 1 << 30))
def test_chats_that_grow_are_prefixes(seed: int) -> None:
    """A turn repeats all before it, and prefix caching has that."""
    source, prompts = Random(seed), []
    for _ in range(3):
        chat = [*range(100)]
        for _ in range(5):
            chat += drawn(source, source.randint(20, 120))
            prompts.append(list(chat))
    assert find_chunks(prompts) == [[]] * 15


def test_edited_history_is_found() -> None:
    """A conversation that loses its oldest turn: the rest stands at another place."""
    source = Random(1)
    head, turns = drawn(source, 50), [drawn(source, 80) for _ in range(6)]
    prompts = [[*head, *(t for turn in turns[n : n + 4] for t in turn)] for n in range(3)]
    [_, second, third] = texts(prompts)
    both = turns[2] + turns[3]
    assert second == [turns[1], both, turns[4]]
    assert third == [both, turns[4]]


def test_no_prompts_and_empty_ones_have_none() -> None:
    assert find_chunks([]) == []
    assert find_chunks([[], [1] * 5, []]) == [[], [], []]


def passages(path: Path) -> list[str]:
    """Twenty passages of real rows, of more than 60 words."""
    found: dict[str, None] = {}
    for line in path.read_text().splitlines()[:40]:
        for text in re.split(r"(?m)^Passage \d+:\n", json.loads(line)["context"]):
            if len(text.split()) > 60:
                found[text.strip()] = None
    return list(found)[:20]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_real_documents_are_twenty_chunks(rows: str, seed: int) -> None:
    if not (DATA / rows).exists():
        pytest.skip("the rows are not here")
    documents, source, words = passages(DATA / rows), Random(seed), re.compile(r"\w+|\S")
    numbers: dict[str, int] = {}
    prompts, places = [], []
    for number in range(50):
        prompt = ["Answer", "from", "passages", "."]
        ends = []
        for document in source.sample(documents, 6):
            start = len(prompt)
            prompt += words.findall(document)
            ends.append((start, len(prompt)))
        prompt += words.findall(f"Question {source.random()}: about {number}?")
        prompts.append([numbers.setdefault(word, len(numbers)) for word in prompt])
        places.append(ends)
    spans = find_chunks(prompts)
    inside = cut = 0
    for found, ends in zip(spans, places, strict=True):
        for start, end in ends:
            shared = [min(b, end) - max(a, start) for a, b in found if a < end and b > start]
            inside += sum(shared)
            cut += sum(tokens > 3 for tokens in shared) > 1
    total = sum(end - start for ends in places for start, end in ends)
    assert (cut, len({c for found in texts(prompts) for c in found})) == (0, 20)
    assert inside >= 0.95 * total


def test_ten_thousand_requests_take_seconds() -> None:
    source = Random(5)
    documents = [drawn(source, 150) for _ in range(500)]
    prompts = [
        [t for document in source.sample(documents, 3) for t in document] for _ in range(10_000)
    ]
    start = time.process_time()
    found = find_chunks(prompts)
    assert time.process_time() - start < 60
    assert sum(len(spans) for spans in found) > 0.99 * 30_000
