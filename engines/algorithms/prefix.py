"""Prefix caching as vLLM does it: what a user has without position-independent caching."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.planning.policy import Treatment


@dataclass(frozen=True)
class Prefix(Algorithm):
    """Reuse the longest common prefix of earlier prompts."""

    name: ClassVar[str] = "prefix"
    summary: ClassVar[str] = "vLLM's own prefix caching"
    reuse: ClassVar[Reuse] = Reuse.PREFIX

    def treat(self, index: int, length: int) -> Treatment:
        """Link the whole chunk: all of it depends on the prefix."""
        return Treatment(linked=range(length))
