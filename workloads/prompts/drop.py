"""Prompts from which passages are left out, as by a retriever that does not find them."""

from collections.abc import Hashable, Sequence
from typing import Literal

from picbench.workloads.prompts.segmentation import preceding

#: ``lead``: what precedes a passage that the answer needs, in the passage's document.
Drop = Literal["lead"]


def leads(
    documents: Sequence[Hashable], gold: Sequence[int], places: Sequence[int] = ()
) -> frozenset[int]:
    """The passages that precede one of `gold` in its document, except those of `gold`.

    `documents` and `places` are as in `preceding`.
    """
    earlier = preceding(documents, places)
    return frozenset(passage for needed in gold for passage in earlier[needed]) - {*gold}
