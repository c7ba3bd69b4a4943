"""Requests that decode read copies; what they generate does not depend on it."""

from typing import Any

import pytest

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.kernels.cpu.copies import KvCopies

pytestmark = pytest.mark.engine


def test_copies_change_nothing_and_are_given_back(
    engine: Engine, inside: Any, chunks: list[Chunk], question: Text
) -> None:
    requests = [Request([*chunks[i:], question], max_tokens=20) for i in range(3)]
    engine.generate(requests, ignore_eos=True)
    (builder,) = inside.runner._builders()
    copies = builder.copies
    capacity = inside.runner.kv_cache_config.num_blocks // 2
    assert 0 < copies.free < capacity
    copied = engine.generate(requests, logprobs=1, ignore_eos=True)
    builder.copies = KvCopies(0)
    gathered = engine.generate(requests, logprobs=1, ignore_eos=True)
    builder.copies = copies
    for one, other in zip(copied, gathered, strict=True):
        assert one.tokens == other.tokens
        for ours, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    engine.generate([Request([question], max_tokens=2)])
    assert copies.free == capacity
