"""TTFT of warm chunks as served, by what they were compiled after.

Chunks are known from requests before, in a new order each time; beside them stock vLLM, of whose
prompts as many tokens are new. Engine cores have processes of their own, as in a server.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.conversion import ModelTokenizer, RequestPreparer
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.launch import launch_apart
from picbench.errors import EngineError, InvalidRun
from picbench.experiments.host_cores import busy_cores
from picbench.run.measurements import Outcome, WarmChunks
from picbench.run.runner import (
    ArmsRecord,
    Cell,
    Engines,
    ExperimentPlan,
    Launcher,
    engine_of,
    facts_of,
    random_text,
    random_tokens,
    run,
    say,
)
from picbench.run.server import Server
from picbench.tables.page import WHERE, Spread, page, save, update_summary
from picbench.tables.table import NOTHING, table


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds until a request's only token, its prompt's tokens, and how many were cached.

    Of a request with chunks these are the tokens that it reuses, as the linker counts them, also
    where a chunk was compiled for it.
    """

    ms: float
    prompt: int
    cached: int

    @property
    def fresh(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt - self.cached


class ServedEngine:
    """vLLM with picbench in it (or, with `EngineConfig.stock`, without); one request at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._preparer = RequestPreparer(config, ModelTokenizer(config.model))
        self._running = launch_apart(config)

    def first_token(self, request: Request) -> FirstToken:
        """Serve a request that generates one token; time counts from its arrival here."""
        engine = self._running.engine
        prepared = self._preparer.prepare(request, self._running, 1, None, ignore_eos=True)
        began = perf_counter()
        prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
        engine.add_request(prepared.tag, prompt, prepared.sampling_params)
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        took = perf_counter() - began
        [output] = outputs
        if not output.outputs[0].token_ids:
            raise EngineError(f"no token: {output.outputs[0].stop_reason}")
        return FirstToken(1e3 * took, len(prepared.prompt_token_ids), output.num_cached_tokens or 0)

    def warm_up(self) -> None:
        """Nothing: measurements repeat what they ask, and leave the first time out."""

    def reset(self) -> None:
        """Drop all cached KV. Raises EngineError if blocks are in use."""
        if not self._running.engine.reset_prefix_cache():
            raise EngineError("the cache cannot be dropped while requests hold blocks")

    def describe(self) -> Mapping[str, object]:
        """What runs here."""
        return {"kv_blocks": self._running.pool, "context": self._running.context}

    def close(self) -> None:
        """End the engine."""
        self._running.engine.engine_core.shutdown()


def launch_served(name: str, config: EngineConfig, log: Path) -> Server:
    """Start the process of an arm called `name`, whose engine starts one for its core."""
    return Server(name, partial(_open, config), log)


def _open(config: EngineConfig) -> AbstractContextManager[Any]:
    return closing(ServedEngine(config))


#: Tokens of the text before all chunks, of a chunk, and of the question.
HEAD, CHUNK, QUESTION = 64, 504, 80

#: Chunks of a document: the last ones have more text before them than a chunk has.
SECTIONS = 4

#: Arms of the PIC engine; the first is what the others are compared with.
ARMS = (
    "mepic",
    "mepic:context=document",
    "mepic:anchored=on:context=document",
    "naive",
    "naive:anchored=on:context=document",
)
FIRST = ARMS[0]

#: Arms of stock vLLM: a prefix of the prompt is cached, and nothing of it.
HIT, FULL = "prefix hit", "full"

#: What an engine answered, by arm.
Answers = dict[str, FirstToken]

#: Answers by load of the host (`quiet`, `busy`) and by arm, repeat by repeat.
Loads = Mapping[str, Mapping[str, Sequence[FirstToken]]]

#: Milliseconds by arm, repeat by repeat.
Times = Mapping[str, Sequence[float]]


def ask_warm(engine: ServedEngine, *, name: str, chunks: int, first: bool) -> Answers:
    """Known chunks in a new order under all arms, in a new order of these, too.

    The first time, the chunks are compiled before.
    """
    order = Random(name)
    known = draw(chunks, "any")
    order.shuffle(known)
    found = {}
    for arm in order.sample(ARMS, len(ARMS)):
        if first:
            engine.first_token(ask(arm, known[::-1], f"{name} {arm} before"))
        found[arm] = engine.first_token(ask(arm, known, f"{name} {arm}"))
    return {arm: found[arm] for arm in ARMS}


def ask_stock(engine: ServedEngine, *, name: str, chunks: int, fresh: int) -> Answers:
    """A prompt with all but `fresh` tokens cached, and one with nothing cached.

    All that it may begin with is asked for before, so that no block of it was evicted since: hits
    of other lengths leave its last blocks unused, and prompts without cached tokens fill
    the pool. Raises InvalidRun if it finds another number of tokens, a block's worth apart.
    """
    known = ask("prefix", draw(chunks, "any"), "any")
    engine.first_token(known)
    tokens = tuple(chain.from_iterable(segment.tokens or () for segment in known.segments))
    prefix = Text(tokens=tokens[: len(tokens) - fresh])
    hit = engine.first_token(Request([prefix, random_text(fresh, name)], "prefix"))
    if abs(hit.fresh - fresh) >= BLOCK_SIZE and engine.config.device == "cuda":
        raise InvalidRun(f"a prefix hit computed {hit.fresh} tokens, not {fresh}")
    return {HIT: hit, FULL: engine.first_token(ask("prefix", draw(chunks, name), name))}


def draw(count: int, name: str) -> list[Chunk]:
    """Chunks of documents that have `SECTIONS` of them, each with its document up to its end."""
    tokens = [random_tokens(CHUNK, f"{name} {n}") for n in range(count)]
    return [
        Chunk(tokens=tokens[n], document=tuple(chain(*tokens[n - n % SECTIONS : n + 1])))
        for n in range(count)
    ]


def ask(algorithm: str, chunks: Sequence[Chunk], name: str) -> Request:
    """A request for chunks, with a question that no other name has."""
    return Request([random_text(HEAD, "head"), *chunks, random_text(QUESTION, name)], algorithm)


@dataclass(frozen=True, slots=True)
class WarmCell(Cell):
    """All arms on a quiet host, and on one with `busy` cores that compute something else."""

    chunks: int = 0
    busy: int = 0

    def warm_up(self, engines: Engines) -> None:
        """Serve a round that compiles the chunks."""
        self.serve(engines, 0)

    def serve(self, engines: Engines, number: int) -> dict[str, Answers]:
        """Answers by load. Which load comes first alternates, so that drift affects both alike."""
        loads = {"quiet": 0} | ({"busy": self.busy} if self.busy else {})
        found = {}
        for load in list(loads)[:: -1 if number % 2 else 1]:
            with busy_cores(loads[load]):
                found[load] = self._answers(engines, number, f"{number} {load}")
        return {load: found[load] for load in loads}

    def _answers(self, engines: Engines, number: int, name: str) -> Answers:
        given: dict[str, Any] = {"name": name, "chunks": self.chunks}
        ours: Answers = engines["picbench"].call(partial(ask_warm, first=not number, **given))
        fresh = ours[FIRST].fresh
        stock: Answers = engines["stock"].call(partial(ask_stock, fresh=fresh, **given))
        return ours | stock


def warm_plan(settings: WarmChunks) -> ExperimentPlan:
    """One cell, on two engines."""
    context = HEAD + settings.chunks * CHUNK + QUESTION + BLOCK_SIZE
    config = engine_of(
        settings,
        dtype="bfloat16",
        context=context,
        batch_tokens=8192,
        # Chunks after three different texts, and the requests' own blocks.
        kv_blocks=context // BLOCK_SIZE * (len(ARMS) + 1),
        max_requests=8,
    )
    facts = {
        "dtype": config.dtype,
        "busy_cores": settings.busy_cores,
        "chunks": settings.chunks,
        "chunk": CHUNK,
        "sections": SECTIONS,
        "head": HEAD,
        "question": QUESTION,
        "prompt_tokens": context - BLOCK_SIZE,
    }
    return ExperimentPlan(
        name="warm-chunks",
        facts=facts_of(settings) | facts,
        engines={"stock": replace(config, stock=True, algorithm="prefix"), "picbench": config},
        cells=[WarmCell("warm chunks", chunks=settings.chunks, busy=settings.busy_cores)],
        rounds=settings.repeats,
    )


def measure(settings: WarmChunks, launcher: Launcher = launch_served) -> Outcome:
    """Measure all arms, write ``warm-chunks.json`` and ``.md``, and note the ratios."""
    plan, record = warm_plan(settings), ArmsRecord(say)
    run(plan, record, say, launcher=launcher)
    loads: Any = record.found
    return Outcome(write(loads, plan.facts, settings.output))


def times_of(answers: Mapping[str, Sequence[FirstToken]]) -> dict[str, list[float]]:
    """Milliseconds by arm."""
    return {arm: [answer.ms for answer in found] for arm, found in answers.items()}


def summary_of(loads: Loads) -> dict[str, float]:
    """TTFT of the first arm, its share of a prefix hit's, and what busy cores make of it."""
    quiet = times_of(loads["quiet"])
    figures = {
        "ms": median(quiet[FIRST]),
        "vs_prefix_hit": Spread.of_ratios(quiet[FIRST], quiet[HIT]).median,
    }
    if "busy" in loads:
        busy = times_of(loads["busy"])
        figures["busy_ratio"] = Spread.of_ratios(busy[FIRST], quiet[FIRST]).median
    return figures


def write(loads: Loads, facts: Mapping[str, Any], output: Path) -> str:
    """Write the files, and the summary's figures; the page."""
    fresh = {arm: sorted({a.fresh for a in found}) for arm, found in loads["quiet"].items()}
    ttft = {load: times_of(answers) for load, answers in loads.items()}
    document = {"schema": 2, "provenance": facts, "ttft_ms": ttft, "new_tokens": fresh}
    rendered = render(loads, facts)
    save(output / "warm-chunks", document, rendered)
    update_summary(output, {"warm_ttft": summary_of(loads)})
    return rendered


def render(loads: Loads, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    quiet = times_of(loads["quiet"])
    head = ("arm", "new tokens", "TTFT, ms", f"over {FIRST}: of medians", "repeat by repeat")
    rows = [_row(arm, answers, quiet) for arm, answers in loads["quiet"].items()]
    hit = Spread.of_ratios(quiet[FIRST], quiet[HIT]).text(3)
    return page(
        f"TTFT of {facts['chunks']} warm chunks, by what they were compiled after",
        f"{WHERE.format(**facts)} {facts['prompt_tokens']:,} tokens: a text of {facts['head']}, "
        f"{facts['chunks']} chunks of {facts['chunk']} random tokens in a new order each time, "
        f"{facts['sections']} of them a document, and a question of {facts['question']}. One "
        "request at a time, arms in turn and in a new order each time, "
        f"n={len(quiet[FIRST])}. Engine cores have processes of their own. Chunks are cached; "
        f"`{HIT}` and `full` are stock vLLM, of whose prompts all but as many tokens as "
        f"`{FIRST}` computes are cached, or none.",
        "Milliseconds from the request's arrival; median (quartiles).",
        table(head, rows, right=1),
        f"`{FIRST}` takes {hit} of a prefix hit that leaves as many new tokens, repeat by repeat.",
        *(_busy(times_of(loads["busy"]), quiet, facts) if "busy" in loads else ()),
    )


def _row(arm: str, answers: Sequence[FirstToken], times: Times) -> tuple[str, ...]:
    own, first = times[arm], times[FIRST]
    fresh = sorted({answer.fresh for answer in answers})
    return (
        f"`{arm}`",
        " - ".join(f"{count:,}" for count in dict.fromkeys((fresh[0], fresh[-1]))),
        Spread.of(own).text(1),
        f"{median(own) / median(first):.3f}",
        NOTHING if arm == FIRST else Spread.of_ratios(own, first).text(3),
    )


def _busy(busy: Times, quiet: Times, facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"The same while {facts['busy_cores']} cores compute something else:"
    rows = [
        (f"`{arm}`", Spread.of(own).text(1), Spread.of_ratios(own, quiet[arm]).text(3))
        for arm, own in busy.items()
    ]
    yield table(("arm", "TTFT, ms", "over the quiet host, repeat by repeat"), rows, right=1)
