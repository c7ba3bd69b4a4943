"""Random prompts that are the same in every run."""

import random


def random_tokens(count: int, name: str, vocabulary: int = 1000) -> tuple[int, ...]:
    """`count` tokens that belong to `name`.

    The first 16 of the vocabulary, which are often special, are left out.
    """
    source = random.Random(name)
    return tuple(source.randrange(16, vocabulary) for _ in range(count))
