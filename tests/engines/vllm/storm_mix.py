"""Requests of all kinds over chunks of awkward lengths, for storms."""

import random
from collections.abc import Mapping
from typing import Any

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.request import Chunk, PromptSegment, Request, Text

#: Every way to pad, to anchor, to copy and to share; `full` and `prefix` reuse no chunks.
ALGORITHMS = (
    "mepic",
    "mepic:pad=paper:anchor=head",
    "naive:pad=paper",
    "naive:anchor=head",
    "epic:k=0",
    "epic:k=16",
    "epic:k=1:copy=shared:pad=paper",
    "epic:k=64:copy=shared:anchor=head",
    "cacheblend:r=0.05:select=first:pad=paper",
    "cacheblend:r=0.3:select=first:copy=shared",
    "cacheblend:r=0.2",
    "mepic:select=question",
    "mepic:select=question:anchor=passage",
    "prophetkv:r=0.2",
    "naive:anchor=passage",
    "epic:k=4:anchor=./other.txt",
    "ape:anchor=passage",
    "naive:temperature=2.0:pad=paper",
    "full",
    "prefix",
)

#: Those of some of them.
TEMPERATURES = (0.9, 2.0)

#: Tokens of chunks: one, a block and its neighbours, whole blocks, and several that are not.
LENGTHS = (1, 15, 16, 17, 33, 48, 64, 100)

#: Requests whose numbers leave the remainder are answered twice, by sampling.
SEVERAL = (13, 5)


def draw_mix(draw: Any, seed: int, count: int) -> list[Request]:
    """`count` requests; every seventh has no chunks, every fourth brings its reply.

    In some a chunk occurs twice.

    Prompts begin with a text or a chunk, and end with a text, with a chunk, or where a block ends.
    """
    dice = random.Random(seed)
    chunks = [Chunk(tokens=draw(length, 9000 + i)) for i, length in enumerate(LENGTHS * 4)]
    systems = [Text(tokens=draw(length, 8000 + length)) for length in (0, 5, 16)]
    return [_request(index, chunks, systems, draw, dice) for index in range(count)]


def sampling(index: int) -> Mapping[str, Any]:
    """What a request asks of vLLM's sampling, by its number."""
    divisor, remainder = SEVERAL
    if index % divisor != remainder:
        return {}
    return {"n": 2, "seed": index, "temperature": 1.0}


def _request(
    index: int, chunks: list[Chunk], systems: list[Text], draw: Any, dice: random.Random
) -> Request:
    segments: list[PromptSegment] = [*dice.sample(systems, dice.randint(0, 1))]
    segments += dice.choices(chunks, k=dice.randint(2, 12))
    length = sum(len(segment.tokens or ()) for segment in segments)
    asked = dice.choice([0, 1, 20, -length % BLOCK_SIZE])
    segments.append(Text(tokens=draw(asked, 100_000 + index)))
    algorithm, salt = dice.choice(ALGORITHMS), dice.choice([None, None, "another tenant"])
    if index % 7 == 0:
        segments = [Text(tokens=tuple(t for s in segments for t in s.tokens or ()))]
    tokens = dice.choice([1, 2, 16, 24])
    reply = draw(tokens, 200_000 + index) if index % 4 == 1 else None
    return Request(segments, algorithm, tokens, salt, reply=reply)
