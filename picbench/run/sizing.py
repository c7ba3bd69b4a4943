"""How large a context and a KV pool a workload needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from picbench.engines.config import BLOCK_SIZE
from picbench.errors import ConfigError
from picbench.workloads.sample import Sample

#: Blocks that an algorithm may add for a chunk: one of padding, four of linked tokens (EPIC's 64).
CHUNK_EXTRA = 5

#: Blocks that engines reserve for themselves.
SPARE = 16

#: Idle chunks beyond this many blocks (131,072 tokens) are left to eviction.
LARGEST_IDLE = 8192


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: `context` in tokens, the rest in blocks of 16 tokens.

    `longest` is what the longest request needs at least, `chunks` all distinct chunks, `pool`
    what every arm's engine gets.
    """

    context: int
    longest: int
    chunks: int
    pool: int


def measure_sizes(
    samples: Sequence[Sample], *, concurrency: int, context: int | None, pool: int | None
) -> Sizes:
    """Sizes for `samples`; a `context` and a `pool` that the user chose are taken as they are.

    Otherwise the pool holds `concurrency` of the longest requests and every distinct chunk.
    Raises ConfigError for a pool below one request.
    """
    longest = max(blocks(_length(sample)) for sample in samples)
    chunks = sum(blocks(len(tokens)) for tokens in _distinct_chunks(samples))
    if pool is not None and pool < longest:
        raise ConfigError(
            f"`kv_blocks` {pool}: the longest request needs {longest} ({BLOCK_SIZE} tokens each)",
            hint="raise `kv_blocks`, or shorten prompts with `context`",
        )
    return Sizes(
        context=context or max(_length(sample) for sample in samples),
        longest=longest,
        chunks=chunks,
        pool=pool or _pool(samples, concurrency, chunks),
    )


def least_pool(samples: Sequence[Sample]) -> int:
    """Blocks of the smallest pool that serves every sample, under any algorithm, one at a time."""
    return _even(max(map(_need, samples)) + SPARE)


def blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def _pool(samples: Sequence[Sample], concurrency: int, chunks: int) -> int:
    running = sum(sorted(map(_need, samples), reverse=True)[:concurrency])
    return _even(running + min(chunks, LARGEST_IDLE) + SPARE)


def _need(sample: Sample) -> int:
    return blocks(_length(sample)) + CHUNK_EXTRA * len(sample.chunks)


def _even(pool: int) -> int:
    return pool + pool % 2


def _length(sample: Sample) -> int:
    return sample.prompt_tokens + sample.max_tokens


def _distinct_chunks(samples: Sequence[Sample]) -> set[tuple[int, ...]]:
    return {chunk.tokens for sample in samples for chunk in sample.chunks}
