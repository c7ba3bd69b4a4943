"""An HTTP router: a request goes to the server whose pool has most of its chunks.

Servers publish KV events, and ai-dynamo-runtime's indexer counts what each has of a chunk, or of a
prompt without chunks. Servers tokenize, so that the router needs no model; without an indexer they
take turns. What one refuses goes to another; what it was answering when it died fails (502).
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.vllm.frontend.document_parts import refusal
from picbench.engines.vllm.parts import PartReader

_LOG = logging.getLogger("uvicorn.error")

#: What the indexer is told that blocks are of: all servers of a router have one model.
_MODEL = "picbench"
_Tokens = tuple[int, ...]
#: Headers that are about one connection.
_HOPS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length"}


@dataclass(slots=True)
class RoutedServer:
    """Where a server answers, publishes and repeats events, and what it was given to do of late."""

    url: str
    events: str
    replay: str
    up: bool = False
    in_flight: int = 0
    missed: float = 0.0


@dataclass(slots=True)
class Router:
    """Passes requests on to `servers`; `reader` finds documents in them."""

    servers: Sequence[RoutedServer]
    indexer: str
    reader: PartReader
    indexed: bool = False
    _asked: "count[int]" = field(default_factory=count)
    _tokens: dict[str, _Tokens] = field(default_factory=dict)
    _sent: dict[_Tokens, int] = field(default_factory=dict)
    _client: Any = None
    _index: Any = None

    def app(self) -> Starlette:
        """The application."""
        return Starlette(routes=[Mount("/", app=self)], lifespan=self._watching)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, until its client leaves."""
        body = await Request(scope, receive).body()
        calls = self._answer(scope, body, receive, send), receive()
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await tasks[0]

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        headers = [pair for pair in scope["headers"] if pair[0] not in _HOPS]
        chunks, hits = list[_Tokens](), Counter[int]()
        if scope["method"] == "POST" and self.indexed:
            with suppress(Exception):  # What is wrong with a request its server says.
                chunks = await self._chunks(json.loads(body), headers)
                hits = await self._hits(chunks)
        path = (scope["raw_path"] + b"?" + scope["query_string"]).decode().rstrip("?")
        for number in self._order(hits):
            server = self.servers[number]
            sent = {"url": server.url + path, "content": body, "headers": headers}
            server.in_flight, reply = server.in_flight + 1, None
            self._sent |= dict.fromkeys(chunks, number)
            try:
                async with self._client.stream(scope["method"], **sent) as reply:
                    if reply.status_code != 503 or sum(one.up for one in self.servers) < 2:
                        server.missed += sum(map(len, chunks)) - hits[number]
                        kept = {k: v for k, v in reply.headers.items() if k.encode() not in _HOPS}
                        kept["x-pic-server"] = str(number)
                        found = StreamingResponse(reply.aiter_raw(), reply.status_code, kept)
                        await found(scope, receive, send)
                        return
            except httpx.ConnectError:
                server.up = False
            except httpx.TransportError as problem:
                _LOG.error("%s %s: %r", server.url, scope["path"], problem)
                if reply is None:  # Else this answer has no end, as the server's.
                    await refusal("the server broke off", 502)(scope, receive, send)
                return
            finally:
                server.in_flight -= 1
                for chunk in chunks:
                    self._sent.pop(chunk, None)
        await refusal("no server is up", 503)(scope, receive, send)

    async def _chunks(self, body: Mapping[str, Any], headers: Any) -> list[_Tokens]:
        """The tokens of each chunk of a request, once, or of its prompt."""
        text = json.dumps(self.reader.rewrite(dict(body)), ensure_ascii=False)
        spans = [span for span in self.reader.marks.cut(text) if span.chunk]
        if documents := {json.loads(f'"{text[span.start : span.end]}"') for span in spans}:
            plain = {"model": body["model"], "add_special_tokens": False}
            asked = (self._tokenize(plain | {"prompt": one}, headers, one) for one in documents)
            return await asyncio.gather(*asked)
        given = body.get("prompt")
        prompt = tuple(given) if isinstance(given, list) else await self._tokenize(body, headers)
        ends = (body.get("vllm_xargs") or {}).get("pic_spans") or [0, len(prompt)]
        return [*{prompt[a:b] for a, b in zip(ends[::2], ends[1::2], strict=True)}]

    async def _tokenize(self, asked: Any, headers: Any, document: str = "") -> _Tokens:
        """The tokens of a prompt; a `document` has the same wherever it stands."""
        if (known := self._tokens.get(document)) is not None:
            return known
        url = self.servers[self._order(Counter())[0]].url
        answer = await self._client.post(f"{url}/tokenize", json=asked, headers=headers)
        tokens = tuple(answer.raise_for_status().json()["tokens"])
        return self._tokens.setdefault(document, tokens) if document else tokens

    async def _hits(self, chunks: Sequence[_Tokens]) -> Counter[int]:
        hits, asked = Counter[int](), [{"model_name": _MODEL, "token_ids": one} for one in chunks]
        found = await asyncio.gather(*(self._index.post("/query", json=one) for one in asked))
        for chunk, answer in zip(chunks, found, strict=True):
            scores = answer.raise_for_status().json()["scores"]
            hits.update({int(number): max(ranks.values()) for number, ranks in scores.items()})
            # What no server has yet, one may have been sent just now.
            if not scores and (number := self._sent.get(chunk)) is not None:
                hits[number] += len(chunk)
        return hits

    def _order(self, hits: Counter[int]) -> list[int]:
        servers, first = self.servers, next(self._asked)
        up = [number for number, one in enumerate(servers) if one.up] or [*range(len(servers))]
        up.sort(key=lambda number: (number - first) % len(servers))
        # One that has half as much again to do as the others is taken for what others lack.
        most = 2 + 1.5 * sum(servers[number].in_flight for number in up) / len(up)
        if self.indexed:
            load = [(one.in_flight, one.missed) for one in servers]
            up.sort(key=lambda n: (load[n][0] > most, -hits[n], *load[n]))
        return up

    @asynccontextmanager
    async def _watching(self, _: Starlette) -> AsyncIterator[None]:
        # Each request gets a connection of its own: one that was kept may be a dead server's.
        limits, wait = httpx.Limits(max_keepalive_connections=0), httpx.Timeout(None, connect=5)
        async with (
            httpx.AsyncClient(timeout=wait, limits=limits) as self._client,
            httpx.AsyncClient(base_url=self.indexer, timeout=2) as self._index,
        ):
            watching = asyncio.ensure_future(self._watch())
            yield
            watching.cancel()

    async def _watch(self) -> None:
        seen = list[bool]()
        while True:
            await asyncio.gather(*map(self._look_at, self.servers))
            self.indexed = await self._register()
            seen, before = [self.indexed, *(server.up for server in self.servers)], seen
            if seen != before:
                _LOG.warning("indexer up: %s, servers up: %s", seen[0], seen[1:])
            if len(self._tokens) > 4096:  # documents
                self._tokens.clear()
            await asyncio.sleep(1)

    async def _look_at(self, server: RoutedServer) -> None:
        server.missed *= 0.9
        try:
            server.up = (await self._client.get(f"{server.url}/health", timeout=2)).is_success
        except httpx.HTTPError as problem:
            server.up = server.up and isinstance(problem, httpx.ReadTimeout)  # It may be busy.

    async def _register(self) -> bool:
        """Have the indexer listen to servers that are up, and forget the others; if it answers."""
        with suppress(httpx.HTTPError, ValueError):
            workers = (await self._index.get("/workers")).raise_for_status().json()
            known = {one["instance_id"] for one in workers if one["model_name"] == _MODEL}
            for number, server in enumerate(self.servers):
                asked = {"instance_id": number, "model_name": _MODEL, "block_size": BLOCK_SIZE}
                asked |= {"endpoint": server.events, "replay_endpoint": server.replay}
                if server.up is not (number in known):
                    await self._index.post("/register" if server.up else "/unregister", json=asked)
            return True
        return False
