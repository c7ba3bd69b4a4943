"""Random prompts that are the same in every run."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ordinary tokens of a vocabulary; the first ones, which are often special, are left out."""

    vocabulary: int

    def draw(self, count: int, name: str) -> tuple[int, ...]:
        """`count` tokens that belong to a name."""
        source = random.Random(name)
        return tuple(source.randrange(16, self.vocabulary) for _ in range(count))
