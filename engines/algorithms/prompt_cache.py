"""Prompt Cache (arXiv 2311.04934, MLSys 2024): modules at the positions of a schema."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class PromptCache(Algorithm):
    """Reuse chunks, the modules of a schema, at the positions that the schema gives them.

    Compiled: each chunk alone, at its positions in the prompt. Linked: nothing; what a request
    fills a chunk's slots with is computed with all positions before it in view, and so is all text.
    Shared: all chunk blocks, between requests that have the chunk at the same positions.

    Positions and slots come with the request (`Chunk.position`, `Chunk.slots`; `Schema` makes them
    of modules with parameters and alternatives). Positions that nothing has are gaps. A prompt
    without positions is its own schema: a chunk is shared while everything before it has the same
    length.

    As published, a key is rotated once and never again, so the same chunk at two positions is two
    entries. `naive` serves the same prompts, with positions and slots, and the same answers from
    one entry, because keys depend on distances only and are rotated when they are read. Unlike the
    published code, in which new text sees all modules, no token sees a later position here.
    Scaffolds (modules that are compiled together) are a module here.
    """

    name: ClassVar[str] = "prompt-cache"
    summary: ClassVar[str] = "Prompt Cache: chunks at fixed positions, with slots to fill"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing, and compile the chunk where it stands."""
        return ChunkPolicy(fixed=True)
