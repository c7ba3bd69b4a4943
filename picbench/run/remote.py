"""What a server tells in Prometheus' format: its cache, its KV memory, its preemptions."""

import asyncio
import os
import re
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from types import MappingProxyType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
from httpx_sse import EventSource, SSEError
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ValidationError

from picbench.engines import algorithms
from picbench.engines.request import Request
from picbench.errors import ConfigError, EngineError
from picbench.store.records import Failure, GroupResult, ServedReply, ServerCounts
from picbench.workloads.prompts.tokens import Tokenizer, start_tokens

#: Seconds between looks at how much of a server's KV memory is in use.
INTERVAL = 1.0


#: Counters by the field of `ServerCounts`: vLLM's, those of older vLLM, SGLang's.
COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
        "cached_tokens": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
        "queried_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "hit_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "external_hit_tokens": ("vllm:external_prefix_cache_hits",),
        "preemptions": ("vllm:num_preemptions",),
    }
)

#: Gauges of the share of the KV memory that is in use, from 0 to 1.
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")

_NAMES = frozenset(name for names in (*COUNTERS.values(), USAGE) for name in names)

#: Prometheus' suffix of counters, which clients may leave out.
_TOTAL = "_total"


@dataclass(frozen=True, slots=True)
class Scrape:
    """A server's counters at a moment, by the field of `ServerCounts`; sums over its engines.

    `usage` is the largest share of KV memory that one of its engines has in use. What the server
    does not tell is missing, or None.
    """

    counters: Mapping[str, float]
    usage: float | None

    @property
    def empty(self) -> bool:
        """Whether nothing in it is known here."""
        return not self.counters and self.usage is None


def parse_metrics(text: str) -> Scrape:
    """Read Prometheus' text format. Raises ValueError for anything else."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text.splitlines()):
        found.setdefault(name, []).append(value)
    counters = {}
    for counter, names in COUNTERS.items():
        values = next((found[name] for name in names if name in found), None)
        if values is not None:
            counters[counter] = sum(values)
    usage = next((max(found[name]) for name in USAGE if name in found), None)
    return Scrape(counters, usage)


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Names without the suffix, and values. Servers have hundreds of other lines, left unread.

    A value that is no number, as a gauge may be that was never set, tells nothing.
    """
    known = [line for line in lines if line.partition("{")[0].split(" ")[0] in _WRITTEN]
    for family in text_string_to_metric_families("\n".join(known) + "\n"):
        for sample in family.samples:
            if isfinite(sample.value):
                yield sample.name.removesuffix(_TOTAL), sample.value


_WRITTEN = frozenset(form for name in _NAMES for form in (name, name + _TOTAL))


@dataclass(slots=True)
class Counted:
    """What a server counted in a stretch of time; `counts` is None while that is not known."""

    counts: ServerCounts | None = None


@dataclass(slots=True)
class ServerMeter:
    """Reads a server's metrics over `client` at `url`; a server without any is not asked again."""

    client: httpx.AsyncClient
    url: str
    found: bool = field(default=False, init=False)

    async def look(self) -> bool:
        """Whether the server has metrics that are known here."""
        scrape = await self._scrape()
        self.found = scrape is not None and not scrape.empty
        return self.found

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[Counted]:
        """Count what happens in the block, and see how full the KV memory gets meanwhile."""
        counted = Counted()
        if not self.found:
            yield counted
            return
        before = await self._scrape()
        seen: list[float] = []
        watching = asyncio.create_task(self._watch(seen))
        try:
            yield counted
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        after = await self._scrape()
        if before is not None and after is not None:
            seen += [scrape.usage for scrape in (before, after) if scrape.usage is not None]
            counted.counts = _difference(before, after, max(seen, default=None))

    async def _watch(self, seen: list[float]) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            scrape = await self._scrape()
            if scrape is not None and scrape.usage is not None:
                seen.append(scrape.usage)

    async def _scrape(self) -> Scrape | None:
        """None where the server does not answer with metrics: requests are not to fail for it."""
        with suppress(httpx.HTTPError, ValueError):
            response = await self.client.get(self.url, timeout=_QUICK)
            if response.status_code == httpx.codes.OK:
                return parse_metrics(response.text)
        return None


def _difference(before: Scrape, after: Scrape, usage: float | None) -> ServerCounts | None:
    """What was counted in between; None after a restart, which sets all counters back."""
    # A counter with labels is not there before it first counts.
    earlier = before.counters
    counts = {name: round(now - earlier.get(name, 0)) for name, now in after.counters.items()}
    if any(count < 0 for count in counts.values()):
        return None
    return ServerCounts(peak_kv_usage=usage, **counts)


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

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


async def stream_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], prompt_tokens: int, arrived: float
) -> ServedReply:
    """Send a completion and read its reply to the end.

    The request `arrived` at that time of `time.perf_counter`. Raises BadReply for an answer that is
    none, and for one to other than `prompt_tokens` tokens; httpx.HTTPError if the connection fails.
    """
    sent = time.perf_counter()
    times: list[float] = []
    choices: list[_Choice] = []
    usage = None
    async with client.stream("POST", "completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            message = _short((await response.aread()).decode(errors="replace"))
            raise BadReply(f"HTTP {response.status_code}: {message}", response.status_code)
        # Read to the end, for a connection that is left before is not used again.
        async for sent_event in EventSource(response).aiter_sse():
            if sent_event.data == "[DONE]":
                continue
            event = _event(sent_event.data)
            usage = event.usage or usage
            for choice in event.choices:
                times.append(time.perf_counter())
                choices.append(choice)
    end = next((c.finish_reason for c in reversed(choices) if c.finish_reason), None)
    if end is None:
        raise BadReply("the reply has no end: the stream stopped before a finish reason")
    checked = _checked_usage(usage, prompt_tokens)
    gaps, details = checked.completion_tokens - 1, checked.prompt_tokens_details
    return ServedReply(
        text="".join(choice.text for choice in choices),
        output_tokens=checked.completion_tokens,
        ttft=times[0] - arrived,
        tpot=(times[-1] - times[0]) / gaps if gaps > 0 else None,
        e2e=times[-1] - arrived,
        late=max(0.0, sent - arrived),
        cached_tokens=None if details is None else details.cached_tokens,
        finish_reason=end,
    )


def _event(data: str) -> CompletionEvent:
    try:
        event = CompletionEvent.model_validate_json(data)
    except ValidationError as error:
        raise BadReply(f"the server streams what is no completion: {_short(data)}") from error
    if event.error is not None:
        raise BadReply(f"the server ended the reply: {_short(str(event.error))}")
    return event


def _checked_usage(usage: _Usage | None, prompt_tokens: int) -> _Usage:
    if usage is None:
        raise BadReply("the server sends no usage, as stream_options.include_usage asks for")
    if usage.prompt_tokens != prompt_tokens:
        raise BadReply(
            f"the server counted {usage.prompt_tokens} prompt tokens where {prompt_tokens} were "
            "sent: it is not the same prompt"
        )
    return usage


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
        if key not in ("model", "timeout", "simulated") or not value or key in settings:
            raise ConfigError(f"`arm` {name}: {option!r} is no option of a server", hint=_FORM)
        settings[key] = value
    timeout, simulated = settings.get("timeout", str(TIMEOUT)), settings.get("simulated", "no")
    if simulated not in ("yes", "no"):
        raise ConfigError(f"`arm` {name}: simulated is yes or no, not {simulated!r}", hint=_FORM)
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(timeout)
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"`arm` {name}: timeout {timeout!r} is no number of seconds", hint=_FORM)
    return Endpoint(_checked_url(name, url), settings.get("model"), seconds, simulated == "yes")


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


class PromptText:
    """Turns token ids into the text that has these very ids; `load` gives the model's tokenizer."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    def __call__(self, tokens: Sequence[int]) -> str | None:
        """The text that a server tokenizes to `tokens`, None if no text has these.

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
    """Sends an arm's requests to a remote server, from this process.

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
        """Describe the server. Raises ConfigError unless it is there and serves the model."""
        return self._runner.run(self._describe())

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time, or each request at its arrival (seconds).

        A request that fails is a Failure; the others continue.
        """
        return self._runner.run(self._serve(requests, concurrency, arrivals))

    def reset(self) -> NoReturn:
        """Refuse: nothing in OpenAI's protocol drops a cache."""
        raise EngineError(f"arm {self._name}: the cache of a remote server cannot be dropped")

    def call(self, function: Callable[[Any], Any]) -> NoReturn:
        """Refuse: the engine is in no process of this machine that picbench started."""
        raise EngineError(f"arm {self._name}: a remote server cannot be looked into")

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
            gate = asyncio.Semaphore(concurrency or len(requests))

            async def serve(request: Request, after: float | None) -> ServedReply | Failure:
                if after is not None:
                    arrives = started + after
                    await asyncio.sleep(max(0.0, arrives - time.perf_counter()))
                    return await self._answer(request, arrives)
                async with gate:
                    return await self._answer(request, time.perf_counter())

            due: Sequence[float | None] = arrivals or [None] * len(requests)
            outcomes = await asyncio.gather(*map(serve, requests, due))
            busy = time.perf_counter() - started
        return GroupResult(tuple(outcomes), busy, counted=meter.counts)

    async def _answer(self, request: Request, arrived: float) -> ServedReply | Failure:
        try:
            async with asyncio.timeout(self._endpoint.timeout):
                return await self._complete(request, arrived)
        except TimeoutError:
            return Failure(f"no whole reply within {self._endpoint.timeout:g} s")
        except httpx.HTTPError as error:
            return Failure(f"{self._endpoint.url}: {_reason(error)}")
        except (BadReply, SSEError) as error:
            return Failure(str(error))

    async def _complete(self, request: Request, arrived: float) -> ServedReply:
        tokens = [token for segment in request.segments for token in segment.tokens or ()]
        refused: BadReply | None = None
        if self._takes_ids:
            try:
                return await self._stream(tokens, request.max_tokens, len(tokens), arrived)
            except BadReply as error:
                if error.status not in _REFUSALS:
                    raise
                refused = error
        text = self._text_of(tokens)
        if text is None:
            raise BadReply(
                "the server takes no token ids, and no text has the prompt's ids"
                + (f": {refused}" if refused else "")
            )
        reply = await self._stream(text, request.max_tokens, len(tokens), arrived)
        self._takes_ids = False
        return reply

    async def _stream(
        self, prompt: Sequence[int] | str, most: int | None, tokens: int, arrived: float
    ) -> ServedReply:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": most,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await stream_completion(self._client, body, tokens, arrived)


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
