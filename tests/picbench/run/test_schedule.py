"""Rounds of both loops: who serves what, in which order, and how chunks are reordered."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness_fakes import FakeEngine, Harness, make_sample, run_fakes
from hypothesis import given
from hypothesis import strategies as st

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Text
from picbench.engines.vllm.device import CPU, find
from picbench.errors import InvalidRun
from picbench.run.schedule import reorder, schedule, to_request
from picbench.store.reader import read_run
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.sample import Sample, SampleSegment

ARMS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True)


@given(ARMS, st.integers(1, 40), st.integers(1, 12))
def test_all_arms_get_each_group_in_one_round_and_every_sample_once(
    arms: list[str], count: int, size: int
) -> None:
    samples = [make_sample(n) for n in range(count)]
    batches = list(schedule(samples, arms, size))
    seen: list[Sample] = []
    for start in range(0, len(batches), len(arms)):
        together = batches[start : start + len(arms)]
        assert {arm for _, arm, _ in together} == set(arms)
        assert all(batch[::2] == together[0][::2] for batch in together)
        seen += together[0][2]
    assert seen == samples


@given(ARMS, st.integers(1, 8))
def test_every_arm_goes_first_equally_often(arms: list[str], cycles: int) -> None:
    samples = [make_sample(n) for n in range(cycles * len(arms))]
    first = [arm for _, arm, _ in schedule(samples, arms, 1)][:: len(arms)]
    assert Counter(first) == dict.fromkeys(arms, cycles)


def test_requests_carry_token_ids_documents_and_output_length() -> None:
    sample = make_sample(3, max_tokens=9)
    lead = SampleSegment("text", "", (8, 9))
    head, chunk, other, tail = sample.segments
    known = replace(sample, segments=(head, replace(chunk, before=lead), other, tail))
    request = to_request(known)
    assert [type(segment) for segment in request.segments] == [Text, Chunk, Chunk, Text]
    assert [segment.text for segment in request.segments] == [None] * 4
    document = (8, 9, *chunk.tokens)
    assert request.segments[1] == Chunk(tokens=(1003,) * 16, document=document)
    assert request.segments[2] == Chunk(tokens=other.tokens)
    assert (request.max_tokens, request.algorithm) == (9, None)
    assert to_request(known, "epic:k=16") == replace(request, algorithm="epic:k=16")


SAMPLES = [make_sample(n) for n in range(4)]
TIMES = (0.0, 0.5, 0.75, 2.0)


def run(harness: Harness, output: Path, *arguments: str) -> Result:
    flags = ("--dataset", "fake", "--algo", "full,mepic", "--output", str(output))
    return CliRunner().invoke(main, ("run", *flags, *arguments), obj=harness.services())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_dead_arm_loses_its_own_requests_only_and_is_not_asked_again(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, dies_at={"mepic": 1})
    run_fakes(harness, tmp_path / "run", "full", "mepic", concurrency=1)
    assert (harness.order.count("full"), harness.order.count("mepic")) == (4, 1)
    lost = [row for row in read_run(tmp_path / "run").rows if row.error is not None]
    assert [(row.arm, row.sample) for row in lost] == [("mepic", f"s{n}") for n in (1, 2, 3)]
    assert not any(row.timed for row in lost)


def test_in_an_open_loop_arms_serve_everything_in_turn_and_a_lost_one_stays_lost(
    tmp_path: Path,
) -> None:
    arms = ("full", "naive", "mepic")
    harness = Harness(SAMPLES, arrivals=TIMES, dies_at={"naive": 1})
    run_fakes(harness, tmp_path / "run", *arms, repeats=3)
    rows = read_run(tmp_path / "run").rows
    served = [rows[start : start + 4] for start in range(0, 36, 4)]
    assert all([row.sample for row in each] == ["s0", "s1", "s2", "s3"] for each in served)
    assert [len({row.arm for row in each}) for each in served] == [1] * 9
    naive = [row.error is not None for row in rows if row.arm == "naive"]
    assert naive == [False] * 4 + [True] * 8
    assert all(row.error is None for row in rows if row.arm != "naive")


def test_an_open_loop_reports_makespan_and_goodput(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, arrivals=TIMES)
    result = run(harness, tmp_path / "run", "--slo", "ttft=200", "--max-running", "9")
    assert result.exit_code == 0, result.stderr
    assert "makespan" in result.stdout
    assert "Each arm served all requests before the next one did" in result.stdout
    arms = read(tmp_path / "run" / "summary.json")["arms"]
    # Every request takes 0.5 s, and the last one arrives at 2.0 s; full's first token takes 0.4 s.
    assert arms["mepic"]["makespan_s"] == pytest.approx(2.5)
    assert arms["mepic"]["goodput_req_s"] == pytest.approx(4 / 2.5)
    assert arms["full"]["goodput_req_s"] == 0
    assert arms["mepic"]["late_ms"]["p99"] == 0
    rows = [row for row in read_run(tmp_path / "run").rows if row.arm == "mepic"]
    assert [row.arrival_ms for row in rows] == [1e3 * time for time in TIMES]
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["workload"]["arrivals"] == {"requests": 4, "last_s": 2.0}
    assert manifest["arms"]["mepic"]["settings"]["max_requests"] == 9
    assert harness.servers["mepic"].engine.calls.count("generate 4 from 0.0 s") == 1


def test_goodput_is_that_of_a_repeat(tmp_path: Path) -> None:
    arms = []
    for repeats in ("1", "3"):
        flags = ("--slo", "ttft=200", "--repeats", repeats)
        run(Harness(SAMPLES, arrivals=TIMES), tmp_path / repeats, *flags)
        arms.append(read(tmp_path / repeats / "summary.json")["arms"]["mepic"])
    once, thrice = arms
    assert thrice["requests"] == 3 * once["requests"]
    for name in ("makespan_s", "goodput_req_s"):
        assert thrice[name] == pytest.approx(once[name])


def test_a_closed_loop_has_neither_and_arrivals_make_another_run(tmp_path: Path) -> None:
    prints = []
    for number, times in enumerate((None, TIMES, (0.0, 0.5, 0.75, 2.5))):
        run(Harness(SAMPLES, arrivals=times), tmp_path / f"{number}")
        prints.append(read(tmp_path / f"{number}" / "manifest.json")["fingerprint"])
    assert len(set(prints)) == 3
    arm = read(tmp_path / "0" / "summary.json")["arms"]["mepic"]
    assert (arm["makespan_s"], arm["late_ms"], arm["goodput_req_s"]) == (None, None, None)
    assert {row.arrival_ms for row in read_run(tmp_path / "0").rows} == {None}


def test_chunks_are_preloaded_before_anything_is_measured(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, preload=[make_sample(90), make_sample(91)])
    result = run(harness, tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    calls = harness.servers["mepic"].engine.calls
    assert next(call for call in calls if call.startswith("generate")) == "generate 2 at 4"
    samples = {row.sample for row in read_run(tmp_path / "run").rows}
    assert samples == {"s0", "s1", "s2", "s3"}
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["cache"].startswith("warm at start")
    assert manifest["workload"]["preloaded_chunks"] == 2


def test_a_warm_run_that_does_not_hit_is_invalid(tmp_path: Path) -> None:
    cold = {"mepic": FakeEngine("mepic", reused=0)}
    result = run(Harness(SAMPLES, preload=[make_sample(90)], engines=cold), tmp_path / "run")
    assert result.exit_code == 3
    assert "chunks were preloaded, and round 0 reused none" in result.stderr


def test_a_chunk_that_cannot_be_preloaded_is_named(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, preload=[make_sample(0), make_sample(1, first=666)])
    with pytest.raises(InvalidRun, match="arm full: s1 could not be preloaded: a chunk is too lo"):
        run_fakes(harness, tmp_path / "run", "full", "mepic")


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
    order = ContextIndex()
    return [reorder(sample(prompt, 1000 + n), order) for n, prompt in enumerate(prompts)]


@given(PROMPTS)
def test_each_chunk_is_sent_once_and_texts_stay_where_they_are(prompts: list[str]) -> None:
    assert arranged(prompts) == arranged(prompts)
    for number, (given_names, sent) in enumerate(zip(prompts, arranged(prompts), strict=True)):
        assert sorted(names(sent)) == sorted(set(given_names))
        assert sent == replace(sample(given_names, 1000 + number), segments=sent.segments)
        assert (sent.segments[0], sent.segments[-1]) == (text(3), text(1000 + number))


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


@pytest.mark.parametrize(
    ("prompts", "order"),
    [
        # The longest known sequence in tokens: c and a are 128, d and b 96.
        (["ac", "db", "dbac"], "acdb"),
        # Prompts begin with a or c; b was used twice, d once, h never.
        (["ab", "cd", "cb", "hdb"], "bdh"),
        # Those that were used as often are in the order of their first use.
        (["ah", "bg", "fhgc"], "hgfc"),
    ],
)
def test_what_comes_first(prompts: list[str], order: str) -> None:
    assert names(arranged(prompts)[-1]) == order


def test_a_sequence_counts_after_its_own_beginning_only() -> None:
    order = ContextIndex()
    reorder(sample("ab"), order)
    other = replace(sample("ba"), segments=(text(4), chunk("b"), chunk("a"), text(5)))
    # Nothing followed that text; the documents were used as often as each other.
    assert names(reorder(other, order)) == "ab"
    assert names(reorder(sample("ba"), order)) == "ab"


def test_chunks_do_not_pass_texts_between_them() -> None:
    order = ContextIndex()
    reorder(sample("cdab"), order)
    split = replace(sample(""), segments=(chunk("a"), chunk("d"), text(4), chunk("c"), chunk("d")))
    assert [s.text or "-" for s in reorder(split, order).segments] == ["d", "a", "-", "c"]


def test_consecutive_text_keeps_its_order_and_its_repetitions() -> None:
    order = ContextIndex()
    reorder(sample("ab"), order)
    fixed = sample("baa", ordered=True)
    assert reorder(fixed, order) == fixed


@pytest.mark.engine
def test_stock_vllm_finds_as_much_as_was_foreseen(llama: Path) -> None:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    draw = Random(0)
    given_prompts = [
        sample("".join(draw.sample("abcdef", 4)), question) for question in range(10, 22)
    ]
    order = ContextIndex()
    sent = [reorder(prompt, order) for prompt in given_prompts]
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
            results = engine.generate([*map(to_request, prompts)], concurrency=1)
            assert [result.counts.reused for result in results] == foreseen
            reused.append(sum(foreseen))
            engine.reset()
    assert reused[1] > 1.5 * reused[0]
