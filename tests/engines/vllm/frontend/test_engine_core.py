"""Prompts with chunks are hashed only as far as their first chunk, and found all the same."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.frontend import engine_core
from picbench.engines.vllm.frontend.engine_core import (
    DeferredHasher,
    defer_hashing,
    hash_lead,
    hash_prompt,
)
from picbench.errors import ConfigError

SIZE = 16


def stock() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(SIZE, sha256)


def request(tokens: list[int], hasher: Any, extra_args: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request as VllmRequest

    params = SamplingParams(max_tokens=1, extra_args=extra_args)
    return VllmRequest("a", list(tokens), params, None, block_hasher=hasher)


CHUNKS = {"pic": {"spans": [[20, 60]]}}


@pytest.mark.parametrize("extra_args", [CHUNKS, {"pic_spans": [20, 60]}])
def test_a_prompt_with_chunks_is_hashed_on_request(extra_args: dict[str, Any]) -> None:
    plain = request(list(range(64)), stock())
    late = request(list(range(64)), DeferredHasher(stock()), extra_args)
    assert len(plain.block_hashes) == 4
    assert late.block_hashes == []
    hash_prompt(late)
    assert late.block_hashes == plain.block_hashes
    late.append_output_token_ids(list(range(16)))
    assert len(late.block_hashes) == 5


@pytest.mark.parametrize("extra_args", [None, {}, {"pic": {"algorithm": "full"}}, {"other": 1}])
def test_other_prompts_are_hashed_at_once(extra_args: dict[str, Any] | None) -> None:
    plain = request(list(range(64)), stock())
    found = request(list(range(64)), DeferredHasher(stock()), extra_args)
    assert found.block_hashes == plain.block_hashes
    hash_prompt(found)
    assert found.block_hashes == plain.block_hashes


@settings(deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=90), st.integers(0, 90))
def test_the_keys_of_the_lead_are_those_of_a_plain_prompt(tokens: list[int], lead: int) -> None:
    plain = request(tokens, stock()).block_hashes[: lead // SIZE]
    late = request(tokens, DeferredHasher(stock()), CHUNKS)
    assert hash_lead(late, lead) == plain
    assert hash_lead(request(tokens, stock()), lead) == plain
    assert late.block_hashes == []
    for some in range(len(plain)):
        assert hash_lead(late, lead, plain[:some]) == plain
    hash_prompt(late, plain)
    assert late.block_hashes == request(tokens, stock()).block_hashes


def test_without_prefix_caching_nothing_is_hashed() -> None:
    bare = request([1] * 40, None)
    hash_prompt(bare)
    assert hash_lead(bare, 32) == []


def test_hashing_is_deferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    defer_hashing()
    before = vars(core)["get_request_block_hasher"]
    defer_hashing()
    assert vars(core)["get_request_block_hasher"] is before
    other = SimpleNamespace(get_request_block_hasher=lambda size: None)
    monkeypatch.setattr(engine_core, "import_module", lambda name: other)
    with pytest.raises(ConfigError, match="picbench was written for"):
        defer_hashing()


@pytest.mark.parametrize("algorithm", ["mepic", "naive", "prefix", "full"])
def test_an_engine_hashes_no_more_than_it_looks_up(
    engine: Engine, inside: Any, draw: Any, algorithm: str
) -> None:
    """Requests that share their text before the first chunk share its blocks with plain ones."""
    lead, chunk = draw(40, 1), Chunk(tokens=draw(60, 2))
    core = engine._running.engine.engine_core.engine_core  # type: ignore[attr-defined]
    assert isinstance(core.request_block_hasher, DeferredHasher)
    engine.generate([Request([Text(tokens=(*lead, *draw(30, 3)))])], max_tokens=1)
    asked = Request([Text(tokens=lead), chunk, Text(tokens=draw(9, 4))], algorithm)
    (result,) = engine.generate([asked], max_tokens=1)
    assert result.hits.prefix == (0 if algorithm == "full" else 2)
