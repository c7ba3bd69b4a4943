"""One streamed completion over HTTP, and its times."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from picbench.engines import algorithms
from picbench.engines.request import Request
from picbench.errors import ConfigError, EngineError
from picbench.run.server_metrics import ServerMeter
from picbench.store.records import Failure, GroupResult, ServedReply
from picbench.workloads.prompts.tokens import Tokenizer, start_tokens

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


#: Seconds that a server has for a whole reply.
TIMEOUT = 600.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FORM = (
    "write NAME=http://host:port/v1, or NAME=http://host:port/v1,model=ID,timeout=SECONDS,"
    "simulated=yes"
)

_OPTIONS = ("model", "timeout", "simulated")
_ANSWERS = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server: `url` has no credentials and ends before ``/completions``.

    `model` is its name of the model, None for the only one that it serves; `timeout` is in seconds.
    A `simulated` server computes nothing: its times are those of a model of an engine.
    """

    url: str
    model: str | None = None
    timeout: float = TIMEOUT
    simulated: bool = False

    @property
    def spec(self) -> str:
        """What tells this endpoint from others, on one line."""
        parts = (self.url, self.model or "", "simulated" if self.simulated else "")
        return " ".join(filter(None, parts))


def parse_endpoints(values: Iterable[str], taken: Collection[str]) -> dict[str, Endpoint]:
    """Servers by the names of their arms, from values of `arm`.

    Names that are `taken`, or are those of algorithms, would be mistaken for engines of picbench.
    Raises ConfigError for what is no ``NAME=URL``.
    """
    found: dict[str, Endpoint] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError("`arm`: needs a name and the address of a server", hint=_FORM)
        if name in found or name in taken or name in algorithms.names():
            raise ConfigError(
                f"`arm` {name}: the name is that of another arm or of an algorithm",
                hint="choose another name",
            )
        url, *options = rest.split(",")
        found[name] = _endpoint(name, url, options)
    return found


def _endpoint(name: str, url: str, options: Iterable[str]) -> Endpoint:
    settings: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS or not value or key in settings:
            raise ConfigError(f"`arm` {name}: {option!r} is no option of a server", hint=_FORM)
        settings[key] = value
    return Endpoint(
        _checked_url(name, url),
        settings.get("model"),
        _seconds(name, settings.get("timeout")),
        _answer(name, settings.get("simulated", "no")),
    )


def _checked_url(name: str, url: str) -> str:
    """The address without a slash at its end; nothing in it may be a secret."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"`arm` {name}: the address is not one of HTTP", hint=_FORM)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"`arm` {name}: the address has more than host, port and path",
            hint="put the key into the environment, as OPENAI_API_KEY",
        )
    return url.rstrip("/")


def _answer(name: str, value: str) -> bool:
    if value not in _ANSWERS:
        raise ConfigError(f"`arm` {name}: simulated is yes or no, not {value!r}", hint=_FORM)
    return _ANSWERS[value]


def _seconds(name: str, value: str | None) -> float:
    if value is None:
        return TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"`arm` {name}: timeout {value!r} is no number of seconds", hint=_FORM)
    return seconds


class PromptText:
    """Turns token ids into the text that has these very ids; `load` gives the model's tokenizer."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    def __call__(self, tokens: Sequence[int]) -> str | None:
        """The text that a server tokenizes to `tokens`, None where there is none.

        Servers put a tokenizer's BOS before a text themselves.
        """
        start = start_tokens(self._tokenizer)
        given = tuple(tokens)
        text = str(self._tokenizer.decode(list(given[len(start) :])))
        found = self._tokenizer(text, add_special_tokens=True)["input_ids"]
        return text if tuple(found) == given else None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()


#: The environment variable with the key that servers are sent, if there is one.
KEY = "OPENAI_API_KEY"

#: Seconds that a server has to say what it serves.
_QUICK = 10.0

#: Seconds that an idle connection is kept: fewer than the five after which uvicorn closes it, or a
#: request could be sent into a connection that is just being closed.
_IDLE = 2.0

#: What servers answer to a prompt of token ids that take texts alone.
_REFUSALS = (400, 415, 422)

_START = "start it, or correct the address"


class RemoteServer:
    """Sends an arm's requests to a server elsewhere, from this process.

    Token ids are sent. A server that refuses them gets the text that `text_of` finds to have the
    same ids. Proxies and password files of the environment are not used: a proxy would be
    part of what is measured.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, text_of: Callable[[Sequence[int]], str | None]
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._text_of = text_of
        self._model = endpoint.model
        self._takes_ids = True
        key = os.environ.get(KEY)
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            base_url=f"{endpoint.url}/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(endpoint.timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE),
            trust_env=False,
        )
        self._meter = ServerMeter(self._client, _beside(endpoint, "metrics"))

    def ready(self) -> Mapping[str, object]:
        """What the server says of itself; ConfigError unless it is there and serves the model."""
        return self._runner.run(self._describe())

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time, or each request at its arrival (seconds).

        A request that fails is a Failure, and the others go on.
        """
        return self._runner.run(self._serve(requests, concurrency, arrivals))

    def reset(self) -> NoReturn:
        """Refuse: nothing in OpenAI's protocol drops a cache."""
        raise EngineError(f"arm {self._name}: the cache of a server elsewhere cannot be dropped")

    def call(self, function: Callable[[Any], Any]) -> NoReturn:
        """Refuse: the engine is in no process of this machine that picbench started."""
        raise EngineError(f"arm {self._name}: a server elsewhere cannot be looked into")

    def close(self) -> None:
        """Close the connections; the server stays as it is."""
        if not self._client.is_closed:
            self._runner.run(self._client.aclose())
        self._runner.close()

    def kill(self) -> None:
        """As `close`, also for requests that are under way."""
        self.close()

    async def _describe(self) -> Mapping[str, object]:
        where = f"`arm` {self._name}: {self._endpoint.url}"
        try:
            response = await self._client.get("models", timeout=_QUICK)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"{where} cannot be reached: {_reason(error)}", hint=_START
            ) from error
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{where} refuses access: HTTP {response.status_code}",
                hint=f"put its key into the environment, as {KEY}",
            )
        served = _models(response)
        if self._model is None and len(served) == 1:
            self._model = served[0]
        if self._model is None or (served and self._model not in served):
            raise ConfigError(
                f"{where} serves no model {self._model}"
                if self._model
                else f"{where} does not say which model it serves",
                hint=f"add model=ID; it lists {', '.join(served) or 'none'}",
            )
        return {
            "url": self._endpoint.url,
            "model": self._model,
            "server": response.headers.get("server"),
            "version": await self._version(),
            "metrics": await self._meter.look(),
            "provenance": "simulated" if self._endpoint.simulated else "measured",
        }

    async def _version(self) -> str | None:
        """The version of a server that tells it, as vLLM's does."""
        with suppress(httpx.HTTPError, ValueError):
            response = await self._client.get(_beside(self._endpoint, "version"), timeout=_QUICK)
            found = response.json() if response.status_code == httpx.codes.OK else None
            if isinstance(found, dict) and isinstance(found.get("version"), str):
                return str(found["version"])
        return None

    async def _serve(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None,
    ) -> GroupResult:
        async with self._meter.counting() as meter:
            started = time.perf_counter()
            if arrivals is None:
                gate = asyncio.Semaphore(concurrency or len(requests))
                waiting = [self._when_free(request, gate) for request in requests]
            else:
                times = zip(requests, arrivals, strict=True)
                waiting = [self._at(request, started + due) for request, due in times]
            outcomes = await asyncio.gather(*waiting)
            busy = time.perf_counter() - started
        return GroupResult(tuple(outcomes), busy, counted=meter.counts)

    async def _when_free(self, request: Request, gate: asyncio.Semaphore) -> ServedReply | Failure:
        async with gate:
            return await self._answer(request, time.perf_counter())

    async def _at(self, request: Request, due: float) -> ServedReply | Failure:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await self._answer(request, due)

    async def _answer(self, request: Request, arrived: float) -> ServedReply | Failure:
        try:
            async with asyncio.timeout(self._endpoint.timeout):
                return await self._complete(request, arrived)
        except TimeoutError:
            return Failure(f"no whole reply within {self._endpoint.timeout:g} s")
        except httpx.HTTPError as error:
            return Failure(f"{self._endpoint.url}: {_reason(error)}")
        except BadReply as error:
            return Failure(str(error))

    async def _complete(self, request: Request, arrived: float) -> ServedReply:
        tokens = [token for segment in request.segments for token in segment.tokens or ()]
        if self._takes_ids:
            try:
                body = self._body(tokens, request.max_tokens)
                return await stream_completion(self._client, body, len(tokens), arrived)
            except BadReply as error:
                if error.status not in _REFUSALS:
                    raise
                refused = error
        text = self._text_of(tokens)
        if text is None:
            raise BadReply(
                "the server takes no token ids, and no text has the prompt's ids"
                + (f": {refused}" if self._takes_ids else "")
            )
        reply = await stream_completion(
            self._client, self._body(text, request.max_tokens), len(tokens), arrived
        )
        self._takes_ids = False
        return reply

    def _body(self, prompt: Sequence[int] | str, max_tokens: int | None) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _models(response: httpx.Response) -> list[str]:
    """The names of the models that a server lists; none where it lists nothing."""
    with suppress(ValueError, KeyError, TypeError):
        if response.status_code == httpx.codes.OK:
            return [str(model["id"]) for model in response.json()["data"]]
    return []


def _beside(endpoint: Endpoint, name: str) -> str:
    """The address of what a server has outside of OpenAI's protocol."""
    return f"{endpoint.url.removesuffix('/v1')}/{name}"


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
