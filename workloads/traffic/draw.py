"""Draw requests: topics, other chunks, fresh copies, arrival times."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from picbench.errors import ConfigError
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.corpus import Corpus
from picbench.workloads.traffic.settings import Process, Traffic


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in order of arrival, the user who sends each, and when.

    `arrivals` are seconds from the start, None in a closed loop. `preload` are the chunks that
    are in the cache before the first request.
    """

    samples: tuple[Sample, ...]
    users: tuple[int, ...]
    arrivals: tuple[float, ...] | None = None
    preload: tuple[SampleSegment, ...] = ()


def draw(traffic: Traffic, corpus: Corpus) -> Stream:
    """Draw requests from `corpus`.

    Requests, copies and arrivals have separate random streams, so that the same requests can
    arrive at another rate. Raises ConfigError where the corpus has too few chunks.
    """
    senders = traffic.users or traffic.requests
    asked = list(_Draw(traffic, corpus).requests(min(senders, traffic.requests)))
    users = tuple(number % senders for number in range(traffic.requests))
    samples = [replace(asked[user], id=f"r{number}") for number, user in enumerate(users)]
    preload: tuple[SampleSegment, ...] = ()
    if traffic.cached is not None:
        samples, preload = _renew(samples, traffic, corpus)
    return Stream(tuple(samples), users, times(traffic), preload)


def times(traffic: Traffic) -> tuple[float, ...] | None:
    """The arrival times alone; None in a closed loop."""
    if traffic.rate is None:
        return None
    rng = Random(f"{traffic.seed}/arrivals")
    return arrival_times(rng, traffic.requests, traffic.rate, traffic.process)


class _Draw:
    """Draws distinct requests one after another."""

    def __init__(self, traffic: Traffic, corpus: Corpus) -> None:
        self._traffic = traffic
        self._corpus = corpus
        self._rng = Random(f"{traffic.seed}/requests")
        self._pool = [chunk for topic in corpus.topics for chunk in topic.chunks]
        self._starts = _starts([len(topic.chunks) for topic in corpus.topics])
        self._topic_weights = zipf(len(corpus.topics), traffic.zipf)
        self._chunk_weights = zipf(len(self._pool), traffic.zipf)
        self._check()

    def requests(self, count: int) -> Iterator[Sample]:
        for _ in range(count):
            [topic] = self._rng.choices(range(len(self._starts)), self._topic_weights)
            yield self._request(topic)

    def _request(self, number: int) -> Sample:
        topic = self._corpus.topics[number]
        question = self._rng.choice(topic.questions)
        others = self._others(number)
        cut = self._rng.randint(0, len(others))
        chunks = (*others[:cut], *topic.chunks, *others[cut:])
        return Sample(
            id="",
            dataset=self._corpus.dataset,
            segments=(question.head, *chunks, question.tail),
            answers=question.answers,
            max_tokens=self._corpus.max_tokens,
        )

    def _others(self, topic: int) -> list[SampleSegment]:
        """The chunks of a request that are not its topic's."""
        if self._traffic.chunks is None:
            return []
        start, own = self._starts[topic], len(self._corpus.topics[topic].chunks)
        wanted = self._rng.randint(*self._traffic.chunks) - own
        without = range(start, start + own)
        return [self._pool[i] for i in pick(self._rng, self._chunk_weights, wanted, without)]

    def _check(self) -> None:
        if self._traffic.chunks is None:
            return
        low, high = self._traffic.chunks
        most = max(len(topic.chunks) for topic in self._corpus.topics)
        if most > low:
            raise ConfigError(
                f"`chunks` {low}: a topic has {most} chunks",
                hint="raise `chunks` or `join`, or lower `passages`",
            )
        if high > len(self._pool):
            raise ConfigError(
                f"`chunks` {high}: there are {len(self._pool)} chunks", hint="raise `pool`"
            )


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _renew(
    samples: Sequence[Sample], traffic: Traffic, corpus: Corpus
) -> tuple[list[Sample], tuple[SampleSegment, ...]]:
    """Replace chunks by new ones until the share of the others is `traffic.cached`.

    Request by request, as near as whole chunks allow. Returns the samples and the chunks to
    preload: those that were not replaced.
    """
    rng = Random(f"{traffic.seed}/copies")
    share = traffic.cached or 0.0
    renewed: list[Sample] = []
    preload: dict[SampleSegment, None] = {}
    known = total = number = 0
    for sample in samples:
        segments = list(sample.segments)
        places = [place for place, segment in enumerate(segments) if segment.kind == "chunk"]
        for place in rng.sample(places, len(places)):
            length = len(segments[place].tokens)
            if known + length / 2 <= share * (total + length):
                known += length
                preload[segments[place]] = None
            else:
                segments[place] = corpus.renew(segments[place], number)
                number += 1
            total += len(segments[place].tokens)
        renewed.append(replace(sample, segments=tuple(segments)))
    return renewed, tuple(preload)


def arrival_times(rng: Random, count: int, rate: float, process: Process) -> tuple[float, ...]:
    """Arrival times in seconds from the start, in order, `rate` a second on average.

    ``poisson`` draws independent exponential gaps, ``uniform`` spaces arrivals evenly from 0 on.
    """
    if process == "uniform":
        return tuple(number / rate for number in range(count))
    return tuple(accumulate(rng.expovariate(rate) for _ in range(count)))


def zipf(count: int, exponent: float) -> tuple[float, ...]:
    """Weights of `count` things, most popular first; they sum to 1, and exponent 0 is uniform."""
    weights = [float(rank) ** -exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def pick(
    rng: Random, weights: Sequence[float], count: int, without: Collection[int] = ()
) -> list[int]:
    """Draw `count` indices by weight without replacement, none in `without`, in drawing order.

    Each index gets an exponential time with its weight as rate, and the smallest are taken, which
    has the distribution of successive draws.
    """
    draws = [(rng.expovariate(weight), index) for index, weight in enumerate(weights)]
    return [index for _, index in sorted(draws) if index not in without][:count]
