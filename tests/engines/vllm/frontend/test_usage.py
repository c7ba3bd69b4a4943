"""How what became of a prompt gets into a server's answers."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from core_requests import core_request
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from picbench.engines.vllm.frontend.usage import (
    Reports,
    UsageMiddleware,
    header,
    joined,
    keep_usage,
    note_usage,
)


def report(hit: int, tier: str = "host", loaded: int = 0) -> dict[str, Any]:
    return {
        "chunk_hit_tokens": hit,
        "prefix_hit_tokens": 1,
        "loaded_tokens": {tier: loaded} if loaded else {},
        "compiled_tokens": 2,
        "computed_tokens": 3,
        "linked_tokens": 2,
        "padded_tokens": 9,
        "chunks": [{"span": [0, hit], "state": "hit"}],
    }


def output(name: str, told: dict[str, Any] | None) -> RequestOutput:
    params = {"pic": told} if told else None
    return RequestOutput(name, None, [1], None, [], False, kv_transfer_params=params)


def answer(told: Reports, response: Any) -> httpx.Response:
    """The answer of a server whose engine tells something of prompts, as a client gets it."""

    async def endpoint(_: Any) -> Any:
        # vLLM's endpoints iterate over outputs in tasks of their own.
        async def note() -> None:
            for name, each in told.items():
                note_usage(output(name, each))
            note_usage(output("other", None))

        if isinstance(response, list):

            async def events() -> Any:
                await asyncio.create_task(note())
                for event in response:
                    yield event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        await asyncio.create_task(note())
        return JSONResponse(response)

    app = UsageMiddleware(Starlette(routes=[Route("/", endpoint, methods=["POST"])]))  # type: ignore[arg-type]

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/")

    return asyncio.run(post())


def test_usage_and_header_say_it():
    params = {"pic": report(8)}
    found = answer(
        {"cmpl-1-0": report(8)}, {"é": 1, "usage": {"a": 2}, "kv_transfer_params": params}
    )
    assert found.json() == {"é": 1, "usage": {"a": 2, "pic": report(8)}, "kv_transfer_params": None}
    expected = "hit=8; prefix=1; compiled=2; computed=3; linked=2; padded=9; loaded=0"
    assert found.headers["x-pic"] == expected
    assert found.headers["content-type"] == "application/json"
    assert int(found.headers["content-length"]) == len(found.content)


def test_other_connectors_parameters_stay():
    params = {"pic": report(8), "remote": 1}
    found = answer({"a-0": report(8)}, {"usage": {"a": 2}, "kv_transfer_params": params}).json()
    assert found["kv_transfer_params"] == {"remote": 1}


@pytest.mark.parametrize(
    ("told", "response"),
    [({}, {"usage": {"a": 2}}), ({"a-0": report(8)}, {"error": "x"}), ({"a-0": report(8)}, 5)],
)
def test_answers_without_usage_stay_as_they_are(told, response):
    found = answer(told, response)
    assert found.json() == response
    assert ("x-pic" in found.headers) is bool(told)


def test_the_last_event_of_a_stream_says_it():
    text = {"choices": [{"text": "x"}], "usage": {"a": 1}}
    events = [": ping\n\n", text, {"choices": [], "usage": {"a": 2}}, "data: [DONE]\n\n"]
    lines = answer({"a-0": report(8)}, events).text.split("\n\n")
    assert lines[0] == ": ping" and lines[3] == "data: [DONE]"
    assert json.loads(lines[1].removeprefix("data: ")) == text
    assert json.loads(lines[2].removeprefix("data: "))["usage"] == {"a": 2, "pic": report(8)}


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_delta", "usage": {"output_tokens": 1}},
        {"type": "response.completed", "response": {"usage": {"output_tokens": 1}}},
    ],
)
def test_events_of_other_interfaces_say_it(event):
    sent = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
    kind, data = answer({"a-0": report(8)}, [sent]).text.strip().split("\n")
    found = json.loads(data.removeprefix("data: "))
    assert kind == f"event: {event['type']}"
    assert (found.get("response") or found)["usage"] == {"output_tokens": 1, "pic": report(8)}


def test_prompts_of_a_request_are_added_in_their_order():
    reports = {f"cmpl-x-{n}": report(n, "ab"[n % 2], loaded=n) for n in (10, 2, 9, 1, 0)}
    found = joined(reports)
    assert found["chunk_hit_tokens"] == 22 and found["padded_tokens"] == 45
    assert found["loaded_tokens"] == {"a": 12, "b": 10}
    assert [(c["prompt"], c["span"][1]) for c in found["chunks"]] == [*enumerate((0, 1, 2, 9, 10))]
    assert "loaded=22" in header(found)


class TestOutputs:
    """Engines tell it once, with the first output."""

    @pytest.fixture
    def processor(self) -> OutputProcessor:
        keep_usage()
        keep_usage()
        return OutputProcessor(None, log_stats=False)

    def add(
        self, processor: OutputProcessor, kind: RequestOutputKind, n: int, name: str = "one"
    ) -> Any:
        params = SamplingParams(n=n, output_kind=kind, detokenize=False)
        request = core_request(name, params)
        queue = RequestOutputCollector(kind, name)
        parent = ParentRequest(request) if n > 1 else None
        for index in range(n):
            if parent is not None:
                request.request_id, request.sampling_params = parent.get_child_info(index)
            processor.add_request(request, None, parent, index, queue)
        return queue

    def put(self, processor: OutputProcessor, name: str, told: Any, *, last: bool = False) -> None:
        params = {"pic": told} if told else None
        reason = FinishReason.LENGTH if last else None
        put = EngineCoreOutput(name, [7], finish_reason=reason, kv_transfer_params=params)
        processor.process_outputs([put], 1.0, IterationStats() if processor.log_stats else None)

    def test_later_outputs_tell_it_too(self, processor):
        """A slow reader of a stream gets several outputs as one, with the fields of the last."""
        queue = self.add(processor, RequestOutputKind.DELTA, 1)
        self.put(processor, "one", report(8))
        self.put(processor, "one", None)
        assert queue.get_nowait().kv_transfer_params == {"pic": report(8)}

    def test_whole_answers_tell_it(self, processor):
        queue = self.add(processor, RequestOutputKind.FINAL_ONLY, 1)
        self.put(processor, "one", report(8))
        self.put(processor, "one", None, last=True)
        assert queue.get_nowait().kv_transfer_params == {"pic": report(8)}

    def test_samples_tell_what_the_first_one_does(self, processor):
        queue = self.add(processor, RequestOutputKind.FINAL_ONLY, 2)
        for name, told in (("0_one", report(8)), ("1_one", report(9))):
            self.put(processor, name, told, last=True)
        assert queue.get_nowait().kv_transfer_params == {"pic": report(8)}

    def test_others_tell_nothing(self, processor):
        queue = self.add(processor, RequestOutputKind.DELTA, 1)
        self.put(processor, "one", None, last=True)
        assert queue.get_nowait().kv_transfer_params is None

    def test_traces_have_a_span_of_the_prompt(self, monkeypatch):
        """Beside vLLM's own span of the request, and in the trace of the client."""
        spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
        keep_usage()
        processor = OutputProcessor(None, log_stats=True, tracing_enabled=True)
        for name, told in (("one", report(8, loaded=16)), ("two", None)):
            self.add(processor, RequestOutputKind.FINAL_ONLY, 1, name)
            client = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
            processor.request_states[name].stats.arrival_time = time.time() - 5
            params = {"pic": told} if told else None
            put = EngineCoreOutput(name, [7], kv_transfer_params=params, trace_headers=client)
            processor.process_outputs([put], 1.0, IterationStats())
            end = EngineCoreOutput(
                name, [7], finish_reason=FinishReason.LENGTH, trace_headers=client
            )
            processor.process_outputs([end], 2.0, IterationStats())
        found = spans.get_finished_spans()
        assert [span.name for span in found] == ["llm_request", "pic_prompt", "llm_request"]
        assert found[1].context.trace_id == int("a" * 32, 16)
        told = {f"pic.{name}": n for name, n in report(8, loaded=16).items() if type(n) is int}
        assert found[1].attributes == told | {"pic.loaded_tokens": 16}
        assert 4.9 < (found[1].end_time - found[1].start_time) / 1e9 < 60
