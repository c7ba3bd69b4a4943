"""Algorithms by name, discovered through the entry-point group ``picbench.algorithms``."""

from picbench.engines.algorithms.base import Algorithm, ChunkAlgorithm, Reuse, option
from picbench.engines.algorithms.registry import Registry, describe, names, parse

__all__ = [
    "Algorithm",
    "ChunkAlgorithm",
    "Registry",
    "Reuse",
    "describe",
    "names",
    "option",
    "parse",
]
