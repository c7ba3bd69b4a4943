"""An ASGI middleware for vLLM's server, which puts documents in requests between marks.

vLLM takes it with ``--middleware`` (vllm/entrypoints/serve/middleware/register.py of 0.32.0), so
that no code of vLLM is changed: what it does not know of messages is text when it sees them.
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picbench.engines.vllm.marks import DocumentMarks
from picbench.engines.vllm.parts import PartReader, read_kinds
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

#: The ends of the paths whose bodies have messages, and whether errors have Anthropic's form.
_PATHS = {"/v1/chat/completions": False, "/v1/responses": False, "/v1/messages": True}


class DocumentParts:
    """Rewrites the bodies of requests with messages, as the engine's settings say."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a document that cannot be marked gets 400 and a reason."""
        path = next((end for end in _PATHS if scope.get("path", "").endswith(end)), None)
        reader = _reader(scope) if path and scope.get("method") == "POST" else None
        if path is None or reader is None:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return
        try:
            changed = _rewritten(body, reader)
        except ConfigError as error:
            await refusal(str(error), anthropic=_PATHS[path])(scope, receive, send)
            return
        length = str(len(changed)).encode()
        others = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": changed, "more_body": False}

        headers = [*others, (b"content-length", length)]
        await self._app({**scope, "headers": headers}, replay, send)


def _reader(scope: Scope) -> PartReader | None:
    config = scope["app"].state.vllm_config
    settings = PicSettings.given(config.additional_config)
    marks = DocumentMarks.of(settings and settings.marks)
    if settings is None or marks is None:
        return None
    return PartReader(marks, read_kinds(settings.parts))


async def _whole(receive: Receive) -> bytes | None:
    """A request's body; None if its client left before the end."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _rewritten(body: bytes, reader: PartReader) -> bytes:
    """The body between whose documents marks stand; what is no JSON object is left to vLLM."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(given, dict):
        return body
    changed = reader.rewrite(given)
    return body if changed == given else json.dumps(changed).encode()


def refusal(reason: str, status: int = 400, *, anthropic: bool = False) -> JSONResponse:
    """An error as vLLM's servers answer it."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    error: dict[str, Any] = {"message": reason, "type": kind, "code": status}
    content = (
        {"type": "error", "error": error} if anthropic else {"error": {**error, "param": None}}
    )
    return JSONResponse(content, status_code=status)
