"""How large a context and a KV pool a workload needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from picbench.engines.algorithms import Algorithm, Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.layout import Footprint, measure
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.errors import ConfigError
from picbench.workloads.sample import Sample

#: Blocks that an algorithm adds for a chunk, or fewer: one of padding, four of linked tokens. Those
#: that link more get what they need.
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
    samples: Sequence[Sample],
    algorithms: Sequence[Algorithm] = (),
    *,
    concurrency: int,
    context: int | None,
    pool: int | None,
    positions: int | None = None,
) -> Sizes:
    """Sizes for `samples`; a `context` and a `pool` that the user chose are taken as they are.

    Otherwise the pool holds `concurrency` of the longest requests and every distinct chunk, and the
    context what `algorithms` add to prompts and what they compile chunks after, up to the model's
    `positions`. Raises ConfigError for
    a pool below one request, and for an algorithm that cannot plan a sample.
    """
    longest = max(blocks(_length(sample)) for sample in samples)
    chunks = sum(blocks(len(tokens)) for _, tokens in _distinct_chunks(samples))
    if pool is not None and pool < longest:
        raise ConfigError(
            f"`kv_blocks` {pool}: the longest request needs {longest} ({BLOCK_SIZE} tokens each)",
            hint="raise `kv_blocks`, or shorten prompts with `context`",
        )
    return Sizes(
        context=context or _context(samples, algorithms, positions),
        longest=longest,
        chunks=chunks,
        pool=pool or _pool(samples, algorithms, concurrency, chunks),
    )


def least_pool(samples: Sequence[Sample], algorithms: Sequence[Algorithm] = ()) -> int:
    """Blocks of the smallest pool that serves every sample, under any algorithm, one at a time."""
    return _even(max(_need(sample, algorithms) for sample in samples) + SPARE)


def blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def _pool(
    samples: Sequence[Sample], algorithms: Sequence[Algorithm], concurrency: int, chunks: int
) -> int:
    needs = sorted((_need(sample, algorithms) for sample in samples), reverse=True)
    return _even(sum(needs[:concurrency]) + min(chunks, LARGEST_IDLE) + SPARE)


def _need(sample: Sample, algorithms: Sequence[Algorithm]) -> int:
    usual = blocks(_length(sample)) + CHUNK_EXTRA * len(sample.chunks)
    planned = (
        blocks(footprint.slots + sample.max_tokens) for footprint in _footprints(sample, algorithms)
    )
    document = max((len(chunk.context) for chunk in sample.chunks), default=0)
    return max([usual, *planned]) + blocks(document)


def _context(
    samples: Sequence[Sample], algorithms: Sequence[Algorithm], positions: int | None
) -> int:
    longest = max(map(_length, samples))
    ends = (
        max(footprint.end + sample.max_tokens, footprint.compile_end)
        for sample in samples
        for footprint in _footprints(sample, algorithms)
    )
    added = max(ends, default=0)
    return max(longest, added if positions is None else min(added, positions))


def _footprints(sample: Sample, algorithms: Sequence[Algorithm]) -> Iterator[Footprint]:
    """What a sample needs under each algorithm that plans it."""
    given = [
        Segment(s.tokens, chunk=s.kind == "chunk", context=s.context)
        for s in sample.segments
        if s.tokens
    ]
    for algorithm in algorithms:
        if algorithm.reuse is Reuse.CHUNKS and sample.chunks:
            # Which tokens are added makes no difference here.
            layout = LayoutConfig(
                BLOCK_SIZE, pad=algorithm.pads, bos_token=0, documents=algorithm.documents
            )
            try:
                yield measure(algorithm.arrange(given, layout), algorithm.plan_chunk, layout)
            except ValueError as error:
                hint = "use another algorithm"
                raise ConfigError(f"`algo` {algorithm.spec}: {error}", hint=hint) from error


def _even(pool: int) -> int:
    return pool + pool % 2


def _length(sample: Sample) -> int:
    return sample.prompt_tokens + sample.max_tokens


def _distinct_chunks(samples: Sequence[Sample]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(what stands before it in its document, its tokens) of every chunk."""
    return {(chunk.context, chunk.tokens) for sample in samples for chunk in sample.chunks}
