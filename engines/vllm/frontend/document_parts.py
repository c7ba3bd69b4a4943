"""An ASGI middleware for vLLM's server, which puts documents in requests between marks.

vLLM takes it with ``--middleware`` (vllm/entrypoints/serve/middleware/register.py of 0.32.0), so
that no code of vLLM is changed: what it does not know of messages is text when it sees them.
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
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
        # Known when the first request comes: the server makes this before its engine.
        self._reader: PartReader | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a document that cannot be marked gets 400 and a reason."""
        path = next((end for end in _PATHS if scope.get("path", "").endswith(end)), None)
        asked = path if scope.get("method") == "POST" else None
        self._reader = self._reader or (_reader(scope) if asked else None)
        if asked is None or self._reader is None:
            await self._app(scope, receive, send)
            return
        try:
            changed = _rewritten(await Request(scope, receive).body(), self._reader)
        except ClientDisconnect:
            return
        except ConfigError as error:
            await refusal(str(error), anthropic=_PATHS[asked])(scope, receive, send)
            return
        MutableHeaders(scope=scope)["content-length"] = str(len(changed))
        whole = iter([{"type": "http.request", "body": changed}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        await self._app(scope, replay, send)


def _reader(scope: Scope) -> PartReader | None:
    settings = PicSettings.given(scope["app"].state.vllm_config.additional_config)
    marks = DocumentMarks.of(settings and settings.marks)
    return PartReader(marks, read_kinds(settings.parts)) if settings and marks else None


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
