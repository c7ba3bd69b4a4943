"""The cache API of a server: which chunks it has, warming and pinning them, erasing documents.

`CacheMiddleware` (vLLM's flag ``--middleware``) answers below ``/pic/`` where the operator has set
a key for it; without one there is nothing at these paths. What is asked goes to the engine core,
which knows all chunks, so that any API server may answer.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from hmac import compare_digest
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import SamplingParams
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.tokenizers import cached_tokenizer_from_config

from picbench.dummy_prefix import inside_prompt
from picbench.engines.algorithms import of_chunks, parse
from picbench.engines.config import secret
from picbench.engines.vllm.frontend.document_parts import refusal
from picbench.engines.vllm.frontend.request_args import ARGS, RequestArgs
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError, first_refusal

#: Limits: chunks of a request, bytes of its body, characters of an id or a salt.
_CHUNKS, _BYTES, _CHARACTERS = 256, 32 << 20, 200
_Name = Annotated[str, Field(min_length=1, max_length=_CHARACTERS)]

#: Seconds after which tiers that have not answered count as failed.
_ERASE_S = 15.0

_DOCUMENTS = "/pic/documents/"

#: The salt of the client whose request is being answered; see `UsageMiddleware`.
_SALT: ContextVar[str] = ContextVar("_SALT", default="")


def salted(given: str | None) -> str | None:
    """A request's salt: that of its API key, where servers have such, and what the client sent."""
    return "/".join(filter(None, (_SALT.get(), given))) or None


def _salts(state: Any) -> bool:
    """Whether clients of a server are told apart by their API keys."""
    settings = PicSettings.given(state.vllm_config.additional_config)
    several = len(set(getattr(state.args, "api_key", None) or ())) > 1
    return several if settings is None or settings.salts is None else settings.salts


def _salt_of(scope: Scope) -> str:
    """A digest of a request's API key, if it has one."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if not key or scheme.lower() != "bearer":
        return ""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class _Chunk(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = ""
    tokens: list[int] = []


class WarmRequest(BaseModel):
    """A request to warm chunks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    chunks: list[_Chunk] = Field(min_length=1, max_length=_CHUNKS)
    document: _Name | None = None
    pin: bool = False
    salt: _Name | None = None
    algorithm: _Name | None = None


class CacheMiddleware:
    """ASGI middleware that answers ``/pic/chunks`` and ``/pic/documents/ID``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._key = secret("CACHE_KEY")
        # Known when the first request comes: the server makes this before its engine.
        self._salted: bool | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what is wrong with it gets 400 and a reason."""
        if scope["type"] == "http" and self._key and scope["path"].startswith("/pic/"):
            with suppress(ClientDisconnect):
                answer = await self._answer(Request(scope, receive), self._key)
                await answer(scope, receive, send)
            return
        if scope["type"] == "http":
            if self._salted is None:
                self._salted = _salts(scope["app"].state)
            _SALT.set(_salt_of(scope) if self._salted else "")
        await self._app(scope, receive, send)

    async def _answer(self, request: Request, key: str) -> JSONResponse:
        given = request.headers.get("authorization", "").encode()
        if not compare_digest(given, f"Bearer {key}".encode()):
            return refusal("the cache API needs its own key, as a bearer token", 401)
        path, engine = request.scope["path"], request.app.state.engine_client
        try:
            if (request.method, path) == ("GET", "/pic/chunks"):
                return JSONResponse(await engine.engine_core.call_utility_async("pic_cache"))
            if (request.method, path) == ("POST", "/pic/chunks"):
                return JSONResponse(await _warm(engine, await _read(request)))
            if request.method == "DELETE" and path.startswith(_DOCUMENTS):
                return await _erase(engine, path.removeprefix(_DOCUMENTS))
        except (ConfigError, VLLMValidationError) as error:
            return refusal(str(error))
        except GenerationError as error:
            return refusal(str(error), 503)
        return refusal("there are GET and POST /pic/chunks, and DELETE /pic/documents/ID", 404)


async def _erase(engine: Any, document: str) -> JSONResponse:
    if not 0 < len(document) <= _CHARACTERS:
        raise ConfigError(f"the id has {len(document)} characters, not 1 to {_CHARACTERS}")
    asked = engine.engine_core.call_utility_async("pic_cache", document)
    try:
        done = await asyncio.wait_for(asked, _ERASE_S)
    except TimeoutError:
        return refusal("the tiers do not answer: the document may be there; send it again", 503)
    if done["failed"]:
        left = ", ".join(done["failed"])
        return refusal(f"the document may still be in {left}; send it again", 503)
    return JSONResponse({"document": document, "chunks": done["chunks"]})


async def _warm(engine: Any, given: WarmRequest) -> dict[str, Any]:
    """Compile or fetch chunks, each by a request of its own."""
    config = engine.vllm_config
    settings = PicSettings.given(config.additional_config) or PicSettings()
    algorithm = of_chunks(parse(given.algorithm or settings.algorithm)).spec
    tokenizer = inside_prompt(cached_tokenizer_from_config(config.model_config))
    vocabulary, salt = config.model_config.get_vocab_size(), given.salt

    async def warm(tokens: Sequence[int]) -> dict[str, Any]:
        spans, names = ((0, len(tokens)),), (given.document,)
        args = RequestArgs(spans, algorithm, usage=True, names=names, pin=given.pin)
        params = SamplingParams(max_tokens=1, temperature=0, extra_args={ARGS: args})
        # Some text must follow.
        prompt = {"prompt_token_ids": [*tokens, 0]} | ({"cache_salt": salt} if salt else {})
        report: dict[str, Any] = {}
        async for output in engine.generate(prompt, params, f"pic-warm-{uuid4().hex}"):
            report = (output.kv_transfer_params or {}).get(ARGS, report)
        state = report["chunks"][0]["state"]
        return {"state": state, "tokens": len(tokens), "pinned": report.get("pinned", False)}

    texts = [_tokens(n, chunk, tokenizer, vocabulary) for n, chunk in enumerate(given.chunks)]
    return {"chunks": await asyncio.gather(*map(warm, texts))}


async def _read(request: Request) -> WarmRequest:
    """The checked body of a request to warm chunks. Raises ConfigError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BYTES:
            raise ConfigError(f"the body has more than {_BYTES >> 20} MiB")
    try:
        return WarmRequest.model_validate_json(body)
    except ValidationError as error:
        hint = 'send {"chunks": [{"text": "..."}]}'
        raise ConfigError(str(first_refusal(error)), hint=hint) from error


def _tokens(number: int, chunk: _Chunk, tokenizer: Any, vocabulary: int) -> Sequence[int]:
    """The tokens of a chunk, given as ids or as text, which is tokenized as between marks."""
    found: list[int] = chunk.tokens or tokenizer.encode(chunk.text, add_special_tokens=False)
    if (chunk.text and chunk.tokens) or not found or not 0 <= min(found) <= max(found) < vocabulary:
        hint = 'give a "text", or "tokens" of the vocabulary'
        raise ConfigError(f"chunks[{number}] has no text and no tokens", hint=hint)
    return found
