"""What one arm reuses of a trace, request by request and in all."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestReuse:
    """Prompt tokens of one request by origin, as the engine counts them (`TokenCounts`).

    `reused` are those that were not computed for it; chunks that were compiled for it are among
    them, and are in `compiled`, too. `chunk_blocks` are shared blocks of chunks, `prefix_blocks`
    found ones of the rest, `copied_blocks` private copies. `shared` are the keys of the blocks that
    others hold or may find while it runs, with their numbers, `own_blocks` all others.
    `compile_blocks` are of chunks that are compiled for it, in pages that it does not map itself.
    """

    prompt: int
    reused: int
    compiled: int = 0
    chunk_blocks: int = 0
    prefix_blocks: int = 0
    copied_blocks: int = 0
    own_blocks: int = 0
    shared: tuple[tuple[int | bytes, int], ...] = ()
    compile_blocks: int = 0

    @property
    def computed(self) -> int:
        """Tokens that are computed before the request can be answered."""
        return self.prompt - self.reused + self.compiled


@dataclass(slots=True)
class ReuseTotals:
    """Sums over the requests of a trace; `refused` ones need more blocks than the pool has.

    `cached_blocks` are those that the pool holds at the end: all that was ever cached, if it is
    unbounded. `evicted_blocks` lost their KV to others.
    """

    requests: int = 0
    refused: int = 0
    prompt: int = 0
    reused: int = 0
    compiled: int = 0
    chunk_blocks: int = 0
    prefix_blocks: int = 0
    copied_blocks: int = 0
    own_blocks: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0

    def add(self, found: RequestReuse | None) -> None:
        """Count a request; None was refused."""
        if found is None:
            self.refused += 1
            return
        self.requests += 1
        self.prompt += found.prompt
        self.reused += found.reused
        self.compiled += found.compiled
        self.chunk_blocks += found.chunk_blocks
        self.prefix_blocks += found.prefix_blocks
        self.copied_blocks += found.copied_blocks
        self.own_blocks += found.own_blocks

    @property
    def computed(self) -> int:
        """Tokens that are computed for all prompts."""
        return self.prompt - self.reused + self.compiled

    @property
    def saved(self) -> float:
        """The share of prompt tokens that need not be computed; never negative in practice."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0
