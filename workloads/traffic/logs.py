"""Requests in the logs and traces that people have, by what is in the file.

Each reader is a row of `READERS`: its name, how the first record of a file looks, and what makes
requests of its records. A new form is a function and a row.
"""

import ast
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from picbench.workloads.traffic.lines import json_objects, refusing
from picbench.workloads.traffic.messages import contents, text_of, tools_of
from picbench.workloads.traffic.trace import Count, PromptContent, PromptLine, Sees

Object = Mapping[str, Any]
Lines = Iterator[tuple[str, str]]
Found = Iterator[tuple[str, PromptLine]]

#: Prompt tokens that an id of Mooncake's traces stands for.
_MOONCAKE_TOKENS = 512


class Reader(NamedTuple):
    """A form of requests: `fits` is asked of the first record or line, `read` makes requests."""

    name: str
    sees: Sees
    fits: Callable[[Object, str], bool]
    read: Callable[[Lines], Found]
    note: str = ""


def _seconds(value: Any) -> float | None:
    """A time: seconds, milli-, micro- or nanoseconds of the epoch, or ISO 8601."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) / next(unit for unit in (1, 1e3, 1e6, 1e9) if value / unit < 1e11)
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _time(record: Object) -> float | None:
    names = (
        *("timestamp", "time", "ts", "start_time", "startTime", "created", "created_at"),
        *("request_time", "date"),
    )
    found = (_seconds(record.get(name)) for name in names)
    return next((seconds for seconds in found if seconds is not None), None)


def _count(usage: Any) -> int | None:
    """Generated tokens, as a `usage` says."""
    if not isinstance(usage, Mapping):
        return None
    names = ("completion_tokens", "output_tokens")
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), None)


def _line(
    parts: Sequence[PromptContent], arrival: float | None, reply: str = "", output: int | None = 0
) -> PromptLine:
    """A request; the text of a reply says its length, or else `output` does."""
    told = (
        PromptContent(text=reply.rstrip("\n") + "\n", role="assistant") if reply.strip() else None
    )
    if not any(part.text or part.tokens for part in parts):
        raise ValueError("a request without text")
    return PromptLine(
        parts=[part for part in parts if part.text != ""],
        arrival=arrival,
        output=output or None if told is None else None,
        reply=told,
    )


def _objects(read: Callable[[str, Object], Found]) -> Callable[[Lines], Found]:
    """Read object by object."""

    def each(lines: Lines) -> Found:
        for source, record in json_objects(lines, "see docs/traffic.md"):
            with refusing(source):
                yield from read(source, record)

    return each


def _body_of(record: Object) -> Object | None:
    """The body of a request, which a log may have below a field."""
    names = ("body", "request", "request_body", "kwargs", "params")
    below = (_parsed(record.get(name)) for name in names)
    for body in (record, *(found for found in below if isinstance(found, Mapping))):
        inner = body.get("body", body)
        inner = inner if isinstance(inner, Mapping) else body
        if any(isinstance(inner.get(name), str | list) for name in ("messages", "prompt", "input")):
            return inner
    return None


def _body(source: str, record: Object) -> Found:
    """A body of OpenAI's or Anthropic's APIs, with its response if the log has that, too."""
    body = _body_of(record)
    if body is None:
        raise ValueError("no 'messages', 'prompt' or 'input'")
    below = (_parsed(record.get(name)) for name in ("response", "response_body", "output"))
    response: Any = next((found for found in below if found), {})
    if isinstance(response, Mapping):
        response = response.get("body", response)
    prompts = [list(tools_of(body))]
    prompts[0] += contents(body.get("system"), "system")
    prompts[0] += contents(body.get("instructions"), "system")
    for document in body.get("documents") or ():
        prompts[0] += contents({"type": "document", **_document(document)})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        prompts[0].append(PromptContent(tokens=prompt))
    elif isinstance(prompt, list):  # Several requests in one.
        prompts = [[*prompts[0], *_prompt(one)] for one in prompt]
    elif prompt is not None:
        prompts[0] += _prompt(prompt)
    asked = body.get("messages", body.get("input") if prompt is None else None)
    prompts[0] += contents(asked, "user")
    choices = response.get("choices") or [{}] if isinstance(response, Mapping) else [response]
    one = choices[0].get("message", choices[0]) if isinstance(choices[0], Mapping) else response
    reply = text_of(one) or (text_of(response) if isinstance(response, Mapping) else "")
    usage = (response if isinstance(response, Mapping) else record).get("usage")
    for parts in prompts:
        line = _line(parts, _time(record), reply if len(prompts) == 1 else "", _count(usage))
        yield source, line


def _document(given: Any) -> Object:
    return given if isinstance(given, Mapping) else {"text": str(given)}


def _prompt(given: Any) -> Iterator[PromptContent]:
    if isinstance(given, list):
        yield PromptContent(tokens=given)
    else:
        yield from contents(str(given))


def _claude_code(lines: Lines) -> Found:
    """Each answer of the model is a request with the messages on the path to it.

    The lines of one answer have one message id; the last one has its usage.
    """
    above: dict[str, str | None] = {}
    said: dict[str, list[PromptContent]] = {}
    answers: dict[str, list[tuple[str, Object]]] = {}
    for source, record in json_objects(lines):
        with refusing(source):
            name = record.get("uuid")
            if name is None:
                continue
            above[name] = record.get("parentUuid") or record.get("logicalParentUuid")
            message = record.get("message")
            said[name] = list(contents(message)) if isinstance(message, Mapping) else []
            if record.get("type") == "assistant" and isinstance(message, Mapping):
                key = str(message.get("id") or record.get("requestId") or name)
                answers.setdefault(key, []).append((source, record))
    for told in answers.values():
        source, first = told[0]
        path: dict[str, None] = {}
        at = first.get("parentUuid")
        while at in above and at not in path:
            path[at] = None
            at = above[at]
        parts = [part for name in reversed(path) for part in said[name]]
        if not any(part.text for part in parts):
            continue  # Of a conversation whose beginning is in another file.
        reply = "\n".join(filter(None, (text_of(record["message"]) for _, record in told)))
        with refusing(source):
            usage = told[-1][1]["message"].get("usage")
            yield source, _line(parts, _time(first), reply, _count(usage))


def _codex(lines: Lines) -> Found:
    """Each run of the model's own items is a request with all before it."""
    items: list[PromptContent] = []
    asked: list[PromptContent] = []
    reply: list[str] = []
    begun: tuple[str, float | None] | None = None
    for source, record in _with_end(json_objects(lines)):
        with refusing(source):
            kind, payload = record.get("type"), record.get("payload") or {}
            item = payload if kind == "response_item" else {}
            own = item.get("role") == "assistant" or str(item.get("type")).endswith("_call")
            if begun and reply and (kind in ("compacted", None) or (item and not own)):
                yield begun[0], _line(asked, begun[1], "\n".join(reply))
                begun = None
            if kind == "session_meta":
                items = list(contents(payload.get("instructions") or ""))
                items += contents(payload.get("base_instructions") or "", "system")
            elif kind == "compacted":
                items = list(contents(payload.get("replacement_history") or payload.get("message")))
            elif item.get("type") != "reasoning" and item:
                if own and begun is None:
                    begun, asked, reply = (source, _time(record)), list(items), []
                found = list(contents(item))
                items += found
                reply += [part.text or "" for part in found] if own else []


def _with_end(records: Iterator[tuple[str, Object]]) -> Iterator[tuple[str, Object]]:
    """The records, and one without content that ends them."""
    source = ""
    for source, record in records:
        yield source, record
    yield source, {}


def _langsmith(source: str, run: Object) -> Found:
    for one in run.get("runs") or [run]:
        if one.get("run_type") != "llm":
            continue
        given, made = one.get("inputs") or {}, one.get("outputs") or {}
        asked = given.get("messages") or given.get("prompts") or given.get("input")
        extra = (one.get("extra") or {}).get("invocation_params") or {}
        made = made.get("output", made) if isinstance(made.get("output"), Mapping) else made
        reply: Any = made.get("generations") or made.get("choices") or made
        while isinstance(reply, list) and reply:
            reply = reply[0]
        reply = reply.get("message") or reply if isinstance(reply, Mapping) else reply
        usage = (made.get("llm_output") or {}).get("token_usage") or made.get("usage_metadata")
        count = one.get("completion_tokens") or _count(usage)
        parts = [*tools_of(extra), *contents(asked, "user")]
        yield source, _line(parts, _time(one), text_of(reply), count)


def _otel(source: str, export: Object) -> Found:
    """Spans of OTLP's JSON with contents: gen_ai.input.messages, or the older gen_ai.prompt.N."""
    scopes = [s for r in export["resourceSpans"] for s in r.get("scopeSpans") or ()]
    for span in (span for scope in scopes for span in scope.get("spans") or ()):
        found = {one["key"]: _plain(one.get("value")) for one in span.get("attributes") or ()}
        parts = [*tools_of({"tools": _parsed(found.get("gen_ai.tool.definitions"))})]
        parts += contents(_parsed(found.get("gen_ai.system_instructions")), "system")
        parts += contents(_parsed(found.get("gen_ai.input.messages")), "user")
        parts += _numbered(found, "gen_ai.prompt")
        if not parts:
            continue  # No call of a model, or one whose content was not recorded.
        reply = text_of(_parsed(found.get("gen_ai.output.messages")))
        reply = reply or "".join(p.text or "" for p in _numbered(found, "gen_ai.completion"))
        count = found.get("gen_ai.usage.output_tokens", found.get("gen_ai.usage.completion_tokens"))
        time = _seconds(span.get("startTimeUnixNano"))
        yield source, _line(parts, time, reply, int(count) if count else None)


def _plain(value: Any) -> Any:
    """A value of OTLP without its type."""
    if not isinstance(value, Mapping):
        return value
    [(kind, inner)] = list(value.items())[:1] or [("", None)]
    if kind == "arrayValue":
        return [_plain(one) for one in inner.get("values") or ()]
    if kind == "kvlistValue":
        return {one["key"]: _plain(one.get("value")) for one in inner.get("values") or ()}
    return inner


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value


def _numbered(found: Object, start: str) -> Iterator[PromptContent]:
    number = 0
    while (text := found.get(f"{start}.{number}.content")) is not None:
        yield from contents({"role": found.get(f"{start}.{number}.role"), "content": text})
        number += 1


def _sharegpt(source: str, row: Object) -> Found:
    said: list[PromptContent] = []
    for message in row["conversations"]:
        if message.get("from") in ("gpt", "assistant", "chatgpt", "bing", "bard") and said:
            yield source, _line(said, None, text_of(message))
        said = [*said, *contents(message)]


class MooncakeLine(BaseModel):
    """A request of a trace of Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release).

    Each of `hash_ids` stands for 512 tokens of the prompt after all those before them, the last one
    for what is left of `input_length`. `timestamp` is in milliseconds.
    """

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def line(self) -> PromptLine:
        """The same request. Raises ValueError where its length is not that of its ids."""
        ends = range(_MOONCAKE_TOKENS, self.input_length + _MOONCAKE_TOKENS, _MOONCAKE_TOKENS)
        if len(ends) != len(self.hash_ids):
            raise ValueError(
                f"field 'hash_ids': {len(self.hash_ids)} ids, but {self.input_length} tokens are "
                f"{len(ends)} of up to {_MOONCAKE_TOKENS}"
            )
        sizes = (_MOONCAKE_TOKENS - max(0, end - self.input_length) for end in ends)
        pairs = zip(self.hash_ids, sizes, strict=True)
        parts = [PromptContent(id=str(name), tokens=size) for name, size in pairs]
        return PromptLine(parts=parts, arrival=self.timestamp / 1000, output=self.output_length)


def _mooncake(source: str, row: Object) -> Found:
    with refusing(source):
        yield source, MooncakeLine.model_validate(row).line()


def _weka(source: str, trace: Object) -> Found:
    """Ids of `block_size` tokens, local to the trace; the last tokens of a prompt have none."""
    size, names = trace["block_size"], f"{source}/{trace.get('id')}"
    waiting = [*trace["requests"]]
    while waiting:
        one = waiting.pop(0)
        waiting = [*(one.get("requests") or ()), *waiting]
        if "hash_ids" not in one:
            continue
        ids, length = one["hash_ids"], one["in"]
        whole = ids[: length // size]
        parts = [PromptContent(id=f"{names}/{i}", tokens=size) for i in whole]
        rest = length - size * len(whole)
        parts += [PromptContent(tokens=rest)] if rest else []
        yield source, _line(parts, one.get("t"), output=one.get("out"))


def _lengths(lines: Lines) -> Found:
    """A table of lengths alone, Azure's or BurstGPT's."""
    head: list[str] = []
    for source, line in lines:
        with refusing(source):
            [row] = csv.reader([line])
            if not head:
                head = [_HEADINGS.get(name.strip(), name) for name in row]
                continue
            found = dict(zip(head, row, strict=True))
            length, output = (max(1, int(float(found[name]))) for name in ("prompt", "reply"))
            parts = [PromptContent(tokens=length)]
            yield source, _line(parts, _seconds(found["time"]), output=output)


_HEADINGS = {
    **{"TIMESTAMP": "time", "ContextTokens": "prompt", "GeneratedTokens": "reply"},
    **{"Timestamp": "time", "Request tokens": "prompt", "Response tokens": "reply"},
}

_REPR = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)"""
_RECEIVED = re.compile(
    rf"(?:Received request (\S+):|Request (\S+) details:) prompt: {_REPR}, "
    r"(?:.*?prompt_token_ids: (\[[\d, ]*\]|None))?"
)
_MADE = re.compile(r"Generated response (\S+?)(?: \(.*?\))?: .*output_token_ids: \[([\d, ]*)\]")
_CLOCK = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")


def _vllm(lines: Lines) -> Found:
    """Lines of vLLM's request log; others are passed over. A request may be cut (max_log_len)."""
    waiting: dict[str, tuple[str, list[PromptContent], float | None]] = {}
    for source, line in lines:
        with refusing(source):
            if made := _MADE.search(line):
                if made[1] in waiting:
                    place, parts, time = waiting.pop(made[1])
                    yield place, _line(parts, time, output=max(1, made[2].count(",") + 1))
                continue
            found = _RECEIVED.search(line)
            if found is None:
                if "Received request" in line and " prompt: " in line:
                    raise ValueError("a request that does not end in its line")
                continue
            ids, text = ast.literal_eval(found[4] or "None"), ast.literal_eval(found[3])
            clock = _CLOCK.search(line)
            # The log has no year; a leap year has every day.
            time = _seconds(f"2024-{clock[0]}") if clock else None
            parts = [PromptContent(tokens=ids)] if ids else list(contents(text or ""))
            waiting[found[1] or found[2]] = source, parts, time
    for place, parts, time in waiting.values():
        with refusing(place):
            yield place, _line(parts, time)


_CHAINED = "ids are chained: nothing beyond prefixes can be seen"
_BARE = "only lengths are known: nothing of what requests share can be seen"
#: Fields of the first lines of Claude Code's sessions.
_OF_CLAUDE = ("sessionId", "leafUuid", "snapshot")
_OF_SESSIONS = "system prompt and tools are not in the file, so they are not counted"


def _has(*names: str) -> Callable[[Object, str], bool]:
    return lambda record, _: not record.keys().isdisjoint(names)


def _starts(pattern: str) -> Callable[[Object, str], bool]:
    return lambda _, line: re.match(pattern, line) is not None


def _is_body(record: Object, _: str = "") -> bool:
    return _body_of(record) is not None


def _is_anthropics(record: Object, _: str) -> bool:
    return _is_body(record) and {"messages", "system"} <= (_body_of(record) or {}).keys()


READERS: tuple[Reader, ...] = (
    Reader("Claude Code sessions", "contents", _has(*_OF_CLAUDE), _claude_code, _OF_SESSIONS),
    Reader("Codex sessions", "contents", _has("payload"), _codex, _OF_SESSIONS),
    Reader("OTEL spans", "contents", _has("resourceSpans"), _objects(_otel)),
    Reader("LangSmith runs", "contents", _has("run_type", "runs"), _objects(_langsmith)),
    Reader("ShareGPT", "contents", _has("conversations"), _objects(_sharegpt)),
    Reader("WEKA", "prefixes", _has("block_size"), _objects(_weka), _CHAINED),
    Reader("Mooncake", "prefixes", _has("hash_ids"), _objects(_mooncake), _CHAINED),
    Reader("Anthropic bodies", "contents", _is_anthropics, _objects(_body)),
    Reader("OpenAI bodies", "contents", _is_body, _objects(_body)),
    Reader("Azure LLM trace", "lengths", _starts("TIMESTAMP,ContextTokens,"), _lengths, _BARE),
    Reader("BurstGPT", "lengths", _starts("Timestamp,.*Request tokens"), _lengths, _BARE),
    Reader("vLLM request log", "contents", _starts(r"(\(.*?\) )?(INFO|DEBUG|WARNING) "), _vllm),
)
