"""The order of chunks under `reorder`: what it keeps, and what a prefix cache finds of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm.device import CPU, find
from picbench.run.schedule import ChunkOrder, to_requests
from picbench.workloads.sample import Sample, SampleSegment

#: Chunks of 32, 64 or 96 tokens: whole blocks of any engine.
LENGTHS = {name: 32 * (1 + number % 3) for number, name in enumerate("abcdefgh")}


def text(number: int) -> SampleSegment:
    return SampleSegment("text", "", (number,) * 32)


def chunk(name: str) -> SampleSegment:
    return SampleSegment("chunk", name, (ord(name),) * LENGTHS[name])


def sample(names: str, question: int = 5, *, ordered: bool = False) -> Sample:
    segments = (text(3), *map(chunk, names), text(question))
    return Sample("s", "d", segments, (), 1, ordered=ordered)


def names(found: Sample) -> str:
    return "".join(segment.text for segment in found.chunks)


class PrefixCache:
    """All beginnings, in whole segments, of the prompts that it was sent."""

    def __init__(self) -> None:
        self._begun: set[tuple[SampleSegment, ...]] = set()

    def cached(self, prompt: Sample) -> int:
        """Tokens of the longest beginning that was there before."""
        begun = [segments for segments in _beginnings(prompt) if segments in self._begun]
        return max((sum(len(s.tokens) for s in segments) for segments in begun), default=0)

    def send(self, prompt: Sample) -> None:
        self._begun.update(_beginnings(prompt))


def _beginnings(prompt: Sample) -> list[tuple[SampleSegment, ...]]:
    return list(accumulate(((s,) for s in prompt.segments), lambda done, new: (*done, *new)))


PROMPTS = st.lists(st.text("abcdefgh", max_size=6), min_size=1, max_size=12)


def arranged(prompts: Sequence[str]) -> list[Sample]:
    order = ChunkOrder()
    return [order.arrange(sample(prompt, 1000 + n)) for n, prompt in enumerate(prompts)]


@given(PROMPTS)
def test_each_chunk_is_sent_once_and_texts_stay_where_they_are(prompts: list[str]) -> None:
    for number, (given_names, sent) in enumerate(zip(prompts, arranged(prompts), strict=True)):
        assert sorted(names(sent)) == sorted(set(given_names))
        assert sent == replace(sample(given_names, 1000 + number), segments=sent.segments)
        assert (sent.segments[0], sent.segments[-1]) == (text(3), text(1000 + number))


@given(PROMPTS)
def test_the_same_prompts_get_the_same_orders(prompts: list[str]) -> None:
    assert arranged(prompts) == arranged(prompts)


@given(PROMPTS)
def test_no_prompt_finds_less_in_a_prefix_cache_than_in_the_order_given(
    prompts: list[str],
) -> None:
    """Of what was sent before. Two whole streams may compare either way."""
    cache = PrefixCache()
    for number, sent in enumerate(arranged(prompts)):
        as_given = sample("".join(dict.fromkeys(prompts[number])), 1000 + number)
        assert cache.cached(sent) >= cache.cached(as_given)
        cache.send(sent)


@given(st.permutations("abcdef"), st.permutations("abcdef"))
def test_the_same_documents_in_any_order_are_one_prefix(first: list[str], again: list[str]) -> None:
    one, two = arranged(["".join(first), "".join(again)])
    assert names(one) == names(two) == "".join(first)


def test_the_longest_known_sequence_comes_first_in_tokens() -> None:
    *_, last = arranged(["ac", "db", "dbac"])
    # c and a are 128 tokens, d and b 96.
    assert names(last) == "acdb"


def test_new_documents_come_after_those_that_are_used_most() -> None:
    *_, last = arranged(["ab", "cd", "cb", "hdb"])
    # Prompts begin with a or c; b was used twice, d once, h never.
    assert names(last) == "bdh"


def test_documents_that_were_used_as_often_are_in_the_order_of_their_first_use() -> None:
    *_, last = arranged(["ah", "bg", "fhgc"])
    assert names(last) == "hgfc"


def test_a_sequence_counts_after_its_own_beginning_only() -> None:
    order = ChunkOrder()
    order.arrange(sample("ab"))
    other = replace(sample("ba"), segments=(text(4), chunk("b"), chunk("a"), text(5)))
    # Nothing followed that text; the documents were used as often as each other.
    assert names(order.arrange(other)) == "ab"
    assert names(order.arrange(sample("ba"))) == "ab"


def test_chunks_do_not_pass_texts_between_them() -> None:
    order = ChunkOrder()
    order.arrange(sample("cdab"))
    split = replace(sample(""), segments=(chunk("a"), chunk("d"), text(4), chunk("c"), chunk("d")))
    assert [s.text or "-" for s in order.arrange(split).segments] == ["d", "a", "-", "c"]


def test_consecutive_text_keeps_its_order_and_its_repetitions() -> None:
    order = ChunkOrder()
    order.arrange(sample("ab"))
    fixed = sample("baa", ordered=True)
    assert order.arrange(fixed) == fixed


@pytest.mark.engine
def test_stock_vllm_finds_as_much_as_was_foreseen(llama: Path) -> None:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    draw = Random(0)
    given_prompts = [
        sample("".join(draw.sample("abcdef", 4)), question) for question in range(10, 22)
    ]
    order = ChunkOrder()
    sent = [order.arrange(prompt) for prompt in given_prompts]
    config = EngineConfig(
        str(llama), algorithm="prefix", stock=True, device="cpu", context=512, kv_blocks=600
    )
    reused = []
    with Engine(config) as engine:
        for prompts in (given_prompts, sent):
            cache, foreseen = PrefixCache(), []
            for prompt in prompts:
                foreseen.append(cache.cached(prompt))
                cache.send(prompt)
            results = engine.generate(to_requests(prompts), concurrency=1)
            assert [result.counts.reused for result in results] == foreseen
            reused.append(sum(foreseen))
            engine.reset()
    assert reused[1] > 1.5 * reused[0]
