"""The middleware: bodies that it changes, those that it leaves, and what it refuses."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from picbench.engines.vllm.frontend.document_parts import DocumentParts

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
CHAT = PATHS[0]


async def echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    assert int(request.headers["content-length"]) == len(body)
    return PlainTextResponse(body)


def client(**pic: Any) -> httpx.AsyncClient:
    """A server behind the middleware that answers with the body that it gets."""
    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in PATHS])
    app.state.vllm_config = SimpleNamespace(additional_config={"pic": pic} if pic else {})
    app.add_middleware(DocumentParts)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def asked(text: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "document", "text": text}]}]}


async def answer(path: str, content: bytes, **pic: Any) -> httpx.Response:
    async with client(**pic) as server:
        return await server.post(path, content=content)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_with_messages_are_rewritten(path: str) -> None:
    sent = json.dumps(asked("A. ✓")).encode()
    got = asyncio.run(answer(path, sent, marks=["[[", "]]"]))
    if path == "/v1/completions":
        assert got.content == sent
    else:
        [message] = got.json()["messages"]
        assert message["content"] == [{"type": "text", "text": "[[A. ✓]]"}]


LEFT = {
    "no JSON": b"{",
    "no object": b"[1]",
    "no UTF-8": b"\xff",
    "nested too deeply": b'{"messages": ' + b"[" * 100_000,
    "nothing": b"",
    "no documents": b'{ "messages": [{"role":"user","content":"q"}] }',
}


@pytest.mark.parametrize("sent", LEFT.values(), ids=LEFT)
def test_other_bodies_are_left_to_vllm(sent: bytes) -> None:
    got = asyncio.run(answer(CHAT, sent, marks=True))
    assert (got.status_code, got.content) == (200, sent)


@pytest.mark.parametrize("pic", [{}, {"algorithm": "mepic"}, {"marks": True, "parts": ["tools"]}])
def test_servers_that_ask_for_no_documents_get_bodies_as_they_are(pic: Any) -> None:
    sent = json.dumps(asked("A.")).encode()
    assert asyncio.run(answer(CHAT, sent, **pic)).content == sent


def test_documents_that_cannot_be_marked_get_400_in_the_form_of_the_api() -> None:
    sent = json.dumps(asked(7)).encode()
    for path in PATHS[:3]:
        got = asyncio.run(answer(path, sent, marks=True))
        assert got.status_code == 400
        error = got.json()["error"]
        assert error["message"].startswith("messages[0].content[0]: a document without text")
        assert (got.json().get("type") == "error") == (path == "/v1/messages")


def test_a_client_that_leaves_in_the_middle_is_not_served() -> None:
    served = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope)

    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        served.append(message)

    config = SimpleNamespace(additional_config={"pic": {"marks": True}})
    state = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": state}
    asyncio.run(DocumentParts(app)(scope, receive, send))
    assert served == []
