"""A small OpenAI-compatible server in the tests' process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


@dataclass
class CompletionServer:
    """Answers "yes" in two tokens; what it is asked is in `bodies`, in order of arrival.

    `takes_ids` tells whether prompts may be token ids, `cached` what it says of its cache (None:
    nothing), `fails` which prompts get HTTP 500, `pause` the seconds between the two tokens,
    `most` the most requests that were in flight at a time, `metrics` what it says at /metrics
    (None: there is no such page).
    """

    takes_ids: bool = True
    cached: int | None = None
    counts: Callable[[Any], int] = len
    fails: Callable[[Any], bool] = lambda prompt: False
    events: Callable[[list[dict[str, Any]]], list[Any]] = lambda events: events
    pause: float = 0.0
    models: tuple[str, ...] = (MODEL,)
    metrics: Callable[["CompletionServer"], str | None] = lambda server: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    url: str = ""
    most: int = 0
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entered(self, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            self._running += 1
            self.most = max(self.most, self._running)

    def left(self) -> None:
        with self._lock:
            self._running -= 1

    def stream(self, prompt: Any) -> list[Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.counts(prompt), "completion_tokens": 2}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return self.events(
            [
                {"choices": [{"text": "ye", "finish_reason": None}]},
                {"choices": [{"text": "s", "finish_reason": "length"}]},
                {"choices": [], "usage": usage},
            ]
        )


def vllm_metrics(server: CompletionServer) -> str:
    """What vLLM 0.32 writes, in part: two engines, of which one found 8 tokens of each prompt."""
    prompts = [body["prompt"] for body in server.bodies]
    tokens = sum(map(len, prompts))
    counters = {
        "prefix_cache_queries": (1000 + tokens, 0),
        "prefix_cache_hits": (500 + 8 * len(prompts), 0),
        "num_preemptions": (3 + len(prompts),),
        "prompt_tokens": (2000 + tokens,),
        "prompt_tokens_cached": (100 + 9 * len(prompts),),
    }
    lines = [
        "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25',
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.125',
        'vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e+09',
        'vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="tiny"} 0.0',
        'vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 7.0',
    ]
    for name, values in counters.items():
        lines.append(f"# TYPE vllm:{name}_total counter")
        for engine, value in enumerate(values):
            labels = f'{{engine="{engine}",model_name="tiny"}}'
            lines.append(f"vllm:{name}_total{labels} {float(value)}")
    return "\n".join(lines) + "\n"


@contextmanager
def serving(server: CompletionServer) -> Iterator[CompletionServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "tiny-server/1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            server.keys.add(self.headers.get("Authorization"))
            if self.path == "/v1/models":
                self._say(200, {"data": [{"id": model} for model in server.models]})
            elif self.path == "/version":
                self._say(200, {"version": "1.2.3"})
            elif self.path == "/metrics" and (metrics := server.metrics(server)) is not None:
                self._write(200, metrics.encode())
            else:
                self._say(404, {"error": "nothing here"})

        def do_POST(self) -> None:
            server.keys.add(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.entered(body)
            with suppress(BrokenPipeError):  # A client that does not wait any longer.
                self._answer(body["prompt"])

        def _answer(self, prompt: Any) -> None:
            if isinstance(prompt, list) and not server.takes_ids:
                server.left()
                self._say(422, {"error": "prompt must be a string"})
            elif server.fails(prompt):
                server.left()
                self._say(500, {"error": "out of\nmemory"})
            else:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for event in server.stream(prompt):
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\n\n".encode())
                    time.sleep(server.pause)
                server.left()
                self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

        def _say(self, status: int, content: object) -> None:
            self._write(status, json.dumps(content).encode())

        def _write(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
