"""The requests of a storm: many algorithms over the same chunks, and plain ones among them.

Everything is drawn from a seed, token ids included, so any model with 1,000 tokens will do.
"""

import random
from collections.abc import Iterator, Sequence

from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.measure.engine.random_tokens import random_tokens

#: Algorithms of requests with chunks.
ALGORITHMS = (
    "mepic",
    "naive",
    "epic:k=16",
    "epic:k=4:copy=shared",
    "cacheblend:r=0.15",
    "cacheblend:r=0.15:select=first",
    "full",
    "prefix",
    "mepic:pad=paper",
    "naive:anchored=on",
    "block-attention",
    "prompt-cache",
    "kvlink:n=5",
)

#: The algorithm of requests without chunks.
PLAIN = "prefix"

#: Tokens that requests generate: the longer, the more requests lose their blocks.
OUTPUTS = (8, 60, 300, 300)

#: The most chunks of a request, unless its prompt is long.
MOST = 12

#: Tokens of the shortest and the longest chunk, and how many chunks there are.
SHORTEST, LONGEST, CHUNKS = 17, 400, 96

_SYSTEMS, _SKEW = 3, 0.4


def draw_requests(count: int, longest: int, seed: int) -> list[Request]:
    """`count` requests with prompts of at most `longest` tokens, at least 256.

    Every seventh has no chunks, every twenty-fifth a prompt of nearly `longest` tokens, in which
    chunks may occur more than once.
    """
    dice = random.Random(seed)
    chunks = [
        Chunk(tokens=random_tokens(dice.randint(SHORTEST, min(LONGEST, longest // 8)), f"c{i}"))
        for i in range(CHUNKS)
    ]
    return [_request(index, chunks, longest, dice) for index in range(count)]


def _request(index: int, chunks: Sequence[Chunk], longest: int, dice: random.Random) -> Request:
    system = Text(tokens=random_tokens(24, f"system {dice.randrange(_SYSTEMS)}"))
    question = Text(tokens=random_tokens(dice.randint(1, 40), f"question {index}"))
    most = longest if index % 25 == 24 else longest // 2
    wanted = None if index % 25 == 24 else dice.randint(1, MOST)
    picked = list(_picked(chunks, most - 64, wanted, dice))
    segments: list[PromptSegment] = [system, *picked, question]
    algorithm = dice.choice(ALGORITHMS)
    if index % 7 == 0:
        tokens = tuple(token for segment in segments for token in segment.tokens or ())
        segments, algorithm = [Text(tokens=tokens)], PLAIN
    return Request(segments, algorithm, dice.choice(OUTPUTS))


def _picked(
    chunks: Sequence[Chunk], room: int, count: int | None, dice: random.Random
) -> Iterator[Chunk]:
    """Chunks of at most `room` tokens together, `count` of them unless that is too many."""
    weights = [(rank + 1) ** -_SKEW for rank in range(len(chunks))]
    while count is None or count > 0:
        [chunk] = dice.choices(chunks, weights)
        room -= len(chunk.tokens or ())
        if room < 0:
            return
        count = None if count is None else count - 1
        yield chunk
