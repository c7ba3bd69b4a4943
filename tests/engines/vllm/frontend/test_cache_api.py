"""Salts of requests by their API keys."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.frontend.cache_api import CacheMiddleware, salted


def salt(settings: dict[str, Any], keys: list[str] | None, header: str, given: str | None) -> Any:
    """The salt of a request with a header, on a server with these keys."""
    found = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(salted(given))

    config = SimpleNamespace(additional_config={"pic": settings})
    state = SimpleNamespace(args=SimpleNamespace(api_key=keys), vllm_config=config)
    scope = {"type": "http", "path": "/v1/chat/completions", "app": SimpleNamespace(state=state)}
    scope["headers"] = [(b"authorization", header.encode())] if header else []
    call: Any = CacheMiddleware(app)
    asyncio.run(call(scope, None, None))
    return found[0]


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@pytest.mark.parametrize(
    ("settings", "keys", "salts"),
    [
        ({}, None, False),
        ({}, ["a"], False),
        ({}, ["a", "a"], False),
        ({}, ["a", "b"], True),
        ({"salts": False}, ["a", "b"], False),
        ({"salts": True}, None, True),
    ],
)
def test_keys_that_differ_have_salts_of_their_own(settings, keys, salts):
    for given in (None, "own"):
        expected = "/".join(filter(None, (digest("a") if salts else None, given))) or None
        assert salt(settings, keys, "Bearer a", given) == expected
    assert salt(settings, keys, "", "own") == "own"
    assert (
        salt(settings, keys, "bearer a", None) == salt(settings, keys, "Bearer b", None)
    ) != salts
