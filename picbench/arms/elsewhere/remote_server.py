"""An OpenAI-compatible server elsewhere, as the server of an arm."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import httpx

from picbench.arms.elsewhere.completion_stream import BadReply, stream_completion
from picbench.arms.elsewhere.endpoint import Endpoint
from picbench.arms.elsewhere.server_metrics import ServerMeter
from picbench.arms.messages import Failure, GroupResult, ServedReply
from picbench.engines.request import Request
from picbench.errors import ConfigError, EngineError

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
