"""Algorithms by name, discovered through the entry-point group ``picbench.algorithms``."""

from picbench.engines.algorithms.anchors import find_tokens, read_text, sampled, stand_ins
from picbench.engines.algorithms.auto import Auto, of_chunks
from picbench.engines.algorithms.base import (
    Algorithm,
    ChunkAlgorithm,
    CopyingAlgorithm,
    NumberRange,
    Reuse,
    option,
)
from picbench.engines.algorithms.notation import (
    Registry,
    check_served,
    describe,
    names,
    parse,
    temperatures,
)

__all__ = [
    "Algorithm",
    "Auto",
    "ChunkAlgorithm",
    "CopyingAlgorithm",
    "NumberRange",
    "Registry",
    "Reuse",
    "check_served",
    "describe",
    "find_tokens",
    "names",
    "of_chunks",
    "option",
    "parse",
    "read_text",
    "sampled",
    "stand_ins",
    "temperatures",
]
