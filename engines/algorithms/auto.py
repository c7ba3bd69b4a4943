"""Chunks or text: each request is served in the way that is expected to be sooner."""

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar

from picbench.engines.algorithms.base import Algorithm
from picbench.engines.algorithms.mepic import Mepic
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Marks, Pad, Segment

_MEPIC = Mepic()


@dataclass(frozen=True)
class Auto(Algorithm):
    """Serve a request's chunks as another algorithm does, or as text, or some of them so.

    Compiled: chunks for which that is expected to pay, now and later. Linked and shared: as under
    the algorithm after the colon (``auto:naive``), or mepic. An engine decides when a request
    arrives (`picbench.engines.vllm.scheduler.chooser`); elsewhere all chunks are chunks.

    ``auto:reorder`` sends prompts as `Reorder` does, so that text finds the longest prefix, too.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "chunks as in auto:[reorder:]ALGORITHM (mepic), or text if sooner"

    inner: Algorithm = _MEPIC
    reorders: bool = field(default=False, kw_only=True)  # type: ignore[misc]

    @property
    def served(self) -> str:
        """The same without another order."""
        return replace(self, reorders=False).spec

    @property
    def pads(self) -> Pad:
        """As the algorithm of the chunks."""
        return self.inner.pads

    @property
    def separators(self) -> tuple[int, ...]:
        """As the algorithm of the chunks."""
        return self.inner.separators

    def __getattr__(self, name: str) -> Any:
        """An option of the algorithm of the chunks: its anchor, its temperature, ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def spec(self) -> str:
        """``auto``, ``reorder`` if so, and the algorithm of the chunks unless it is mepic."""
        own = f"{self.name}:reorder" if self.reorders else self.name
        return own if self.inner == _MEPIC else f"{own}:{self.inner.spec}"

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        """None that have a value: what follows the colon is ``reorder``, or an algorithm."""
        return ()

    def read_marks(self, tokens: Sequence[int], block_size: int) -> Marks:
        """As the algorithm of the chunks."""
        return self.inner.read_marks(tokens, block_size)

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """As the algorithm of the chunks."""
        return self.inner.arrange(segments, layout)

    def added(self, chunks: int) -> int:
        """As the algorithm of the chunks."""
        return self.inner.added(chunks)

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """As the algorithm of the chunks."""
        return self.inner.plan_chunk(index, length)


def of_chunks(algorithm: Algorithm) -> Algorithm:
    """The algorithm that serves chunks as chunks, whatever is expected: of `Auto` the inner one."""
    return algorithm.inner if isinstance(algorithm, Auto) else algorithm
