"""APE (arXiv 2502.05431): chunks compiled after one prefix, and attended to more sharply."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.anchors import Anchors
from picbench.engines.algorithms.base import option
from picbench.engines.algorithms.naive import Naive, temperature
from picbench.engines.planning.policy import Anchor


@dataclass(frozen=True)
class Ape(Naive):
    """Reuse chunks that are compiled after the prompt's head, at a temperature below 1.

    Compiled: each chunk after the text before them all. Linked: nothing. Shared: all chunk blocks.

    After APE, section 4: its shared prefix and its temperature, by which the scores of chunks are
    divided. Its scale is left out: it would raise the sum of the exponentials of a query's scores
    of all chunks to a power, which no kernel has apart from those of other keys.
    """

    name: ClassVar[str] = "ape"
    summary: ClassVar[str] = "after APE: chunks share a prefix and are attended to more sharply"

    anchor: Anchor = option(Anchor(head=True), "what chunks are compiled after", Anchors())  # noqa: RUF009
    temperature: float = temperature(0.9)
