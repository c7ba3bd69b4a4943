"""A server elsewhere, over HTTP in the tests' process."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from completion_server import MODEL, CompletionServer, serving

from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError, EngineError
from picbench.run.remote import KEY, Endpoint, RemoteServer
from picbench.store.records import Failure, GroupResult, ServedReply

TextOf = Callable[[Sequence[int]], str | None]


def request(first: int = 1) -> Request:
    return Request([Text(tokens=(first, 2)), Chunk(tokens=(3, 4))], max_tokens=5)


@contextmanager
def connected(
    server: CompletionServer, text_of: TextOf = lambda tokens: None, **options: Any
) -> Iterator[RemoteServer]:
    with serving(server):
        remote = RemoteServer("theirs", Endpoint(server.url, **options), text_of)
        try:
            yield remote
        finally:
            remote.close()


def replies(result: GroupResult) -> list[ServedReply]:
    found = [outcome for outcome in result.outcomes if isinstance(outcome, ServedReply)]
    assert len(found) == len(result.outcomes), result.outcomes
    return found


def failures(result: GroupResult) -> list[str]:
    return [o.message for o in result.outcomes if isinstance(o, Failure)]


def together(count: int) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Hold replies back until so many requests are in flight."""
    barrier = threading.Barrier(count, timeout=20)

    def hold(events: list[dict[str, Any]]) -> list[Any]:
        barrier.wait()
        return events

    return hold


def test_token_ids_are_sent_and_the_reply_is_measured() -> None:
    server = CompletionServer()
    with connected(server) as remote:
        described = remote.ready()
        (reply,) = replies(remote.run([request()], 1))
    assert described["model"] == MODEL
    assert str(described["server"]).startswith("tiny-server/1")
    assert described["version"] == "1.2.3"
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
    assert reply.cached_tokens is None
    assert reply.tpot is not None
    assert reply.e2e == pytest.approx(reply.ttft + reply.tpot)


def test_cached_tokens_are_read_also_where_there_are_none() -> None:
    for cached in (0, 3):
        with connected(CompletionServer(cached=cached)) as remote:
            remote.ready()
            assert replies(remote.run([request()], 1))[0].cached_tokens == cached


def test_no_more_than_the_concurrency_are_in_flight_and_replies_are_in_order() -> None:
    server = CompletionServer(events=together(2))
    with connected(server) as remote:
        remote.ready()
        replies(remote.run([request(n) for n in range(8)], 2))
    assert server.most == 2
    assert sorted(body["prompt"][0] for body in server.bodies) == list(range(8))


def test_requests_that_arrive_do_not_wait_for_each_other() -> None:
    server = CompletionServer(events=together(4))
    with connected(server) as remote:
        remote.ready()
        result = remote.run([request(n) for n in range(4)], None, [0.0, 0.01, 0.02, 0.03])
    assert server.most == 4
    assert all(0 <= reply.late < reply.ttft for reply in replies(result))


def test_one_failing_request_leaves_the_others() -> None:
    server = CompletionServer(fails=lambda prompt: prompt[0] == 1)
    with connected(server) as remote:
        remote.ready()
        result = remote.run([request(0), request(1), request(2)], 1)
    kinds = [type(outcome) for outcome in result.outcomes]
    assert kinds == [ServedReply, Failure, ServedReply]
    assert failures(result) == ['HTTP 500: {"error": "out of\\nmemory"}']
    assert result.clean


def test_a_server_that_takes_no_ids_gets_the_text_and_is_not_asked_twice() -> None:
    server = CompletionServer(takes_ids=False, counts=lambda prompt: 4)
    with connected(server, lambda tokens: "the text") as remote:
        remote.ready()
        replies(remote.run([request(), request()], 1))
    assert [body["prompt"] for body in server.bodies] == [[1, 2, 3, 4], "the text", "the text"]


def test_without_a_text_of_the_same_ids_the_request_fails() -> None:
    with connected(CompletionServer(takes_ids=False)) as remote:
        remote.ready()
        (message,) = failures(remote.run([request()], 1))
    assert message.startswith("the server takes no token ids, and no text has the prompt's ids")


def without_usage(events: list[dict[str, Any]]) -> list[Any]:
    return events[:-1]


def cut_off(events: list[dict[str, Any]]) -> list[Any]:
    return events[:1]


def broken(events: list[dict[str, Any]]) -> list[Any]:
    return ["{not json"]


def stopped(events: list[dict[str, Any]]) -> list[Any]:
    return [events[0], {"error": {"message": "preempted"}}]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (without_usage, "the server sends no usage"),
        (cut_off, "the reply has no end"),
        (broken, "the server streams what is no completion: {not json"),
        (stopped, "the server ended the reply: .*preempted"),
    ],
)
def test_a_stream_that_is_no_completion_is_a_failure(events: Any, message: str) -> None:
    with connected(CompletionServer(events=events)) as remote:
        remote.ready()
        (found,) = failures(remote.run([request()], 1))
    assert re.match(message, found)


def test_a_prompt_that_the_server_counts_otherwise_is_a_failure() -> None:
    with connected(CompletionServer(counts=lambda prompt: len(prompt) + 1)) as remote:
        remote.ready()
        (message,) = failures(remote.run([request()], 1))
    assert message.startswith("the server counted 5 prompt tokens where 4 were sent")


def test_a_reply_that_takes_too_long_is_a_failure() -> None:
    with connected(CompletionServer(pause=0.5), timeout=0.1) as remote:
        remote.ready()
        assert failures(remote.run([request()], 1)) == ["no whole reply within 0.1 s"]


def test_a_server_that_goes_away_fails_its_requests() -> None:
    server = CompletionServer()
    with serving(server):
        remote = RemoteServer("theirs", Endpoint(server.url, MODEL), lambda tokens: None)
    (message,) = failures(remote.run([request()], 1))
    remote.close()
    assert message.startswith(server.url)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with serving(CompletionServer()) as gone:
        pass
    remote = RemoteServer("theirs", Endpoint(gone.url), lambda tokens: None)
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
    with (
        connected(CompletionServer(models=models), model=model) as remote,
        pytest.raises(ConfigError, match=message),
    ):
        remote.ready()


def test_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k-1")
    server = CompletionServer()
    with connected(server) as remote:
        described = remote.ready()
        replies(remote.run([request()], 1))
    assert server.keys == {"Bearer k-1"}
    assert "k-1" not in str(described)


def test_its_cache_cannot_be_dropped() -> None:
    with connected(CompletionServer()) as remote, pytest.raises(EngineError, match="cannot be"):
        remote.reset()
