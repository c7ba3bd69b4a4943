"""The two kinds of arms: those that map chunks, and those that compute prompts from some token on.

Arms of a kind share their costs, and an engine's speed.
"""

from picbench.engines.algorithms import Algorithm, Registry, Reuse


def links(algorithm: Algorithm) -> bool:
    """Whether an algorithm maps chunks."""
    return algorithm.reuse is Reuse.CHUNKS


def links_chunks(arm: str) -> bool:
    """Whether the algorithm of this name does."""
    return links(Registry().parse(arm))
