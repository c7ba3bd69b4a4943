"""The two kinds of arms: those that map chunks, and those that compute prompts from some token on.

Arms of a kind share their costs, and an engine's speed.
"""

from picbench.engines.algorithms import Algorithm, Reuse


def links_chunks(algorithm: Algorithm) -> bool:
    """Whether an algorithm maps chunks."""
    return algorithm.reuse is Reuse.CHUNKS
