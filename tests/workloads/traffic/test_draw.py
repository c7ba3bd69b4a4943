"""Streams of requests match their settings."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads.sample import SampleSegment
from picbench.workloads.traffic.corpus import Corpus, Topic, TopicQuestion, from_tokens
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic
from picbench.workloads.traffic.traffic_facts import measure

Make = Callable[..., Corpus]

SETTINGS = st.builds(
    Traffic,
    requests=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    chunks=st.tuples(st.integers(1, 8), st.integers(8, 12)) | st.none(),
    zipf=st.floats(0, 3),
    cached=st.floats(0, 1) | st.none(),
    users=st.integers(1, 50) | st.none(),
    rate=st.floats(0.01, 100) | st.none(),
)
CORPUS = from_tokens(range(10, 500), 0, pool=30, chunk_tokens=20, max_tokens=4)


@given(SETTINGS)
def test_the_same_settings_draw_the_same_stream(traffic: Traffic) -> None:
    assert draw(traffic, CORPUS) == draw(traffic, CORPUS)


@given(SETTINGS)
def test_number_of_requests_and_of_their_chunks(traffic: Traffic) -> None:
    stream = draw(traffic, CORPUS)
    assert len(stream.samples) == len(stream.users) == traffic.requests
    assert len({sample.id for sample in stream.samples}) == traffic.requests
    low, high = traffic.chunks or (1, 1)
    for sample in stream.samples:
        assert low <= len(sample.chunks) <= high
        assert sample.segments[0].kind == sample.segments[-1].kind == "text"
        assert len(set(sample.chunks)) == len(sample.chunks)
    assert (stream.arrivals is None) == (traffic.rate is None)


@given(SETTINGS)
def test_the_cached_share_is_met_within_half_a_chunk(traffic: Traffic) -> None:
    stream = draw(traffic, CORPUS)
    facts = measure(stream)
    context = facts.mean_chunks * facts.requests * 20
    if traffic.cached is None:
        assert stream.preload == ()
    else:
        assert abs(facts.cached - traffic.cached) * context <= 10 + 1e-6


@given(SETTINGS)
def test_chunks_that_are_not_cached_are_in_one_request_only(traffic: Traffic) -> None:
    traffic = replace(traffic, cached=0.5, users=None)
    stream = draw(traffic, CORPUS)
    uses = Counter(chunk for sample in stream.samples for chunk in set(sample.chunks))
    assert all(count == 1 for chunk, count in uses.items() if chunk not in stream.preload)


@given(SETTINGS)
def test_each_user_repeats_one_request(traffic: Traffic) -> None:
    traffic = replace(traffic, cached=None)
    stream = draw(traffic, CORPUS)
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for user, sample in zip(stream.users, stream.samples, strict=True):
        prompts.setdefault(user, set()).add(sample.tokens)
    assert all(len(found) == 1 for found in prompts.values())
    assert len(prompts) == min(traffic.users or traffic.requests, traffic.requests)


@given(SETTINGS, st.floats(0.01, 100))
def test_another_rate_leaves_the_requests_alone(traffic: Traffic, rate: float) -> None:
    assert draw(traffic, CORPUS).samples == draw(replace(traffic, rate=rate), CORPUS).samples


def test_popular_chunks_are_used_as_often_as_zipfs_law_says(random_corpus: Make) -> None:
    corpus = random_corpus(pool=10)
    count = 4000
    stream = draw(Traffic(requests=count, zipf=1.0), corpus)
    uses = Counter(sample.chunks[0] for sample in stream.samples)
    total = sum(1 / rank for rank in range(1, 11))
    for rank, topic in enumerate(corpus.topics, start=1):
        share = 1 / rank / total
        error = sqrt(share * (1 - share) / count)
        assert abs(uses[topic.chunks[0]] / count - share) < 5 * error


def test_numbers_of_chunks_are_equally_likely(random_corpus: Make) -> None:
    count = 3000
    stream = draw(Traffic(requests=count, chunks=(2, 4)), random_corpus())
    sizes = Counter(len(sample.chunks) for sample in stream.samples)
    assert set(sizes) == {2, 3, 4}
    assert all(abs(n / count - 1 / 3) < 5 * sqrt(2 / 9 / count) for n in sizes.values())


def test_a_topics_chunks_stay_together_and_in_order() -> None:
    def segment(token: int) -> SampleSegment:
        return SampleSegment("chunk", f"c{token}", (token,))

    question = TopicQuestion(
        SampleSegment("text", "h", (1,)), SampleSegment("text", "q", (2,)), ("a",)
    )
    topics = [Topic(tuple(segment(10 * t + n) for n in range(3)), (question,)) for t in range(5)]
    corpus = Corpus("x", tuple(topics), lambda chunk, number: chunk, max_tokens=1)
    starts = set()
    for sample in draw(Traffic(requests=60, chunks=(6, 6)), corpus).samples:
        tokens = [chunk.tokens[0] for chunk in sample.chunks]
        runs = [
            t for t in tokens if t % 10 == 0 and tokens[tokens.index(t) :][:3] == [t, t + 1, t + 2]
        ]
        assert runs
        starts.add(tokens.index(runs[0]))
    assert starts == {0, 1, 2, 3}


def test_a_topic_that_is_too_large_is_refused(random_corpus: Make) -> None:
    corpus = random_corpus(pool=4)
    double = replace(
        corpus, topics=(Topic(corpus.topics[0].chunks * 2, corpus.topics[0].questions),)
    )
    with pytest.raises(ConfigError, match="`chunks` 1: a topic has 2 chunks"):
        draw(Traffic(requests=1, chunks=(1, 2)), double)
    with pytest.raises(ConfigError, match="`chunks` 5: there are 4 chunks"):
        draw(Traffic(requests=1, chunks=(5, 5)), corpus)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("`requests`", {"requests": 0}),
        ("`chunks`", {"chunks": (3, 2)}),
        ("`zipf`", {"zipf": -1.0}),
        ("`cached`", {"cached": 1.5}),
        ("`users`", {"users": 0}),
        ("`rate`", {"rate": 0.0}),
        ("`rate`", {"rate": float("nan")}),
    ],
)
def test_settings_that_cannot_be_name_their_field(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{field} "):
        Traffic(**{"requests": 1, **values})  # type: ignore[arg-type]
