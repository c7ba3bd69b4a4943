"""The material of requests: chunks in topics, and questions about these."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from random import Random

from picbench.dummy_prefix import inside_prompt
from picbench.errors import ConfigError
from picbench.workloads.prompts.tokens import Tokenizer, encode
from picbench.workloads.sample import Sample, SampleSegment

#: The data sets of random tokens, and of requests of a log: no right answer is known.
SYNTHETIC, LOGGED = "synthetic", "log"

#: Random tokens before and after the chunks of a synthetic request.
HEAD, TAIL = 16, 32


@dataclass(frozen=True, slots=True)
class TopicQuestion:
    """A question about a topic: the text before its chunks, the text after, the answers."""

    head: SampleSegment
    tail: SampleSegment
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topic:
    """Chunks that belong together, in order, and questions about them."""

    chunks: tuple[SampleSegment, ...]
    questions: tuple[TopicQuestion, ...]


#: Makes a new chunk like a given one, a different one for each number.
Renew = Callable[[SampleSegment, int], SampleSegment]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The topics of a data set, most popular first; `max_tokens` is the length of a reply."""

    dataset: str
    topics: tuple[Topic, ...]
    renew: Renew
    max_tokens: int


def from_samples(
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    pool: int,
    join: int = 1,
    chunk_tokens: int = 0,
) -> Corpus:
    """A corpus of the first topics with `pool` chunks in total.

    Consecutive samples with the same passages are questions about one topic. A chunk is `join`
    passages, or more until it has `chunk_tokens` tokens; the remainder of a topic is appended to
    its last chunk. A chunk is renewed by a numbered line in front of it. Raises ConfigError where
    there are too few samples.
    """
    topics: list[Topic] = []
    chunks, tokenizer = 0, inside_prompt(tokenizer)
    for topic in _topics(samples):
        if chunks >= pool:
            break
        joined = tuple(_join(topic.chunks, tokenizer, join, chunk_tokens))
        topics.append(replace(topic, chunks=joined))
        chunks += len(joined)
    if chunks < pool:
        raise ConfigError(
            f"the rows have {chunks} chunks, `pool` wants {pool}",
            hint="lower `pool`, `join` or `chunk_tokens`, or name more rows with `data`",
        )
    most = max(sample.max_tokens for sample in samples)
    return Corpus(samples[0].dataset, tuple(topics), partial(_numbered, tokenizer), most)


def from_tokens(
    ids: Sequence[int], seed: int, *, pool: int, chunk_tokens: int, max_tokens: int
) -> Corpus:
    """A corpus of `pool` chunks of `chunk_tokens` random ids each, to measure memory and time.

    Each chunk is a topic with one question of random ids.
    """
    rng = Random(f"{seed}/tokens")
    head = SampleSegment("text", "", _random(rng, ids, HEAD))
    topics = tuple(
        Topic(
            (SampleSegment("chunk", "", _random(rng, ids, chunk_tokens)),),
            (TopicQuestion(head, SampleSegment("text", "", _random(rng, ids, TAIL))),),
        )
        for _ in range(pool)
    )
    return Corpus(SYNTHETIC, topics, partial(_drawn, ids, seed), max_tokens)


def _numbered(tokenizer: Tokenizer, chunk: SampleSegment, number: int) -> SampleSegment:
    text = f"Copy {number}.\n{chunk.text}"
    return replace(chunk, text=text, tokens=encode(tokenizer, [text])[0])


def _drawn(ids: Sequence[int], seed: int, chunk: SampleSegment, number: int) -> SampleSegment:
    rng = Random(f"{seed}/copy/{number}")
    return SampleSegment("chunk", "", _random(rng, ids, len(chunk.tokens)))


def _random(rng: Random, ids: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(rng.choices(ids, k=count))


def _topics(samples: Iterable[Sample]) -> Iterator[Topic]:
    usable = (
        s for s in samples if s.chunks and s.segments[0].kind == s.segments[-1].kind == "text"
    )
    for chunks, asked in groupby(usable, key=lambda sample: sample.chunks):
        questions = (TopicQuestion(s.segments[0], s.segments[-1], s.answers) for s in asked)
        yield Topic(chunks, tuple(questions))


def _join(
    passages: Sequence[SampleSegment], tokenizer: Tokenizer, least: int, tokens: int
) -> Iterator[SampleSegment]:
    """Join passages until each chunk has `least` of them and `tokens` tokens."""
    groups: list[list[SampleSegment]] = []
    for passage in passages:
        if groups and not _is_full(groups[-1], least, tokens):
            groups[-1].append(passage)
        else:
            groups.append([passage])
    if len(groups) > 1 and not _is_full(groups[-1], least, tokens):
        remainder = groups.pop()
        groups[-1] += remainder
    texts = ["".join(segment.text for segment in group) for group in groups]
    for group, text, ids in zip(groups, texts, encode(tokenizer, texts), strict=True):
        yield SampleSegment("chunk", text, ids, group[0].before)


def _is_full(group: Sequence[SampleSegment], least: int, tokens: int) -> bool:
    return len(group) >= least and sum(len(segment.tokens) for segment in group) >= tokens
