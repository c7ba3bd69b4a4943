"""One streamed completion over HTTP, and its times."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from picbench.arms.messages import ServedReply

_DATA = b"data:"
_DONE = b"[DONE]"

#: Characters of a server's own error message that are kept.
_MESSAGE = 300


class BadReply(Exception):  # noqa: N818
    """A server's answer is not a completion; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class _Choice(BaseModel):
    text: str = ""
    finish_reason: str | None = None


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class CompletionEvent(BaseModel):
    """An event of the stream; other fields than these are not read."""

    model_config = ConfigDict(extra="ignore")

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class _Received:
    """What has come of a reply; times in seconds of `time.perf_counter`."""

    text: str = ""
    first: float | None = None
    last: float = 0.0
    finish_reason: str | None = None
    usage: _Usage | None = None

    def add(self, event: CompletionEvent) -> None:
        """Note an event that comes now."""
        if event.error is not None:
            raise BadReply(f"the server ended the reply: {_short(str(event.error))}")
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self.last = time.perf_counter()
            if self.first is None:
                self.first = self.last
            self.text += choice.text
            self.finish_reason = choice.finish_reason or self.finish_reason


async def stream_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], prompt_tokens: int, arrived: float
) -> ServedReply:
    """Send a completion and read its reply to the end.

    The request `arrived` at that time of `time.perf_counter`. Raises BadReply for an answer that is
    none, and for one to other than `prompt_tokens` tokens; httpx.HTTPError if the connection fails.
    """
    sent = time.perf_counter()
    received = _Received()
    async with client.stream("POST", "completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            message = _short((await response.aread()).decode(errors="replace"))
            raise BadReply(f"HTTP {response.status_code}: {message}", response.status_code)
        async for line in _lines(response):
            # Read to the end, for a connection that is left before is not used again.
            data = line.removeprefix(_DATA).strip()
            if line.startswith(_DATA) and data != _DONE:
                received.add(_event(data))
    return _reply(received, prompt_tokens, sent, arrived)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream, as events have them: they end with LF or CR LF.

    httpx also ends lines at characters that a text may have, such as U+2028.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _event(data: bytes) -> CompletionEvent:
    try:
        return CompletionEvent.model_validate_json(data)
    except ValidationError as error:
        text = _short(data.decode(errors="replace"))
        raise BadReply(f"the server streams what is no completion: {text}") from error


def _reply(received: _Received, prompt_tokens: int, sent: float, arrived: float) -> ServedReply:
    usage = received.usage
    if received.first is None or received.finish_reason is None:
        raise BadReply("the reply has no end: the stream stopped before a finish reason")
    if usage is None:
        raise BadReply("the server sends no usage, as stream_options.include_usage asks for")
    if usage.prompt_tokens != prompt_tokens:
        raise BadReply(
            f"the server counted {usage.prompt_tokens} prompt tokens where {prompt_tokens} were "
            "sent: it is not the same prompt"
        )
    gaps = usage.completion_tokens - 1
    details = usage.prompt_tokens_details
    return ServedReply(
        text=received.text,
        output_tokens=usage.completion_tokens,
        ttft=received.first - arrived,
        tpot=(received.last - received.first) / gaps if gaps > 0 else None,
        e2e=received.last - arrived,
        late=max(0.0, sent - arrived),
        cached_tokens=None if details is None else details.cached_tokens,
        finish_reason=received.finish_reason,
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}..."
