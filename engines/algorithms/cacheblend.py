"""CacheBlend (arXiv 2405.16444, EuroSys 2025): the tokens recomputed whose KV deviates most."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from picbench.engines.algorithms.base import CopyingAlgorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy, Deviation, DeviationSelection
from picbench.errors import ConfigError


@dataclass(frozen=True)
class CacheBlend(CopyingAlgorithm):
    """Recompute a share r of the tokens of all chunks, the same ones in every layer.

    Compiled: each chunk alone. Linked: the r, rounded down, whose values (``deviation=v``, as in
    the paper's code) or keys (``deviation=k``, as in LMCache) differ most between the prompt and
    the compiled chunk. They are compared at the second layer, for which the first is computed in
    full (section 4.3). Keys and values of both layers are those of the prompt for all tokens, as in
    the paper's code; r = 0 leaves only that. Shared: nothing, every request copies chunk KV.

    ``select=first`` is a static choice with the same work and memory after the first layers: the
    first r of every chunk's tokens, rounded up, which a missing prefix changes most (arXiv
    2410.15332, section on attention sinks). Nothing is compared, and with ``copy=shared`` requests
    share all chunk blocks that hold a token which is not linked.
    """

    name: ClassVar[str] = "cacheblend"
    summary: ClassVar[str] = "CacheBlend-r: recompute the tokens whose KV deviates most"

    r: float = option(
        0.15, "share of the chunks' tokens that is recomputed", NumberRange(0.0, 1.0), named=True
    )
    select: str = option(
        "deviation", "tokens whose KV deviates most, or static: the first", ("deviation", "first")
    )
    deviation: str = option("v", "what is compared: values or keys", ("v", "k"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select == "first" and self.deviation != "v":
            raise ConfigError(
                f"{self.spec!r}: select=first compares nothing", hint="leave deviation out"
            )
        if self.select == "deviation" and not self.private:
            raise ConfigError(
                f"{self.spec!r}: keys and values of the first layers are a request's own, so that "
                "its chunks cannot be shared",
                hint="leave copy=shared out, or use select=first",
            )

    @property
    def label(self) -> str:
        """The spec, in which ``select=first`` is called static."""
        return f"{self.name} (static){self.spec[len(self.name) :]}" if self.static else self.spec

    @property
    def static(self) -> bool:
        """Whether the linked tokens are known before a request runs."""
        return self.select == "first"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link a share of the chunk or of all chunks; no chunk is exempt."""
        if not self.static:
            selection = DeviationSelection(self.r, Deviation(self.deviation))
            return ChunkPolicy(anchor=self.anchor, private=True, selection=selection)
        # The product has rounding errors: 0.15 * 100 must be 15, not 16.
        count = min(length, ceil(round(self.r * length, 6)))
        return ChunkPolicy(linked=range(count), anchor=self.anchor, private=self.private)
