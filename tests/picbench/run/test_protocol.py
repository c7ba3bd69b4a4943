"""Rounds: who computes what, in which order."""

from collections import Counter
from dataclasses import replace

from harness_fakes import FakeEngine, FakeServer, make_sample
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Text
from picbench.run.schedule import group_size, schedule, serve, to_request, to_requests
from picbench.store.records import Failure
from picbench.workloads.sample import SampleSegment

ARMS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True)


@given(ARMS, st.integers(1, 40), st.integers(1, 12))
def test_every_arm_gets_every_sample_once_and_in_order(
    arms: list[str], count: int, size: int
) -> None:
    samples = [make_sample(n) for n in range(count)]
    seen: dict[str, list[str]] = {arm: [] for arm in arms}
    for _, arm, group in schedule(samples, arms, size):
        seen[arm] += [sample.id for sample in group]
    assert all(ids == [sample.id for sample in samples] for ids in seen.values())


@given(ARMS, st.integers(1, 8))
def test_every_arm_goes_first_equally_often(arms: list[str], cycles: int) -> None:
    samples = [make_sample(n) for n in range(cycles * len(arms))]
    first = Counter[str]()
    last_round = -1
    for number, arm, _ in schedule(samples, arms, 1):
        first[arm] += number != last_round
        last_round = number
    assert set(first.values()) == {cycles}


@given(ARMS, st.integers(1, 30), st.integers(1, 5))
def test_a_round_is_the_same_group_for_all_arms(arms: list[str], count: int, size: int) -> None:
    samples = [make_sample(n) for n in range(count)]
    batches = list(schedule(samples, arms, size))
    for start in range(0, len(batches), len(arms)):
        together = batches[start : start + len(arms)]
        assert len({number for number, _, _ in together}) == 1
        assert {arm for _, arm, _ in together} == set(arms)
        assert all(group == together[0][2] for _, _, group in together)


def test_groups_keep_the_closed_loop_full() -> None:
    assert group_size(1) == 1
    assert group_size(4) > 4


def test_requests_carry_token_ids_and_output_length() -> None:
    request = to_request(make_sample(3, max_tokens=9))
    kinds = [type(segment) for segment in request.segments]
    assert kinds == [Text, Chunk, Chunk, Text]
    assert [segment.text for segment in request.segments] == [None] * 4
    assert request.segments[1].tokens == (1003,) * 16
    assert request.max_tokens == 9


def test_requests_carry_the_documents_of_chunks() -> None:
    sample = make_sample(3)
    lead = SampleSegment("text", "", (8, 9))
    head, chunk, other, tail = sample.segments
    known = replace(sample, segments=(head, replace(chunk, before=lead), other, tail))
    first, second = to_request(known).segments[1:3]
    assert isinstance(first, Chunk)
    assert first.document == (8, 9, *chunk.tokens)
    assert second == Chunk(tokens=other.tokens)


def test_a_request_may_name_the_algorithm_that_serves_it() -> None:
    sample = make_sample(3)
    assert to_request(sample).algorithm is None
    named = to_request(sample, "epic:k=16")
    assert named == replace(to_request(sample), algorithm="epic:k=16")


def test_requests_of_a_run_leave_the_algorithm_to_the_engine() -> None:
    samples = [make_sample(n) for n in range(3)]
    assert to_requests(samples) == [to_request(sample) for sample in samples]


def test_a_dead_arm_is_not_asked_again() -> None:
    order: list[str] = []
    servers = {
        name: FakeServer(name, EngineConfig("m"), order, FakeEngine(), dies)
        for name, dies in (("a", None), ("b", 1))
    }
    batches = list(serve(servers, schedule([make_sample(n) for n in range(3)], "ab", 1), 1))
    assert order.count("a") == 3
    assert order.count("b") == 1
    lost = [t for t in batches if t.arm == "b" and isinstance(t.result.outcomes[0], Failure)]
    assert [t.samples[0].id for t in lost] == ["s1", "s2"]
    assert all(t.result.busy == 0 and not t.result.clean for t in lost)
