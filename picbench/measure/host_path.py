"""What picbench adds to a request and to a step on the host, part by part.

One engine serves a prompt of many chunks that are cached, alone, under algorithms that compile them
after different texts; under the first of them it then decodes. The methods by which vLLM calls
picbench are timed meanwhile, each without those among them that it calls, and vLLM's own way of a
request beside them. On a GPU a method's time is that of the host, which queues work and waits only
where the code says so.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk
from picbench.measure.engine.interleaved import ArmFigures, run_interleaved
from picbench.measure.report import save, spread
from picbench.measure.warm.warm_chunks import ARMS, CHUNK, HEAD, QUESTION, SECTIONS, ask, draw
from picbench.output import markdown, provenance
from picbench.workloads import models

#: Tokens of the reply whose steps are timed.
REPLY = 64

_LINKER = "picbench.engines.vllm.scheduler.linker.Linker"
_PLANNER = "picbench.engines.vllm.scheduler.planner.RequestPlanner"
_CLIENT = "picbench.engines.vllm.transfer.tier_client.TierClient"
_CUDA = "picbench.engines.vllm.worker.cuda.model_state.PicModelState"
_CALLS = "picbench.engines.vllm.worker.cuda.metadata.AttentionCalls"
_REWRITE = "picbench.engines.vllm.scheduler.rewrite"

_UNTIL = "until scheduled"
_TAKE, _SCHEDULE = "vLLM: take a request", "vLLM: schedule"

#: vLLM's own part of a request's way, from its arrival to the end of the step's scheduling.
AROUND: Mapping[str, str] = {
    _TAKE: "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
    _SCHEDULE: "vllm.v1.core.sched.scheduler.Scheduler.schedule",
}

#: What is timed on both devices, and what besides on a GPU: a name for the part, and its method.
PARTS: Mapping[str, str] = {
    "check": "picbench.engines.vllm.frontend.limits.check_request",
    "plan": f"{_PLANNER}.plan_early",
    "plan: arrival": f"{_LINKER}.on_arrival",
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
    # Of all layers; of a step that decodes a graph holds it.
    "worker: start attention": f"{_CALLS}.attend",
}


@dataclass(slots=True)
class PartTimes:
    """Seconds by part; a part does not count in the one that calls it.

    `began` and `ended` are the first time that a part began and the last time that it ended.
    """

    clock: Callable[[], float] = perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose time is added to the part."""

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = self.clock()
            self.began.setdefault(part, began)
            try:
                return method(*args, **kwargs)
            finally:
                self.ended[part] = self.clock()
                took = self.ended[part] - began
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

    By part, and of all of picbench's; `until scheduled` are those from arrival to the end of the
    first step's scheduling, `step whole` those of the whole engine. Figures of arms but the first
    have the arm in their names. The arms come in another order in each repeat.
    """
    order, known = random.Random(name), draw(chunks, "any")
    order.shuffle(known)
    found: dict[str, float] = {}
    for arm in order.sample(ARMS, len(ARMS)):
        if name.endswith(" 0"):  # the repeat that warms up: compile the chunks first
            before = ask(arm, known[::-1], f"{name} {arm} before")
            engine.generate([before], max_tokens=1, ignore_eos=True)
        request, steps = _timed(engine, arm, known, f"{name} {arm}")
        found |= {name_of(arm, figure): value for figure, value in request.items()}
        # Where steps are scheduled ahead, a reply of one token ends in a second one.
        found |= steps if arm == ARMS[0] else {}
    return found


def name_of(arm: str, figure: str) -> str:
    """What a figure of an arm is called."""
    return figure if arm == ARMS[0] else f"{arm}: {figure}"


def _timed(
    engine: Engine, arm: str, chunks: Sequence[Chunk], name: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a request by part; of the first arm also microseconds of later steps."""
    ours = {**PARTS, **(CUDA_PARTS if engine.describe()["device"] == "cuda" else {})}
    with timing({**AROUND, **ours}) as times:
        reply = REPLY if arm == ARMS[0] else 1
        tag = engine.submit(ask(arm, chunks, name), max_tokens=reply, ignore_eos=True)
        ended = dict(engine.step())
        until = times.ended[_SCHEDULE] - times.began[_TAKE]
        first, steps = times.take(), list[float]()
        while tag not in ended:
            began = perf_counter()
            ended |= engine.step()
            steps.append(perf_counter() - began)
        later = times.take()
    engine.drain()
    request = {f"request {part}": 1e3 * seconds for part, seconds in first.items()}
    request["request all parts"] = 1e3 * sum(first.get(part, 0.0) for part in ours)
    request[f"request {_UNTIL}"] = 1e3 * until
    if not steps:
        return request, {}
    found = {f"step {part}": 1e6 * later.get(part, 0.0) / len(steps) for part in ours}
    found["step all parts"] = sum(found.values())
    return request, found | {"step whole": 1e6 * statistics.median(steps)}


def measure(
    model: str, device: str, repeats: int, chunks: int, commit: str | None, output: Path
) -> str:
    """Measure, write ``host-path.json`` and ``host-path.md``, and return the page."""
    found_model = models.resolve(model)
    context = HEAD + chunks * CHUNK + QUESTION + REPLY
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        context=context,
        batch_tokens=8192,
        # Chunks after three different texts, and the requests' own blocks.
        kv_blocks=context // BLOCK_SIZE * (len(ARMS) + 1),
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


def render(found: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    figures = found["picbench"]
    parts = [*PARTS, *CUDA_PARTS, "all parts"]
    requests = [[part, *_of_arms(figures, f"request {part}", 3)] for part in parts]
    around = [[part, *_of_arms(figures, f"request {part}", 3)] for part in (*AROUND, _UNTIL)]
    steps = [(part, spread(figures.get(f"step {part}"), 1)) for part in (*parts, "whole")]
    share = statistics.median(figures["step all parts"]) / statistics.median(figures["step whole"])
    lines = [
        "# What picbench adds on the host",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, vLLM "
        f"{facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. One request at a "
        f"time, of {facts['chunks']} cached chunks of {CHUNK} tokens in a new order, {SECTIONS} of "
        f"them a document, n={len(figures['step whole'])}. Median (lowest - highest).",
        "",
        "Milliseconds of a request until its first token, by algorithm:",
        "",
        markdown.table(
            ("part", *(f"`{arm}`" for arm in ARMS)), [*_known(requests), *_known(around)], right=1
        ),
        "",
        f"`{_UNTIL}` is the time from arrival to the end of the first step's scheduling. What is "
        "vLLM's own does not count in `all parts`.",
        "",
        f"Microseconds of each of the steps that decode {REPLY} tokens, under `{ARMS[0]}`:",
        "",
        markdown.table(("part", "a step, us"), _known(steps), right=1),
        "",
        f"picbench's share of a step that decodes is {100 * share:.1f} %.",
    ]
    return "\n".join(lines) + "\n"


def _of_arms(figures: Mapping[str, Sequence[float]], figure: str, digits: int) -> list[str]:
    return [spread(figures.get(name_of(arm, figure)), digits) for arm in ARMS]


def _known(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """The rows of parts that there were: on a CPU a GPU's are missing."""
    return [row for row in rows if set(row[1:]) != {"-"}]
