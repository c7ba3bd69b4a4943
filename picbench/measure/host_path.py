"""What picbench adds to a request and to a step on the host, part by part.

One engine serves a prompt of many chunks that are cached, alone, and then decodes. The methods by
which vLLM calls picbench are timed meanwhile, each without those among them that it calls. On a GPU
a method's time is that of the host, which queues work and waits only where the code says so.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.measure.engine.interleaved import Found, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import save, spread
from picbench.output import markdown, provenance
from picbench.workloads import models

#: Tokens of a chunk and of the question, and of the reply, whose steps are timed.
CHUNK, QUESTION, REPLY = 512, 80, 64

_LINKER = "picbench.engines.vllm.scheduler.linker.Linker"
_CLIENT = "picbench.engines.vllm.transfer.tier_client.TierClient"
_CUDA = "picbench.engines.vllm.worker.cuda.model_state.PicModelState"
_REWRITE = "picbench.engines.vllm.scheduler.rewrite"

#: What is timed on both devices, and what besides on a GPU: a name for the part, and its method.
PARTS: Mapping[str, str] = {
    "plan": f"{_LINKER}.on_arrival",
    "plan: rewrite and slot map": f"{_REWRITE}.apply_plan",
    "request chunks": f"{_LINKER}.before_schedule",
    "schedule: chunks there?": f"{_LINKER}.can_schedule",
    "schedule: count and use": f"{_LINKER}.on_scheduled",
    "end: orphans": f"{_LINKER}.orphans",
    "transfers: start": f"{_CLIENT}.start",
    "transfers: finish": f"{_CLIENT}.finish_loads",
    "transfers: results": f"{_CLIENT}.take_results",
}
CUDA_PARTS: Mapping[str, str] = {
    "worker: read slot map": f"{_CUDA}.add_request",
    "worker: begin step": f"{_CUDA}.begin_step",
    "worker: positions": f"{_CUDA}.prepare_inputs",
    "worker: plan attention": f"{_CUDA}.prepare_attn",
}


@dataclass(slots=True)
class PartTimes:
    """Seconds by part; a part does not count in the one that calls it."""

    clock: Callable[[], float] = perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose time is added to the part."""

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = self.clock()
            try:
                return method(*args, **kwargs)
            finally:
                took = self.clock() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return run

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


@contextmanager
def timing(parts: Mapping[str, str]) -> Iterator[PartTimes]:
    """Time methods, given by dotted name, of the engines in this process."""
    times = PartTimes()
    with ExitStack() as stack:
        for part, name in parts.items():
            owner, attribute = name.rsplit(".", 1)
            method = getattr(_resolved(owner), attribute)
            stack.enter_context(patch(name, times.timed(part, method)))
        yield times


def _resolved(name: str) -> Any:
    from pkgutil import resolve_name

    return resolve_name(name)


def host_path(engine: Engine, name: str, *, chunks: int) -> dict[str, float]:
    """Milliseconds of a request until its first token, and microseconds of a step that decodes.

    By part, and of all; the first token's are of the whole engine, queue and GPU included.
    """
    drawn = [Chunk(tokens=random_tokens(CHUNK, f"{name} {i}")) for i in range(chunks)]
    engine.generate([_ask(drawn, f"{name} before")], max_tokens=1, ignore_eos=True)
    parts = {**PARTS, **(CUDA_PARTS if engine.describe()["device"] == "cuda" else {})}
    with timing(parts) as times:
        tag = engine.submit(_ask(drawn[::-1], name), max_tokens=REPLY, ignore_eos=True)
        engine.step()
        first, steps = times.take(), []
        ended: Mapping[str, object] = {}
        while tag not in ended:
            began = perf_counter()
            ended = engine.step()
            steps.append(perf_counter() - began)
        later = times.take()
    engine.drain()
    found = {f"request {part}": 1e3 * seconds for part, seconds in first.items()}
    found |= {f"step {part}": 1e6 * later.get(part, 0.0) / len(steps) for part in parts}
    found["request all parts"] = 1e3 * sum(first.values())
    found["step all parts"] = 1e6 * sum(later.values()) / len(steps)
    return found | {"step whole": 1e6 * statistics.median(steps)}


def _ask(chunks: list[Chunk], name: str) -> Request:
    return Request([*chunks, Text(tokens=random_tokens(QUESTION, name))], "mepic")


def measure(
    model: str, device: str, repeats: int, chunks: int, commit: str | None, output: Path
) -> str:
    """Measure, write ``host-path.json`` and ``host-path.md``, and return the page."""
    found_model = models.resolve(model)
    context = chunks * CHUNK + QUESTION + REPLY
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        context=context,
        batch_tokens=8192,
        kv_blocks=3 * context // BLOCK_SIZE,
        max_requests=8,
        tiers="",
    )
    work = {"host path": partial(host_path, chunks=chunks)}
    found = run_interleaved({"picbench": config}, work, repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype, "chunks": chunks}
    page = render(found, facts)
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / "host-path", document, page)
    return page


def render(found: Found, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    figures = found["picbench"]
    names = [*PARTS, *CUDA_PARTS, "all parts", "whole"]
    rows = [
        (part, spread(figures.get(f"request {part}"), 3), spread(figures.get(f"step {part}"), 1))
        for part in names
        if f"request {part}" in figures or f"step {part}" in figures
    ]
    share = statistics.median(figures["step all parts"]) / statistics.median(figures["step whole"])
    lines = [
        "# What picbench adds on the host",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, vLLM "
        f"{facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. One request of "
        f"{facts['chunks']} cached chunks of {CHUNK} tokens under `mepic`, alone, and {REPLY} "
        f"tokens of a reply, n={len(figures['step whole'])}. Median (lowest - highest).",
        "",
        markdown.table(("part", "a request, ms", "a step, us"), rows, right=1),
        "",
        f"picbench's share of a step that decodes is {100 * share:.1f} %.",
    ]
    return "\n".join(lines) + "\n"
