"""Prompts from which passages are left out, as by a retriever that does not find them."""

from collections.abc import Hashable, Sequence
from typing import Literal

#: ``lead``: what precedes a passage that the answer needs, in the passage's document.
Drop = Literal["lead"]


def leads(documents: Sequence[Hashable], gold: Sequence[int]) -> frozenset[int]:
    """The passages that precede one of `gold` in its document, except those of `gold`.

    `documents` names the document of each passage.
    """
    return frozenset(
        passage
        for needed in gold
        for passage in range(needed)
        if documents[passage] == documents[needed] and passage not in gold
    )
