import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from picbench.run import remote as completion_stream
from picbench.run.remote import stream_completion
from picbench.store.records import ServedReply


def stream(texts: list[str], tokens: int, end: str = "\n") -> bytes:
    events = [{"choices": [{"text": text}]} for text in texts]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    events.append({"choices": [], "usage": usage})  # type: ignore[dict-item]
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{2 * end}" for event in events]
    return f": a comment{2 * end}".join([*lines, f"data: [DONE]{2 * end}"]).encode()


def measure(
    monkeypatch: pytest.MonkeyPatch, content: bytes, *, clock: list[float], arrived: float
) -> ServedReply:
    """The reply to `content`, whose clock is read when it is sent and when each token comes."""
    times = iter(clock)
    now = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(completion_stream, "time", now)
    transport = httpx.MockTransport(
        lambda _: httpx.Response(
            200, content=content, headers={"Content-Type": "text/event-stream"}
        )
    )

    async def send() -> ServedReply:
        async with httpx.AsyncClient(base_url="http://h/v1/", transport=transport) as client:
            return await stream_completion(client, {}, 7, arrived)

    return asyncio.run(send())


def test_times_are_those_of_the_first_and_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    content = stream(["a", "", "b"], tokens=5)
    reply = measure(monkeypatch, content, clock=[10.0, 12.0, 13.0, 20.0], arrived=9.5)
    assert (reply.text, reply.output_tokens) == ("ab", 5)
    assert (reply.late, reply.ttft, reply.e2e) == (0.5, 2.5, 10.5)
    assert reply.tpot == (20.0 - 12.0) / 4


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_reply_may_have_what_others_end_lines_with(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    texts = ["a\u2028b", "c\x85", "\u2029d"]
    content = stream(texts, tokens=3, end=end)
    reply = measure(monkeypatch, content, clock=[1.0, 2.0, 3.0, 4.0], arrived=1.0)
    assert reply.text == "".join(texts)


def test_a_single_token_has_no_time_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = measure(monkeypatch, stream([""], tokens=1), clock=[1.0, 2.0], arrived=1.0)
    assert (reply.text, reply.tpot, reply.ttft) == ("", None, 1.0)
