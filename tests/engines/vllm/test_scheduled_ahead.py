"""Steps that are scheduled before the previous one has ended, as on a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import engine_ahead
from small_engine import small_config

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text

#: More steps than any of these requests needs.
STEPS = 60


@pytest.fixture(scope="module")
def ahead(pebble: Path) -> Iterator[Engine]:
    """An engine whose scheduler is one step ahead of the model."""
    config = small_config(pebble, 200, 512, tiers="", batch_tokens=64)
    with engine_ahead(config) as engine:
        yield engine
        # What was scheduled last ends with the next steps.
        engine.drain()


def test_a_drained_engine_has_no_step_and_no_store_left(pebble: Path) -> None:
    """The last step begins a store, of which the scheduler does not know before it ends."""
    config = small_config(pebble, 200, 512, tiers="host:4MiB", batch_tokens=64)
    with engine_ahead(config) as engine:
        engine.submit(_asked([Chunk(tokens=tuple(range(100, 140)))], "mepic", 1), max_tokens=1)
        engine.drain()
        core: Any = engine._running.engine.engine_core
        assert not core.engine_core.batch_queue
        assert engine.drained


def _asked(chunks: list[Chunk], algorithm: str, last: int) -> Request:
    return Request([*chunks, Text(tokens=(7, 8, last))], algorithm)


def _serve(engine: Engine, requests: list[Request], steps: int) -> list[Result]:
    """The results of requests that come `steps` steps one after another."""
    tags: list[str] = []
    found: dict[str, Result] = {}
    for request in requests:
        tags.append(engine.submit(request, max_tokens=4))
        for _ in range(steps):
            found |= engine.step()
    for _ in range(STEPS):
        found |= engine.step()
        if len(found) == len(tags):
            return [found[tag] for tag in tags]
    for tag in tags:
        engine.abort(tag)
    pytest.fail("requests wait for ever")


@pytest.mark.parametrize("algorithm", ["epic:k=4", "cacheblend:r=0.5", "mepic", "naive"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_chunks_that_begin_alike_are_compiled_once(
    ahead: Engine, algorithm: str, steps: int
) -> None:
    """The second one while the first one is: neither is taken for unfinished because of the other.

    Else each is compiled again because the other is, and no request ever runs.
    """
    ahead.reset()
    begin = tuple(range(100, 116))
    first, second = (Chunk(tokens=(*begin, *range(n, n + 20))) for n in (200, 300))
    requests = [_asked([first], algorithm, 1), _asked([first, second], algorithm, 2)]
    alone = _serve(ahead, requests, STEPS)
    ahead.reset()
    found = _serve(ahead, requests, steps)
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    # The page that both begin with may have been compiled twice.
    assert 16 + 2 * 20 <= sum(result.counts.compile_work for result in found) <= 2 * 36


@pytest.mark.parametrize("chunk", [(), tuple(range(300, 316))], ids=["plain", "with a chunk"])
def test_a_reply_that_ends_where_a_block_does_is_not_cached_before_it_is_computed(
    ahead: Engine, chunk: tuple[int, ...]
) -> None:
    """The last token of a reply is never computed, so what follows it in a dialogue has to be."""
    chunks = [Chunk(tokens=chunk)] * bool(chunk)
    asked = tuple(range(400, 420 - len(chunk)))

    def ask(*more: int) -> Result:
        request = Request([*chunks, Text(tokens=(*asked, *more))], "naive")
        return ahead.generate([request], max_tokens=12, ignore_eos=True)[0]

    ahead.reset()
    reply = ask().tokens
    assert (20 + len(reply)) % BLOCK_SIZE == 0
    again = ask(*reply, 7, 8, 9)
    assert again.counts.reused == BLOCK_SIZE
    ahead.reset()
    assert again.tokens == ask(*reply, 7, 8, 9).tokens
