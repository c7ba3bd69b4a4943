"""Remote servers, over HTTP in the tests' process: addresses, streams, texts, counters."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from completion_server import MODEL, CompletionServer, serving, vllm_metrics

from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError, EngineError
from picbench.run import remote as module
from picbench.run.remote import (
    KEY,
    Endpoint,
    RemoteServer,
    ReplyError,
    find_text,
    parse_endpoints,
    parse_metrics,
    stream_completion,
)
from picbench.store.records import Failure, GroupResult, ServedReply, ServerCounts

BOS = 1


class Letters:
    """A token a letter, but one for "th", which is never split again."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Mapping[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self._ids(one, add_special_tokens) for one in text]}
        return {"input_ids": self._ids(text, add_special_tokens)}

    def decode(self, token_ids: Any) -> Any:
        return "".join("th" if i == 2 else "<s>" if i == BOS else chr(i) for i in token_ids)

    def _ids(self, text: str, special: bool) -> list[int]:
        ids = [ord(letter) for letter in text.replace("th", "\x02")]
        return [self.bos_token_id, *ids] if special and self.bos_token_id is not None else ids


def request(first: int = 1) -> Request:
    return Request([Text(tokens=(first, 2)), Chunk(tokens=(3, 4))], max_tokens=5)


@contextmanager
def connected(server: CompletionServer, **options: Any) -> Iterator[RemoteServer]:
    with serving(server):
        remote = RemoteServer("theirs", Endpoint(server.url, **options), lambda: Letters(BOS))
        try:
            yield remote
        finally:
            remote.close()


def served(server: CompletionServer, *requests: Request, **options: Any) -> GroupResult:
    """What comes of requests that are sent one after another."""
    with connected(server, **options) as remote:
        remote.ready()
        return remote.run(requests or [request()], 1)


def replies(result: GroupResult) -> list[ServedReply]:
    found = [outcome for outcome in result.outcomes if isinstance(outcome, ServedReply)]
    assert len(found) == len(result.outcomes), result.outcomes
    return found


def failures(result: GroupResult) -> list[str]:
    return [o.message for o in result.outcomes if isinstance(o, Failure)]


def test_token_ids_are_sent_and_the_reply_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k-1")
    server = CompletionServer()
    with connected(server) as remote:
        described = remote.ready()
        (reply,) = replies(remote.run([request()], 1))
        with pytest.raises(EngineError, match="cannot be dropped"):
            remote.reset()
    assert (described["model"], described["version"]) == (MODEL, "1.2.3")
    assert str(described["server"]).startswith("tiny-server/1")
    assert server.keys == {"Bearer k-1"} and "k-1" not in str(described)
    (body,) = server.bodies
    assert body == {
        "model": MODEL,
        "prompt": [1, 2, 3, 4],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (reply.text, reply.output_tokens, reply.finish_reason) == ("yes", 2, "length")
    assert reply.tpot is not None
    assert reply.e2e == pytest.approx(reply.ttft + reply.tpot)


@pytest.mark.parametrize("cached", [None, 0, 3])
def test_cached_tokens_are_read_also_where_there_are_none(cached: int | None) -> None:
    assert replies(served(CompletionServer(cached=cached)))[0].cached_tokens == cached


@pytest.mark.parametrize(("concurrency", "arrivals"), [(2, None), (None, [0.0, 0.01])])
def test_no_more_than_the_concurrency_are_in_flight_unless_they_arrive(
    concurrency: int | None, arrivals: list[float] | None
) -> None:
    count = 2 if arrivals else 8
    barrier = threading.Barrier(2, timeout=20)  # Replies wait until two requests are in flight.

    def hold(events: list[Any]) -> list[Any]:
        barrier.wait()
        return events

    server = CompletionServer(events=hold)
    with connected(server) as remote:
        result = remote.run([request(n) for n in range(count)], concurrency, arrivals)
    assert server.most == 2
    assert sorted(body["prompt"][0] for body in server.bodies) == list(range(count))
    assert all(0 <= reply.late < reply.ttft for reply in replies(result))


def test_a_server_that_takes_no_ids_gets_the_text_and_is_not_asked_twice() -> None:
    server = CompletionServer(takes_ids=False, counts=lambda prompt: 4)
    replies(served(server, request(), request()))
    text = "th\x03\x04"
    assert [body["prompt"] for body in server.bodies] == [[1, 2, 3, 4], text, text]


def test_without_a_text_of_the_same_ids_the_request_fails() -> None:
    (message,) = failures(served(CompletionServer(takes_ids=False), request(ord("a"))))
    assert message.startswith("the server takes no token ids, and no text has the prompt's ids")
    assert "HTTP 422" in message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"events": lambda events: events[:-1]}, "the server sends no usage"),
        ({"events": lambda events: events[:1]}, "the reply has no end"),
        (
            {"events": lambda events: ["{not json"]},
            "the server streams what is no completion: {not json",
        ),
        (
            {"events": lambda events: [events[0], {"error": {"message": "preempted"}}]},
            "the server ended the reply: .*preempted",
        ),
        (
            {"counts": lambda prompt: len(prompt) + 1},
            "the server counted 5 prompt tokens where 4 were sent",
        ),
        ({"cached": 5}, "the server found 5 of 4 prompt tokens in its cache"),
        ({"cached": -1}, "the server streams what is no completion: .*-1"),
    ],
)
def test_a_stream_that_is_no_completion_is_a_failure(answer: Any, message: str) -> None:
    (found,) = failures(served(CompletionServer(**answer)))
    assert re.match(message, found)


def test_a_reply_that_takes_too_long_is_a_failure() -> None:
    found = failures(served(CompletionServer(pause=0.5), timeout=0.1))
    assert found == ["no whole reply within 0.1 s"]


def test_a_server_that_goes_away_fails_its_requests_and_cannot_be_connected() -> None:
    with serving(CompletionServer()) as gone:
        pass
    remote = RemoteServer("theirs", Endpoint(gone.url, MODEL), lambda: Letters(BOS))
    (message,) = failures(remote.run([request()], 1))
    assert message.startswith(gone.url)
    with pytest.raises(ConfigError, match=r"`arm` theirs: http://.* cannot be reached"):
        remote.ready()
    remote.kill()
    remote.close()


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        ((MODEL,), "other", "serves no model other.*it lists tiny"),
        (("a", "b"), None, "does not say which model it serves.*it lists a, b"),
    ],
)
def test_the_model_must_be_served(models: tuple[str, ...], model: str | None, message: str) -> None:
    server = CompletionServer(models=models)
    with connected(server, model=model) as remote, pytest.raises(ConfigError, match=message):
        remote.ready()


Frame = tuple[float, dict[str, Any]]


def measure(
    monkeypatch: pytest.MonkeyPatch, frames: list[Frame], tokens: int, end: str = "\n"
) -> ServedReply:
    """A reply that arrived at 9.5 and was sent at 10.0; frames come at their times."""
    now = 10.0

    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal now
            usage = {"prompt_tokens": 7, "completion_tokens": tokens}
            ends: list[Frame] = [(99.0, {"choices": [], "usage": usage})]
            for at, choice in frames:
                yield f": a comment{2 * end}".encode()
                now = at
                yield line({"choices": [choice]})
            now, event = ends[0]
            yield line(event) + f"data: [DONE]{2 * end}".encode()

    def line(event: dict[str, Any]) -> bytes:
        return f"data: {json.dumps(event, ensure_ascii=False)}{2 * end}".encode()

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    reply = httpx.Response(200, stream=Stream(), headers={"Content-Type": "text/event-stream"})

    async def send() -> ServedReply:
        transport = httpx.MockTransport(lambda _: reply)
        async with httpx.AsyncClient(base_url="http://h/v1/", transport=transport) as client:
            return await stream_completion(client, {}, 7, 9.5)

    return asyncio.run(send())


def frame(text: str | None, end: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"text": text, "finish_reason": end, **fields}


A = frame("a")
STOP = frame("", "stop")

#: Frames, tokens that the server counted, and when the first and the last came, and their gap.
TIMED: dict[str, tuple[list[Frame], int, float, float, float | None]] = {
    "a token a frame": ([(11, A), (12, A), (13, frame("b", "length"))], 3, 11, 13, 1.0),
    "several a frame": ([(11, A), (15, frame("bcd", "length"))], 5, 11, 15, 1.0),
    "all in one frame": ([(11, frame("abcd", "stop"))], 4, 11, 11, None),
    "all in one, then the end": ([(11, frame("abcd")), (14, STOP)], 5, 11, 11, None),
    "one token": ([(11, frame("a", "length"))], 1, 11, 11, None),
    "an empty frame first": ([(10.1, frame("")), (13, A), (14, A), (15, STOP)], 2, 13, 14, 1.0),
    "null first": ([(10.1, frame(None)), (13, A), (14, frame("b", "stop"))], 2, 13, 14, 1.0),
    "a role first": (
        [
            (10.1, {"delta": {"role": "assistant", "content": ""}}),
            (13, {"delta": {"content": "a"}}),
            (14, {"delta": {"content": "b"}, "finish_reason": "stop"}),
        ],
        *(2, 13, 14, 1.0),
    ),
    "white space": (
        [(11, frame("\n")), (13, frame(" ")), (14, frame("a", "length"))],
        3,
        11,
        14,
        1.5,
    ),
    "reasoning": (
        [
            (11, {"delta": {"reasoning_content": "hm"}}),
            (12, {"delta": {"reasoning": "so"}}),
            (13, {"delta": {"content": "a"}, "finish_reason": "length"}),
        ],
        *(3, 11, 13, 1.0),
    ),
    "ids of a half letter": (
        [(11, frame("", token_ids=[5])), (12, frame("é", "length"))],
        2,
        11,
        12,
        1.0,
    ),
    "logprobs of one": (
        [(11, frame("", logprobs={"tokens": ["?"]})), (12, frame("é", "length"))],
        *(2, 11, 12, 1.0),
    ),
    "a late end": ([(11, A), (12, A), (90, frame("", "length"))], 2, 11, 12, 1.0),
    "a late end that is a token": ([(11, A), (12, A), (90, STOP)], 3, 11, 12, 1.0),
    "an end whose ids are told": (
        [(11, A), (12, A), (14, frame("", "stop", token_ids=[2]))],
        *(3, 11, 14, 1.5),
    ),
    "nothing but the end": ([(10.1, frame("")), (12, STOP)], 1, 12, 12, None),
}


@pytest.mark.parametrize(("frames", "tokens", "first", "last", "gap"), TIMED.values(), ids=TIMED)
def test_times_are_those_of_the_first_and_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
    frames: list[Frame],
    tokens: int,
    first: float,
    last: float,
    gap: float | None,
) -> None:
    reply = measure(monkeypatch, frames, tokens)
    assert (reply.late, reply.ttft, reply.e2e) == (0.5, first - 9.5, last - 9.5)
    assert (reply.output_tokens, reply.tpot) == (tokens, gap)


def test_a_text_whose_tokens_the_server_does_not_count_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ReplyError, match="counted no token in a reply that has text"):
        measure(monkeypatch, [(11, A), (12, STOP)], 0)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_reply_may_have_what_others_end_lines_with(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    texts = ["a\u2028b", "c\x85", "\u2029d"]
    frames: list[Frame] = [(11, frame(text)) for text in texts]
    assert measure(monkeypatch, [*frames, (12, STOP)], 3, end).text == "".join(texts)


def test_a_server_has_a_name_an_address_and_options() -> None:
    values = ["a=http://h:1/v1/", "b=https://h/v1,timeout=2.5,model=org/m"]
    values += ["c=http://h/v1,simulated=yes", "d=http://h/v1,simulated=no"]
    found = parse_endpoints(values, ["full"])
    assert found == {
        "a": Endpoint("http://h:1/v1", None, 600.0),
        "b": Endpoint("https://h/v1", "org/m", 2.5),
        "c": Endpoint("http://h/v1", simulated=True),
        "d": Endpoint("http://h/v1"),
    }
    assert found["c"].spec == "http://h/v1 simulated"


NAMES = ["http://h/v1", "other=http://i/v1", "=http://h/v1", "a/b=http://h/v1"]
NAMES += ["full=http://h/v1", "ours=http://h/v1"]
ADDRESSES = ["h:80/v1", "http://", "http://h:port/v1"]
OPTIONS = ["models=m", "model=", "timeout=0", "timeout=soon", "simulated=1", "model=a,model=b"]


@pytest.mark.parametrize(
    "value", [*NAMES, *(f"a={url}" for url in ADDRESSES), *(f"a=http://h/v1,{o}" for o in OPTIONS)]
)
def test_anything_else_is_refused_by_the_fields_name(value: str) -> None:
    with pytest.raises(ConfigError, match="`arm`"):
        parse_endpoints(["other=http://h/v1", value], ["ours"])


@pytest.mark.parametrize("url", ["me:secret@h/v1", "secret@h/v1", "h/v1?key=secret"])
def test_secrets_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as error:
        parse_endpoints([f"a=http://{url}"], [])
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("bos", "tokens", "text"),
    [
        (BOS, [BOS, 2, ord("e")], "the"),
        (None, [2, ord("e")], "the"),
        (BOS, [BOS, ord("t"), ord("h")], None),  # The tokenizer would merge these.
        (BOS, [ord("a")], None),  # The server would add a BOS.
    ],
)
def test_a_text_has_the_same_ids_without_its_bos(
    bos: int | None, tokens: list[int], text: str | None
) -> None:
    assert find_text(tokens, Letters(bos)) == text


Metrics = Callable[[CompletionServer], str | None]


def counted(metrics: Metrics) -> ServerCounts | None:
    """What a server with these metrics is said to have counted over two requests of 4 tokens."""
    requests = [Request([Text(tokens=(n, 2, 3, 4))], max_tokens=2) for n in range(2)]
    return served(CompletionServer(metrics=metrics), *requests).counted


def begun(server: CompletionServer, name: str) -> str:
    """A counter of requests that is not there before it counts."""
    return f"{name}_total {len(server.bodies)}.0\n" if server.bodies else ""


FROM_BOTH = ServerCounts(8, 18, 8, 16, preemptions=2, peak_kv_usage=0.25)


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        (vllm_metrics, FROM_BOTH),
        (
            lambda server: f"vllm:prompt_tokens_total 7\n{begun(server, 'vllm:num_preemptions')}",
            ServerCounts(prompt_tokens=0, preemptions=2),
        ),
        # As SGLang's, which has none before it has served anything.
        (
            lambda server: f"go_gc_seconds 0.1\n{begun(server, 'sglang:prompt_tokens')}",
            ServerCounts(prompt_tokens=2),
        ),
    ],
    ids=["of all engines", "one begins", "all begin"],
)
def test_counts_are_those_of_the_batch_from_zero(metrics: Metrics, found: ServerCounts) -> None:
    assert counted(metrics) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            'vllm:gpu_prefix_cache_hits{model_name="m"} 5.0\n'
            'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n',
            {"hit_tokens": 5.0, "peak_kv_usage": 0.5},
        ),
        (
            'sglang:prompt_tokens_total{model_name="m"} 10.0\n'
            'sglang:cached_tokens_total{cache_source="device"} 3.0\n'
            'sglang:cached_tokens_total{cache_source="host"} 4.0\n'
            'sglang:token_usage{model_name="m"} 0.75',
            {"prompt_tokens": 10.0, "cached_tokens": 7.0, "peak_kv_usage": 0.75},
        ),
        (
            'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:prompt_tokens_total +Inf\n'
            'vllm:kv_cache_usage_perc{engine="1"} 0.5\n',
            {"peak_kv_usage": 0.5},
        ),
        ("vllm:kv_cache_usage_perc NaN\n", {}),
    ],
    ids=["older", "sglang", "no numbers", "nothing"],
)
def test_metrics_are_known_by_their_names(text: str, found: dict[str, float]) -> None:
    assert parse_metrics(text) == found


@pytest.mark.parametrize(
    "metrics",
    [
        lambda server: None,
        lambda server: "",
        lambda server: "go_gc_duration_seconds 0.1\n",
        lambda server: '{"error": "no metrics"}',
        lambda server: "vllm:prompt_tokens_total many\n",
        lambda server: None if server.bodies else vllm_metrics(server),
        lambda server: vllm_metrics(server) if server.bodies else None,
        lambda server: f"vllm:prompt_tokens_total {9 - len(server.bodies)}.0\n",
    ],
    ids=["no page", "empty", "others", "json", "broken", "gone later", "there later", "set back"],
)
def test_a_server_without_known_metrics_counts_nothing(metrics: Metrics) -> None:
    assert counted(metrics) is None


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        (ServerCounts(prompt_tokens=10), None),
        (ServerCounts(prompt_tokens=10, cached_tokens=0), 0.0),
        (ServerCounts(prompt_tokens=10, cached_tokens=4, queried_tokens=8, hit_tokens=2), 0.4),
        (ServerCounts(queried_tokens=8, hit_tokens=2), 0.25),
        (ServerCounts(queried_tokens=8, hit_tokens=2, external_hit_tokens=4), 0.75),
        (ServerCounts(queried_tokens=0, hit_tokens=0), None),
    ],
)
def test_the_reused_share_is_absent_where_it_is_not_told(
    counts: ServerCounts, share: float | None
) -> None:
    assert counts.reused_share == share


def test_what_one_batch_does_not_tell_is_not_known_of_both() -> None:
    one = ServerCounts(prompt_tokens=3, cached_tokens=1, peak_kv_usage=0.5)
    two = ServerCounts(prompt_tokens=4, peak_kv_usage=0.25)
    assert one + two == ServerCounts(prompt_tokens=7, peak_kv_usage=0.5)
