from collections.abc import Callable

import pytest
from hypothesis import settings

from picbench.workloads.traffic.corpus import Corpus, from_tokens

# How fast the machine is must not decide a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def random_corpus() -> Callable[..., Corpus]:
    """A corpus of random tokens, each chunk a topic."""

    def make(pool: int = 30, chunk_tokens: int = 20, seed: int = 0) -> Corpus:
        return from_tokens(range(10, 500), seed, pool=pool, chunk_tokens=chunk_tokens, max_tokens=4)

    return make
