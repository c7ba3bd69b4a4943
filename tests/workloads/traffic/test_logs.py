"""Logs and traces in the forms that people have them, each from a small file of that form."""

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import DataError
from picbench.workloads.traffic.trace import Encode, Trace, TracedRequest, TraceSegment
from picbench.workloads.traffic.trace_file import read_trace_file

DATA = Path(os.environ.get("PICBENCH_DATA", Path(__file__).parents[4] / "shared" / "data"))
WEKA = DATA / "traces" / "weka_trace_0002.json"


def encode() -> Encode:
    """A token for each character."""
    return lambda text: tuple(map(ord, text))


def opened(path: Path, text: str | Sequence[Any]) -> Trace:
    made = text if isinstance(text, str) else "".join(f"{json.dumps(line)}\n" for line in text)
    path.write_text(made)
    return read_trace_file(path, encode)


def said(segment: TraceSegment | None) -> str:
    assert segment is not None
    return "".join(map(chr, array("q", segment.tokens or b"")))


def prompt(request: TracedRequest) -> str:
    return "".join(map(said, request.segments))


def chunks(request: TracedRequest) -> list[str]:
    return [said(segment) for segment in request.segments if segment.chunk]


def test_openai_bodies_of_three_apis_are_requests(tmp_path: Path) -> None:
    chat = {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]},
            {"role": "tool", "tool_call_id": "1", "content": "Ada"},
        ],
    }
    reply = {
        "choices": [{"message": {"role": "assistant", "content": "Ada."}}],
        "usage": {"completion_tokens": 3},
    }
    lines = [
        {"timestamp": "2026-05-01T10:00:02Z", "request": chat, "response": reply},
        {"timestamp": 1777629600, "body": {"model": "m", "prompt": "Once", "max_tokens": 9}},
        {
            "timestamp": 1777629601000,
            "body": json.dumps({"instructions": "Sys", "input": [{"role": "user"}, "Hi"]}),
            "response": {
                "output": [{"type": "message", "content": [{"type": "output_text", "text": "Yo"}]}],
                "usage": {"output_tokens": 2},
            },
        },
        {"timestamp": 1777629603, "body": {"prompt": [[5, 6], [7]]}},
    ]
    trace = opened(tmp_path / "t.jsonl", lines)
    completion, response, talk, *tokens = trace.requests
    assert (trace.kind, trace.exact, trace.sees) == ("OpenAI bodies", True, "contents")
    assert [prompt(request) for request in (completion, response)] == ["Once\n", "Sys\nHi\n"]
    assert (completion.output, completion.reply) == (16, None)
    assert said(response.reply) == "Yo\n"
    assert [request.prompt_tokens for request in tokens] == [2, 1]
    assert (talk.arrival or 0) - (completion.arrival or 0) == 2
    roles = [(segment.role, said(segment)[:9]) for segment in talk.segments]
    assert [role for role, _ in roles] == ["tools", "system", "user", "assistant", "tool"]
    assert roles[4] == ("tool", "Ada\n")
    assert said(talk.reply) == "Ada.\n"


def test_anthropic_bodies_have_documents_and_tools_results(tmp_path: Path) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A text."}
    body = {
        "model": "claude",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Rules."}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "document", "title": "T", "source": source},
                    {
                        "type": "search_result",
                        "source": "http://a",
                        "title": "S",
                        "content": [{"type": "text", "text": "found"}],
                    },
                    {"type": "text", "text": "Why? <<doc id=k>>marked<</doc>>"},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "42"}],
            },
        ],
    }
    response = {"content": [{"type": "text", "text": "So."}], "usage": {"output_tokens": 4}}
    trace = opened(tmp_path / "t.jsonl", [{"request": body, "response": response}])
    [request] = trace.requests
    assert trace.kind == "Anthropic bodies"
    assert chunks(request) == ["T\nA text.", "S\nfound", "marked"]
    assert "hm" not in prompt(request)
    assert '{"name": "f", "input": {"a": 1}}' in prompt(request)
    assert (request.segments[-1].role, said(request.segments[-1])) == ("tool", "42\n")
    assert said(request.reply) == "So.\n"


def test_a_claude_code_session_is_a_request_for_each_answer(tmp_path: Path) -> None:
    def line(name: str, parent: str | None, kind: str, message: Any, **more: Any) -> Any:
        time = f"2026-05-01T10:00:0{name}Z"
        about = {"parentUuid": parent, "isSidechain": False, "sessionId": "s", "timestamp": time}
        return about | {"type": kind, "uuid": name, "message": message} | more

    def answer(name: str, part: Any, count: int) -> Any:
        usage = {"input_tokens": 3, "cache_read_input_tokens": 900, "output_tokens": count}
        return {"id": name, "role": "assistant", "content": [part], "usage": usage}

    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a.py"}}
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "print()"}]
    lines = [
        {"type": "summary", "summary": "A talk", "leafUuid": "5"},
        line("1", None, "user", {"role": "user", "content": "Fix it"}),
        line("2", "1", "assistant", answer("m1", {"type": "thinking", "thinking": "so"}, 1)),
        line("3", "2", "assistant", answer("m1", call, 30)),
        line("4", "3", "user", {"role": "user", "content": result}, toolUseResult="print()"),
        line("5", "4", "assistant", answer("m2", {"type": "text", "text": "Done."}, 3)),
    ]
    trace = opened(tmp_path / "t.jsonl", lines)
    first, second = trace.requests
    assert trace.kind == "Claude Code sessions"
    assert "system prompt and tools are not in the file" in trace.note
    assert prompt(first) == "Fix it\n"
    assert '"Read"' in said(first.reply)
    assert prompt(second) == "Fix it\n" + said(first.reply) + "print()\n"
    assert (said(second.reply), second.arrival) == ("Done.\n", (first.arrival or 0) + 3)


def test_a_codex_session_is_a_request_for_each_run_of_the_model(tmp_path: Path) -> None:
    def item(second: int, **payload: Any) -> Any:
        time = f"2026-05-01T10:00:0{second}.5Z"
        return {"timestamp": time, "type": "response_item", "payload": payload}

    meta = {"id": "i", "cwd": "/w", "base_instructions": {"text": "You are Codex."}}
    text = [{"type": "input_text", "text": "List files"}]
    lines = [
        {"timestamp": "2026-05-01T10:00:00Z", "type": "session_meta", "payload": meta},
        item(1, type="message", role="user", content=text),
        {"timestamp": "2026-05-01T10:00:01Z", "type": "turn_context", "payload": {"model": "m"}},
        item(2, type="reasoning", summary=[], encrypted_content="x"),
        item(2, type="function_call", name="shell", arguments='{"c":"ls"}', call_id="c"),
        item(3, type="function_call_output", call_id="c", output="a b"),
        item(4, type="message", role="assistant", content=[{"type": "output_text", "text": "Two"}]),
    ]
    first, second = opened(tmp_path / "t.jsonl", lines).requests
    assert prompt(first) == "You are Codex.\nList files\n"
    assert "shell" in said(first.reply)
    assert prompt(second).endswith("a b\n")
    assert said(second.reply) == "Two\n"
    compacted = {"message": "", "replacement_history": [lines[1]["payload"]]}
    lines += [{"timestamp": "2026-05-01T10:00:05Z", "type": "compacted", "payload": compacted}]
    lines += [item(6, type="message", role="assistant", content=text)]
    *_, third = opened(tmp_path / "t.jsonl", lines).requests
    assert prompt(third) == "List files\n"


def test_langsmith_runs_of_models_are_requests(tmp_path: Path) -> None:
    def message(kind: str, text: str) -> Any:
        name = ["langchain", "schema", "messages", f"{kind}Message"]
        return {"lc": 1, "type": "constructor", "id": name, "kwargs": {"content": text}}

    outputs = {
        "generations": [[{"text": "Paris", "message": message("AI", "Paris")}]],
        "llm_output": {"token_usage": {"completion_tokens": 1}},
    }
    messages = [[message("System", "Sys"), message("Human", "Capital?")]]
    runs = [
        {"id": "1", "run_type": "chain", "inputs": {"input": "x"}},
        {
            "id": "2",
            "run_type": "llm",
            "start_time": "2026-05-01T10:00:00.123456",
            "inputs": {"messages": messages},
            "outputs": outputs,
        },
    ]
    for text in ([*runs], json.dumps(runs, indent=1), json.dumps({"runs": runs})):
        trace = opened(tmp_path / "t.jsonl", text)
        [request] = trace.requests
        assert trace.kind == "LangSmith runs"
        assert prompt(request) == "Sys\nCapital?\n"
        assert [segment.role for segment in request.segments] == ["system", "user"]
        assert said(request.reply) == "Paris\n"


def test_otel_spans_of_models_are_requests(tmp_path: Path) -> None:
    def attribute(key: str, value: Any) -> Any:
        made = value if isinstance(value, int | str) else json.dumps(value)
        kind = "intValue" if isinstance(value, int) else "stringValue"
        return {"key": key, "value": {kind: str(made)}}

    asked = [
        {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "1", "name": "get"}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "result": "rain"}]},
    ]
    made = [{"role": "assistant", "parts": [{"type": "text", "content": "Rain."}]}]
    new = [
        attribute("gen_ai.operation.name", "chat"),
        attribute("gen_ai.system_instructions", [{"type": "text", "content": "Sys"}]),
        attribute("gen_ai.input.messages", asked),
        attribute("gen_ai.output.messages", made),
        attribute("gen_ai.usage.output_tokens", 2),
    ]
    old = [
        attribute("gen_ai.prompt.0.role", "system"),
        attribute("gen_ai.prompt.0.content", "Old"),
        attribute("gen_ai.prompt.1.role", "user"),
        attribute("gen_ai.prompt.1.content", "Way"),
        attribute("gen_ai.completion.0.content", "Yes"),
    ]
    spans = [
        {"name": "chat m", "startTimeUnixNano": "1777629600000000000", "attributes": new},
        {"name": "GET /", "startTimeUnixNano": "1777629600500000000", "attributes": []},
        {"name": "chat m", "startTimeUnixNano": "1777629601000000000", "attributes": old},
    ]
    export = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": spans}]}]}
    first, second = opened(tmp_path / "t.jsonl", [export]).requests
    assert prompt(first).startswith("Sys\nWeather?\n")
    assert prompt(first).endswith("rain\n")
    assert (said(first.reply), said(second.reply)) == ("Rain.\n", "Yes\n")
    assert prompt(second) == "Old\nWay\n"
    assert (second.arrival or 0) - (first.arrival or 0) == 1


def test_sharegpt_is_a_request_for_each_reply(tmp_path: Path) -> None:
    talk = [("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"), ("gpt", "So long")]
    rows = [{"id": "a", "conversations": [{"from": who, "value": text} for who, text in talk]}]
    for text in (rows, json.dumps(rows, indent=2)):
        first, second = opened(tmp_path / "t.json", text).requests
        assert [prompt(first), prompt(second)] == ["Hi\n", "Hi\nHello\nBye\n"]
        assert said(second.reply) == "So long\n"


def test_weka_says_that_only_prefixes_can_be_seen(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "type": "n", "in": 200, "out": 9, "hash_ids": [1, 2, 3]},
        {"t": 4.5, "type": "subagent", "requests": [{"t": 5, "in": 64, "out": 1, "hash_ids": [7]}]},
        {"t": 9.0, "type": "n", "in": 256, "out": 3, "hash_ids": [1, 2, 3, 4]},
    ]
    trace = opened(
        tmp_path / "t.json", json.dumps({"id": "a", "block_size": 64, "requests": requests})
    )
    first, nested, second = trace.requests
    assert (trace.kind, trace.sees) == ("WEKA", "prefixes")
    assert trace.note == "ids are chained: nothing beyond prefixes can be seen"
    assert [r.prompt_tokens for r in (first, nested, second)] == [200, 64, 256]
    assert first.segments[:3] == second.segments[:3]
    assert first.segments[3].content is None


@pytest.mark.skipif(not WEKA.exists(), reason="the trace is not here")
def test_a_published_weka_trace_has_the_tokens_that_it_says() -> None:
    told = json.loads(WEKA.read_text())["totals"]["parent_tokens"]
    requests = list(read_trace_file(WEKA, encode).requests)
    assert sum(request.prompt_tokens for request in requests) == told["input"]
    assert sum(request.output for request in requests) == told["output"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "Azure LLM trace",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:50.9951690,396,109\n",
        ),
        (
            "BurstGPT",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,374,44,418,Conversation log\n9.314579,GPT-4,396,109,505,API log\n",
        ),
    ],
)
def test_tables_of_lengths_say_what_cannot_be_known(tmp_path: Path, kind: str, text: str) -> None:
    trace = opened(tmp_path / "t.csv", text)
    first, second = trace.requests
    assert (trace.kind, trace.sees, trace.exact) == (kind, "lengths", False)
    assert "only lengths are known" in trace.note
    assert [(r.prompt_tokens, r.output) for r in (first, second)] == [(374, 44), (396, 109)]
    assert (second.arrival or 0) - (first.arrival or 0) == pytest.approx(4.3145, abs=1e-3)


def test_vllms_request_log_is_read_old_and_new(tmp_path: Path) -> None:
    text = (
        "INFO 07-21 09:33:10 [api_server.py:1] Starting vLLM\n"
        "INFO 07-21 09:33:11 [logger.py:43] Received request cmpl-1: prompt: 'It\\'s\\n', params: "
        "SamplingParams(n=1, max_tokens=16), prompt_token_ids: [5, 6, 7], lora_request: None.\n"
        "(APIServer pid=7) DEBUG 07-21 09:33:13 [request_logger.py:44] Request chatcmpl-2 details: "
        'prompt: "a \\"b\\"", prompt_token_ids: None, prompt_embeds shape: None.\n'
        "(APIServer pid=7) INFO 07-21 09:33:13 [request_logger.py:51] Received request chatcmpl-2: "
        "params: SamplingParams(n=1), lora_request: None.\n"
        "INFO 07-21 09:33:14 [request_logger.py:80] Generated response cmpl-1: output: 'x y', "
        "output_token_ids: [8, 9], finish_reason: stop\n"
    )
    first, second = opened(tmp_path / "vllm.log", text).requests
    assert (first.prompt_tokens, first.output) == (3, 2)
    assert prompt(second) == 'a "b"\n'
    assert (second.arrival or 0) - (first.arrival or 0) == 2


def test_sessions_of_a_folder_are_one_stream_by_time(tmp_path: Path) -> None:
    def session(name: str, hour: int) -> str:
        time = f"2026-05-01T{hour}:00:00Z"
        user = {"type": "user", "uuid": "1", "parentUuid": None, "sessionId": name}
        answer = user | {"type": "assistant", "uuid": "2", "parentUuid": "1", "timestamp": time}
        told = {"id": "m", "role": "assistant", "content": "ok"}
        lines = [user | {"message": {"role": "user", "content": name}}, answer | {"message": told}]
        return "".join(f"{json.dumps(line)}\n" for line in lines)

    for name, hour in (("late", 12), ("soon", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.jsonl").write_text(session(name, hour))
    found = read_trace_file(tmp_path, encode).requests
    assert [prompt(request) for request in found] == ["soon\n", "late\n"]


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([CHAT, "{"], r"t\.jsonl:2: Invalid JSON"),
        ([CHAT, {"model": "m"}], r"t\.jsonl:2: no 'messages', 'prompt' or 'input'"),
        ([CHAT, {"messages": []}], r"t\.jsonl:2: a request without text"),
        (
            [{"conversations": [{"from": "gpt"}]}, {"id": 1}],
            r"t\.jsonl:2: no field 'conversations'",
        ),
        ([{"resourceSpans": []}, {"resourceSpans": 3}], r"t\.jsonl:2: not of the form of its file"),
        ([{"block_size": 64, "requests": [{"hash_ids": [1]}]}], r"t\.jsonl:1: no field 'in'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,x,1"], r"t\.jsonl:2: .*'x'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,1"], r"t\.jsonl:2: zip"),
        (
            ["INFO 07-21 09:33:11 x", "INFO 07-21 09:33:11 Received request a: prompt: 'b"],
            r"t\.jsonl:2: a request that does not end in its line",
        ),
    ],
)
def test_a_malformed_line_is_one_line_with_its_place(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    with pytest.raises(DataError, match=message) as caught:
        list(opened(tmp_path / "t.jsonl", text).requests)
    assert "\n" not in str(caught.value)


def test_documents_without_marks_are_found_and_shared_histories_not(tmp_path: Path) -> None:
    one, other = "The first document. " * 6, "Quite another text, the second. " * 5
    head = {"role": "system", "content": "Answer from the documents, in one word. " * 3}
    texts = [f"{one}{other}Who?", f"{other}{one}Where?", f"{one}{other}Who?"]
    lines = [{"messages": [head, {"role": "user", "content": text}]} for text in texts]
    more = {"role": "assistant", "content": "Me."}
    lines.append({"messages": [*lines[1]["messages"], more, {"role": "user", "content": "Why?"}]})
    first, second, third, fourth = opened(tmp_path / "t.jsonl", lines).requests
    assert sorted(chunks(first)) == sorted(chunks(second)) == sorted(chunks(third))
    assert all(chunk.strip() in (one + other) for chunk in chunks(first))
    assert len(chunks(first)) == 2
    assert chunks(fourth) == chunks(second)
    assert fourth.segments[: len(second.segments)] == second.segments
    assert prompt(fourth).endswith("Where?\nMe.\nWhy?\n")
