"""Arms that are OpenAI-compatible servers: their addresses, replies and own counters."""

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import isfinite
from typing import Annotated, Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import httpx
import pydantic
from httpx_sse import EventSource, SSEError
from prometheus_client.parser import text_string_to_metric_families

from picbench.engines import algorithms
from picbench.engines.request import Request
from picbench.engines.vllm.frontend.request_args import flat_args
from picbench.errors import ConfigError, EngineError
from picbench.files import reading
from picbench.run.server import Arrivals
from picbench.store.records import Failure, GroupResult, ServedReply, ServerCounts
from picbench.workloads.prompts.tokens import Tokenizer, start_tokens

#: The environment variable with the key that servers are sent, if there is one.
KEY = "OPENAI_API_KEY"

#: Seconds that a server has to say what it serves.
_QUICK = 10.0

#: The gauge among the metrics, a share from 0 to 1; the others count.
_USAGE = "peak_kv_usage"

#: Metrics by the field of `ServerCounts`: vLLM's, those of older vLLM, SGLang's.
_METRICS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "cached_tokens": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
    "queried_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "hit_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "external_hit_tokens": ("vllm:external_prefix_cache_hits",),
    "preemptions": ("vllm:num_preemptions",),
    _USAGE: ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}


def parse_metrics(text: str) -> dict[str, float]:
    """Read what Prometheus' format tells of the fields of `ServerCounts`.

    Counters are sums over a server's engines, its KV usage is the largest. A value that is no
    number, as a gauge may be that was never set, tells nothing. Raises ValueError for other text.
    """
    known = "|".join(chain.from_iterable(_METRICS.values()))
    # Servers have hundreds of other lines, left unread, and may leave out the suffix of counters.
    lines = re.findall(rf"^(?:{known})(?:_total)?[{{ ].*", text, re.MULTILINE)
    found: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if isfinite(sample.value):
                found[sample.name.removesuffix("_total")].append(sample.value)
    told = {}
    for field, names in _METRICS.items():
        if name := next((name for name in names if name in found), None):
            told[field] = max(found[name]) if field == _USAGE else sum(found[name])
    return told


def _counted(scrapes: Sequence[Mapping[str, float] | None]) -> ServerCounts | None:
    """What was counted from the first scrape to the last; None where one of them failed.

    A counter that is not there before it first counts begins at zero, as all of them may in a
    server that has served nothing. A restart sets them back.
    """
    before, after = scrapes[0], scrapes[-1]
    if before is None or not after:
        return None
    grown = {n: round(now - before.get(n, 0)) for n, now in after.items() if n != _USAGE}
    if any(count < 0 for count in grown.values()):
        return None
    usage = max((each[_USAGE] for each in scrapes if each and _USAGE in each), default=None)
    return ServerCounts(peak_kv_usage=usage, **grown)


class ReplyError(Exception):
    """A server's answer is not a completion; `status` is HTTP's. Long messages are cut."""

    def __init__(self, message: str, status: int = 200) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 300 else f"{line[:300]}...")
        self.status = status


def _first(*names: str) -> pydantic.AliasChoices:
    """Any of these fields, of a part or of the delta of a server that streams chats."""
    return pydantic.AliasChoices(*names, *(pydantic.AliasPath("delta", name) for name in names))


class _Choice(pydantic.BaseModel):
    text: str | None = pydantic.Field(None, validation_alias=_first("text", "content"))
    reasoning: str | None = pydantic.Field(
        None, validation_alias=_first("reasoning", "reasoning_content")
    )
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether a token came with the frame, be it white space or reasoning."""
        listed = map((self.logprobs or {}).get, ("tokens", "content"))
        return any((self.text, self.reasoning, self.token_ids, *listed))


class _Usage(pydantic.BaseModel):
    prompt_tokens: pydantic.NonNegativeInt
    completion_tokens: pydantic.NonNegativeInt = 0
    cached_tokens: pydantic.NonNegativeInt | None = pydantic.Field(
        None, validation_alias=pydantic.AliasPath("prompt_tokens_details", "cached_tokens")
    )


class _CompletionEvent(pydantic.BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


async def stream_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], prompt_tokens: int, arrived: float
) -> ServedReply:
    """Send a completion that `arrived` at that time of `time.perf_counter`; read its whole reply.

    Its times are those of frames with a token. Raises ReplyError for what is no reply to
    `prompt_tokens` tokens, httpx.HTTPError if the connection fails.
    """
    sent = time.perf_counter()
    frames: list[tuple[float, _Choice]] = []
    usage = None
    async with client.stream("POST", "completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            said = (await response.aread()).decode(errors="replace")
            raise ReplyError(f"HTTP {response.status_code}: {said}", response.status_code)
        # Read to the end, for a connection that is left before is not used again.
        async for streamed in EventSource(response).aiter_sse():
            if streamed.data == "[DONE]":
                continue
            try:
                event = _CompletionEvent.model_validate_json(streamed.data)
            except pydantic.ValidationError as error:
                what = f"the server streams what is no completion: {streamed.data}"
                raise ReplyError(what) from error
            if event.error is not None:
                raise ReplyError(f"the server ended the reply: {event.error}")
            usage = event.usage or usage
            frames += [(time.perf_counter(), choice) for choice in event.choices]
    end = next((c.finish_reason for _, c in reversed(frames) if c.finish_reason), None)
    if end is None:
        raise ReplyError("the reply has no end: the stream stopped before a finish reason")
    if usage is None:
        raise ReplyError("the server sends no usage, as stream_options.include_usage asks for")
    if usage.prompt_tokens != prompt_tokens:
        counted = f"the server counted {usage.prompt_tokens} prompt tokens"
        raise ReplyError(f"{counted} where {prompt_tokens} were sent: it is not the same prompt")
    if (cached := usage.cached_tokens or 0) > prompt_tokens:
        raise ReplyError(f"the server found {cached} of {prompt_tokens} prompt tokens in its cache")
    text = "".join(choice.text or "" for _, choice in frames)
    if text and not usage.completion_tokens:
        raise ReplyError("the server counted no token in a reply that has text")
    first, last, tpot = _time(frames, usage.completion_tokens)
    return ServedReply(
        text=text,
        output_tokens=usage.completion_tokens,
        ttft=first - arrived,
        tpot=tpot,
        e2e=last - arrived,
        late=max(0.0, sent - arrived),
        cached_tokens=usage.cached_tokens,
        finish_reason=end,
    )


def _time(
    frames: Sequence[tuple[float, _Choice]], tokens: int
) -> tuple[float, float, float | None]:
    """When the first and the last token of a reply came, and the mean gap between its tokens.

    There is no gap in a reply that came in one frame. The token that ends a reply has no text: if
    there is a token more than frames with one, the last frame is not waited for. A reply that is
    nothing but such a token came with its last frame.
    """
    (end, last), times = frames[-1], [at for at, choice in frames if choice.has_token]
    silent = last.finish_reason == "stop" and not last.has_token and len(times) == tokens - 1
    gaps = tokens - silent - 1
    if len(times) < 2 or gaps < 1:
        return (times or [end])[0], (times or [end])[-1], None
    return times[0], times[-1], (times[-1] - times[0]) / gaps


def _check_address(url: str) -> str:
    """The address without a slash at its end; nothing in it may be a secret."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"has more than host, port and path; put a key into the environment, as {KEY}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("is no address of HTTP")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server: `url` has no credentials and ends before ``/completions``.

    `model` is its name of the model, None for the only one that it serves; `timeout` is in seconds.
    With `algo`, requests name their chunks and this algorithm, as picbench's server takes them;
    without, they are plain. A `simulated` server computes nothing: its times are a model's.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")

    url: Annotated[str, pydantic.AfterValidator(_check_address)]
    model: Annotated[str, pydantic.Field(min_length=1)] | None = None
    timeout: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 600.0
    simulated: Annotated[bool, pydantic.BeforeValidator({"yes": True, "no": False}.get)] = False
    algo: (
        Annotated[str, pydantic.AfterValidator(lambda spec: algorithms.parse(spec).spec)] | None
    ) = None

    @property
    def spec(self) -> str:
        """What tells this endpoint from others, on one line."""
        parts = (self.url, self.model, self.algo, "simulated" if self.simulated else None)
        return " ".join(filter(None, parts))


def parse_endpoints(values: Iterable[str], taken: Collection[str]) -> dict[str, Endpoint]:
    """Servers by the names of their arms, from values of `arm`.

    Names that are `taken`, or are those of algorithms, would be mistaken for engines of picbench.
    Raises ConfigError for what is no ``NAME=URL``.
    """
    form = "write NAME=http://host:port/v1[,model=ID][,algo=SPEC][,timeout=SECONDS][,simulated=yes]"
    found: dict[str, Endpoint] = {}
    for value in values:
        name, _, rest = value.partition("=")
        if not rest or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ConfigError("`arm`: needs a name and the address of a server", hint=form)
        if name in found or name in taken or name in algorithms.names():
            raise ConfigError(
                f"`arm` {name}: the name is that of another arm or of an algorithm",
                hint="choose another name",
            )
        given = [part.partition("=")[::2] for part in f"url={rest}".split(",")]
        parts = dict(given)
        if len(parts) < len(given):
            raise ConfigError(f"`arm` {name}: an option is given twice", hint=form)
        with reading(f"`arm` {name}", wrong=form):
            found[name] = pydantic.TypeAdapter(Endpoint).validate_python(parts)
    return found


def find_text(tokens: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The text that a server tokenizes to `tokens`, None if no text has these ids.

    Servers put a tokenizer's BOS before a text themselves.
    """
    start = len(start_tokens(tokenizer))
    text = str(tokenizer.decode(list(tokens[start:])))
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    return text if list(ids) == list(tokens) else None


class RemoteServer:
    """Sends an arm's requests to a remote server, from this process.

    Token ids are sent. A server that refuses them gets the text that has the same ids under the
    tokenizer that `load` gives. Proxies and password files of the environment are not used: a proxy
    would be part of what is measured.
    """

    def __init__(self, name: str, endpoint: Endpoint, load: Callable[[], Tokenizer]) -> None:
        self._name, self._endpoint, self._model = name, endpoint, endpoint.model
        self._tokenizer = cache(load)
        self._takes_ids = self._has_metrics = True
        self._algorithm = algorithms.parse(endpoint.algo).served if endpoint.algo else None
        key = os.environ.get(KEY)
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            base_url=f"{endpoint.url}/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(endpoint.timeout),
            # Idle connections go before the five seconds after which uvicorn closes them, or a
            # request could be sent into one that is just being closed.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )

    def ready(self) -> Mapping[str, object]:
        """Describe the server. Raises ConfigError unless it is there and serves the model."""
        return self._runner.run(self._describe())

    def run(
        self, requests: Sequence[Request], concurrency: int | None, arrivals: Arrivals = None
    ) -> GroupResult:
        """See Server; a request that fails is a Failure, and the others continue."""
        due: Sequence[float | None] = arrivals or [None] * len(requests)
        return self._runner.run(self._serve(requests, due, concurrency or len(requests)))

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

    kill = close

    async def _describe(self) -> Mapping[str, object]:
        where = f"`arm` {self._name}: {self._endpoint.url}"
        try:
            response = await self._client.get("models", timeout=_QUICK)
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            hint = "start it, or correct the address"
            raise ConfigError(f"{where} cannot be reached: {said}", hint=hint) from error
        if response.status_code in (401, 403):
            hint = f"put its key into the environment, as {KEY}"
            raise ConfigError(f"{where} refuses access: HTTP {response.status_code}", hint=hint)
        served: dict[str, str | None] = {}  # And who made the server, as vLLM and SGLang say.
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            served = {str(one["id"]): one.get("owned_by") for one in response.json()["data"]}
        if self._model is None and len(served) == 1:
            [self._model] = served
        if self._model is None or (served and self._model not in served):
            lacks = f"serves no model {self._model}"
            raise ConfigError(
                f"{where} {lacks if self._model else 'does not say which model it serves'}",
                hint=f"add model=ID; it lists {', '.join(served) or 'none'}",
            )
        version = None
        shares: dict[str, int | None] = {"threads": None, "reserved_cores": None}
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            version = str((await self._beside("version")).json()["version"])
        with suppress(httpx.HTTPError):  # Of picbench's plug-in; others do not tell.
            page = (await self._beside("metrics")).text
            found = re.findall(r"^picbench:(threads|reserved_cores)(?:{.*})? (\d+)", page, re.M)
            shares |= {name: int(share) for name, share in found}
        self._has_metrics = await self._scrape() is not None
        return {
            "url": self._endpoint.url,
            "model": self._model,
            "server": response.headers.get("server"),
            "version": version,
            "vllm": version if served.get(self._model, "vllm") in (None, "vllm") else None,
            **shares,
            "metrics": self._has_metrics,
            "provenance": "simulated" if self._endpoint.simulated else "measured",
        }

    async def _beside(self, name: str) -> httpx.Response:
        """What a server has outside of OpenAI's protocol, as vLLM does."""
        url = f"{self._endpoint.url.removesuffix('/v1')}/{name}"
        return (await self._client.get(url, timeout=_QUICK)).raise_for_status()

    async def _scrape(self) -> dict[str, float] | None:
        """None where the server does not answer with metrics: no request is to fail for it."""
        if self._has_metrics:
            with suppress(httpx.HTTPError, ValueError):
                return parse_metrics((await self._beside("metrics")).text)
        return None

    async def _serve(
        self, requests: Sequence[Request], due: Sequence[float | None], at_once: int
    ) -> GroupResult:
        gate = asyncio.Semaphore(at_once)
        scrapes = [await self._scrape()]

        async def serve(request: Request, after: float | None) -> ServedReply | Failure:
            if after is not None:
                await asyncio.sleep(max(0.0, started + after - time.perf_counter()))
                return await self._answer(request, started + after)
            async with gate:
                return await self._answer(request, time.perf_counter())

        async def watch() -> None:
            while True:
                await asyncio.sleep(1.0)
                scrapes.append(await self._scrape())

        watching = asyncio.create_task(watch())
        started = time.perf_counter()
        try:
            outcomes = await asyncio.gather(*map(serve, requests, due))
        finally:
            watching.cancel()
        busy = time.perf_counter() - started
        scrapes.append(await self._scrape())
        return GroupResult(tuple(outcomes), busy, counted=_counted(scrapes))

    async def _answer(self, request: Request, arrived: float) -> ServedReply | Failure:
        try:
            async with asyncio.timeout(self._endpoint.timeout):
                return await self._complete(request, arrived)
        except TimeoutError:
            return Failure(f"no whole reply within {self._endpoint.timeout:g} s")
        except httpx.HTTPError as error:
            return Failure(f"{self._endpoint.url}: {str(error) or type(error).__name__}")
        except (ReplyError, SSEError) as error:
            return Failure(str(error))

    async def _complete(self, request: Request, arrived: float) -> ServedReply:
        tokens = [token for segment in request.segments for token in segment.tokens or ()]
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._algorithm is not None:
            body["vllm_xargs"] = flat_args(request, self._algorithm)
        refused = "as before"
        if self._takes_ids:
            try:
                return await stream_completion(self._client, body, len(tokens), arrived)
            except ReplyError as error:
                if error.status not in (400, 415, 422):
                    raise
                refused = str(error)
        body["prompt"] = find_text(tokens, self._tokenizer())
        if body["prompt"] is None:
            what = "the server takes no token ids, and no text has the prompt's ids"
            raise ReplyError(f"{what}: {refused}")
        reply = await stream_completion(self._client, body, len(tokens), arrived)
        self._takes_ids = False
        return reply
