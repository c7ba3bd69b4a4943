"""What became of a prompt, in the `usage` of a server's answer and in a header.

Engines tell it with the first output of a request that asks for it (`scheduler/usage.py`), as
`kv_transfer_params`, which vLLM's servers only pass on in answers that are not streamed.
`UsageMiddleware` (vLLM's flag `--middleware`) puts it where clients look for token counts.

Upstream: vllm/v1/engine/output_processor.py of vLLM 0.32.0. `RequestState.make_request_output`
(line 306) is extended: other outputs than the first have its `kv_transfer_params`, too. So is
`OutputProcessor.do_tracing` (877): with `--otlp-traces-endpoint` a request that is told of has a
span `pic_prompt` beside vLLM's `llm_request`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picbench.engines.vllm.compat import extend
from picbench.engines.vllm.frontend.request_args import ARGS

#: Reports of the prompts of one HTTP request, by vLLM's ids.
Reports = dict[str, dict[str, Any]]

#: The reports of the HTTP request that is being answered: servers have a task for each, whose
#: context all tasks that it starts have.
_REPORTS: ContextVar[Reports | None] = ContextVar("_REPORTS", default=None)

#: Upstream `RequestState.make_request_output`.
_OF_OUTPUT = (
    "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, "
    "ec_transfer_params, error"
)

#: Upstream `OutputProcessor.do_tracing`.
_OF_TRACING = "self, engine_core_output, req_state, iteration_stats"


def keep_usage() -> None:
    """Have all outputs of a request, of its samples and its trace tell what the first one does."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    def keeping(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = upstream(self, *args, **kwargs)
        given = kwargs.get("kv_transfer_params") or (args[4] if len(args) > 4 else None)
        # A prompt with several samples is one prompt: the first sample computed it.
        keeper = self.parent_req or self
        if given and ARGS in given:
            keeper.pic_usage = getattr(keeper, "pic_usage", given[ARGS])
        if output is not None and (report := getattr(keeper, "pic_usage", None)):
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), ARGS: report}
        return output

    extend(RequestState, "make_request_output", keeping, _OF_OUTPUT)
    extend(OutputProcessor, "do_tracing", _traced, _OF_TRACING)


def _traced(upstream: Any, self: Any, output: Any, state: Any, stats: Any) -> None:
    """Trace a request that has ended, and its prompt: from its arrival to the first token."""
    from vllm.tracing import extract_trace_context, instrument_manual

    upstream(self, output, state, stats)
    if report := getattr(state.parent_req or state, "pic_usage", None):
        told = {**report, "loaded_tokens": sum(report["loaded_tokens"].values())}
        began, took = state.stats.arrival_time, state.stats.first_token_latency
        instrument_manual(
            span_name="pic_prompt",
            start_time=int(began * 1e9),
            end_time=int((began + took) * 1e9),
            attributes={f"pic.{name}": told[name] for name in _numbers(told)},
            context=extract_trace_context(output.trace_headers),
        )


def note_usage(output: Any) -> None:
    """Note what a `RequestOutput` tells, where a server's request is being answered."""
    reports, told = _REPORTS.get(), output.kv_transfer_params
    if reports is not None and told and ARGS in told:
        reports[output.request_id] = told[ARGS]


def joined(reports: Reports) -> dict[str, Any]:
    """The reports of all prompts of a request as one; chunks have the number of their prompt."""
    # vLLM numbers the prompts at the end of their ids.
    ordered = [reports[name] for name in sorted(reports, key=lambda name: (len(name), name))]
    if len(ordered) == 1:
        return ordered[0]
    every: dict[str, Any] = {name: sum(r[name] for r in ordered) for name in _numbers(ordered[0])}
    loaded = sum((Counter(report["loaded_tokens"]) for report in ordered), Counter[str]())
    chunks = [{"prompt": n, **c} for n, report in enumerate(ordered) for c in report["chunks"]]
    return every | {"loaded_tokens": dict(loaded), "chunks": chunks}


def header(report: Mapping[str, Any]) -> str:
    """A report's tokens in short: ``hit=1234; prefix=16; loaded=0; compiled=0; ...``."""
    found = {name.removesuffix("_tokens"): report[name] for name in _numbers(report)}
    found = {"hit": found.pop("chunk_hit"), "prefix": found.pop("prefix_hit")} | found
    found["loaded"] = sum(report["loaded_tokens"].values())
    return "; ".join(f"{name}={count}" for name, count in found.items())


class UsageMiddleware:
    """ASGI middleware that adds `usage.pic`, and the header `x-pic` where nothing is streamed.

    Answers of requests that do not ask for it pass through unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reports: Reports = {}
        _REPORTS.set(reports)
        start: Message | None = None
        body = b""

        async def tell(message: Message) -> None:
            nonlocal start, body
            if not reports or not message["type"].startswith("http."):
                await send(message)
            elif message["type"] == "http.response.start":
                # vLLM has the whole answer before it begins to send JSON.
                kind = MutableHeaders(raw=message["headers"]).get("content-type", "")
                if kind.startswith("application/json"):
                    start = message
                else:
                    await send(message)
            elif start is None:
                await send({**message, "body": _with_events(message.get("body", b""), reports)})
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    body = _with_usage(start, body, joined(reports))
                    await send(start)
                    await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, tell)


def _with_usage(start: Message, body: bytes, report: dict[str, Any]) -> bytes:
    """A whole answer with a report, which the headers of its start have in short."""
    answer = json.loads(body)
    if _add(answer, report):
        body = _dumped(answer)
    headers = {"content-length": str(len(body)), "x-pic": header(report)}
    MutableHeaders(scope=start).update(headers)
    return body


def _with_events(body: bytes, reports: Reports) -> bytes:
    """Whole server-sent events, in which the last usage has the reports."""
    if b'"usage"' not in body:
        return body
    lines = body.decode().split("\n")
    for number, line in enumerate(lines):
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            # With `continuous_usage_stats`, events with text have a usage of their own.
            if not event.get("choices") and _add(event, joined(reports)):
                lines[number] = f"data: {_dumped(event).decode()}"
    return "\n".join(lines).encode()


def _add(answer: Any, report: dict[str, Any]) -> bool:
    """Add a report to an answer's usage, or to that of the response in an event; if it has one."""
    if not isinstance(answer, dict):
        return False
    found = answer if answer.get("usage") else answer.get("response")
    if not isinstance(found, dict) or not isinstance(found.get("usage"), dict):
        return False
    found["usage"]["pic"] = report
    params = found.get("kv_transfer_params")
    if params:
        found["kv_transfer_params"] = {k: v for k, v in params.items() if k != ARGS} or None
    return True


def _numbers(report: Mapping[str, Any]) -> Iterable[str]:
    return [name for name, value in report.items() if isinstance(value, int)]


def _dumped(answer: Any) -> bytes:
    """JSON as vLLM's servers write it."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
