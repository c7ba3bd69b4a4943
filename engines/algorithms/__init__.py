"""Algorithms by name, discovered through the entry-point group ``picbench.algorithms``."""

from picbench.engines.algorithms.base import Algorithm, ChunkAlgorithm, Reuse, option
from picbench.engines.algorithms.registry import describe, names, parse

__all__ = ["Algorithm", "ChunkAlgorithm", "Reuse", "describe", "names", "option", "parse"]
