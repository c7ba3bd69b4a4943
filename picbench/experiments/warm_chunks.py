"""Cores that compute something else while an engine is measured.

Run as ``python -m picbench.experiments.warm_chunks PARENT``, it keeps one core busy until it is
ended or its parent, given by its process id, is.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.conversion import ModelTokenizer, RequestPreparer
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.launch import launch_apart
from picbench.errors import EngineError, InvalidRun
from picbench.experiments.engines import random_tokens, started_engines
from picbench.experiments.page import Spread, save, update_summary
from picbench.run.server import Server, end_with_parent
from picbench.store import provenance
from picbench.tables import table as markdown
from picbench.workloads import models

_READY = b"spinning\n"


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep this many cores busy, from the first line of the context to its last."""
    module = "picbench.experiments.warm_chunks"
    command = (sys.executable, "-P", "-m", module, str(os.getpid()))
    spinning = list[subprocess.Popen[bytes]]()
    try:
        spinning += (subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count))
        for process in spinning:
            assert process.stdout is not None
            if process.stdout.readline() != _READY:
                raise OSError(f"{module} ended")
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.communicate()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while True:
        pass


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


#: A core is quiet if its loop takes at most so many times as long as the shortest one that was
#: seen. On an H200's host small steps take no longer up to there; from 1.6 on 1.2 times as long.
_QUIET = 1.35

#: A loop, and how many of them the shortest is of: an interrupt makes one of them longer.
_LOOP, _LOOPS = range(5_000), 3


class QuietCores:
    """Moves the calling thread to a quiet core. It may use all of its cores before and afterwards.

    `shortest` is the shortest loop of others on this machine: all cores may be busy at the moment.
    `cores` are those of the thread, `move` moves it to one of them, `probe` gives the seconds that
    a short loop takes on the one where it is.
    """

    def __init__(
        self,
        shortest: float = inf,
        cores: Sequence[int] | None = None,
        move: Callable[[int], None] | None = None,
        probe: Callable[[], float] | None = None,
    ) -> None:
        self._cores = _own_cores() if cores is None else cores
        self._move, self._probe = move or _move, probe or time_loop
        self._others = cycle(self._cores)
        self.shortest = min(shortest, *self._probes())

    def settle(self) -> bool:
        """Stay on a quiet core, or look for one; whether there is one."""
        if self._is_quiet():
            return True
        for core in islice(self._others, len(self._cores)):
            self._move(core)
            if self._is_quiet():
                return True
        return False

    def _probes(self) -> Iterator[float]:
        """How long the loop takes here, and on each core."""
        yield self._probe()
        for core in self._cores:
            self._move(core)
            yield self._probe()

    def _is_quiet(self) -> bool:
        took = self._probe()
        self.shortest = min(self.shortest, took)
        return took <= _QUIET * self.shortest


def time_loop() -> float:
    """Seconds of a short loop of Python, which needs nothing but its core."""
    return min(_time_once() for _ in range(_LOOPS))


def _time_once() -> float:
    began, total = time.perf_counter(), 0
    for number in _LOOP:
        total += number
    return time.perf_counter() - began


def _own_cores() -> tuple[int, ...]:
    """The cores that this thread may use; none where the system cannot say, or move it."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def _move(core: int) -> None:
    """Move this thread to a core, which it may leave again; it stays where a core has gone."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return
    os.sched_setaffinity(0, allowed)


#: The arm that others are compared with, and stock vLLM's that it is compared with.
FIRST, HIT_ARM = "mepic", "prefix hit"

#: Answers by load of the host (`quiet`, `busy`) and by arm, repeat by repeat.
Loads = dict[str, dict[str, list[FirstToken]]]

#: Milliseconds by arm, repeat by repeat.
Times = Mapping[str, Sequence[float]]


def times_of(answers: Mapping[str, Sequence[FirstToken]]) -> dict[str, list[float]]:
    """Milliseconds by arm."""
    return {arm: [answer.ms for answer in found] for arm, found in answers.items()}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Ratios of times in the same repeat."""
    return Spread.of([one / other for one, other in zip(above, below, strict=True)])


def summary_of(loads: Loads) -> dict[str, float]:
    """TTFT of the first arm, its share of a prefix hit's, and what busy cores make of it."""
    quiet = times_of(loads["quiet"])
    figures = {
        "ms": median(quiet[FIRST]),
        "vs_prefix_hit": ratios(quiet[FIRST], quiet[HIT_ARM]).median,
    }
    if "busy" in loads:
        busy = times_of(loads["busy"])
        figures["busy_ratio"] = ratios(busy[FIRST], quiet[FIRST]).median
    return figures


def write(loads: Loads, facts: Mapping[str, Any], output: Path) -> None:
    """Write the files, and the summary's figures."""
    fresh = {arm: sorted({a.fresh for a in found}) for arm, found in loads["quiet"].items()}
    ttft = {load: times_of(answers) for load, answers in loads.items()}
    document = {"schema": 2, "provenance": facts, "ttft_ms": ttft, "new_tokens": fresh}
    save(output / "warm-chunks", document, render(loads, facts))
    update_summary(output, {"warm_ttft": summary_of(loads)})


def render(loads: Loads, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    quiet = times_of(loads["quiet"])
    lines = [
        f"# TTFT of {facts['chunks']} warm chunks, by what they were compiled after",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. {facts['prompt_tokens']:,} tokens: a text of {facts['head']}, "
        f"{facts['chunks']} chunks of {facts['chunk']} random tokens in a new order each time, "
        f"{facts['sections']} of them a document, and a question of {facts['question']}. One "
        "request at a time, arms in turn and in a new order each time, "
        f"n={len(quiet[FIRST])}. Engine cores have processes of their own. Chunks are cached; "
        f"`{HIT_ARM}` and `full` are stock vLLM, of whose prompts all but as many tokens as "
        f"`{FIRST}` computes are cached, or none.",
        "",
        "Milliseconds from the request's arrival; median (quartiles).",
        "",
        markdown.table(
            ("arm", "new tokens", "TTFT, ms", f"over {FIRST}: of medians", "repeat by repeat"),
            [_row(arm, loads["quiet"][arm], quiet) for arm in quiet],
            right=1,
        ),
        "",
        f"`{FIRST}` takes {_quartiles(ratios(quiet[FIRST], quiet[HIT_ARM]), 3)} of a prefix hit "
        "that leaves as many new tokens, repeat by repeat.",
    ]
    if "busy" in loads:
        lines += ["", *_busy(times_of(loads["busy"]), quiet, facts)]
    return "\n".join(lines) + "\n"


def _row(arm: str, answers: Sequence[FirstToken], times: Times) -> tuple[str, ...]:
    own, first = times[arm], times[FIRST]
    fresh = sorted({answer.fresh for answer in answers})
    return (
        f"`{arm}`",
        " - ".join(f"{count:,}" for count in dict.fromkeys((fresh[0], fresh[-1]))),
        _quartiles(Spread.of(own), 1),
        f"{median(own) / median(first):.3f}",
        "-" if arm == FIRST else _quartiles(ratios(own, first), 3),
    )


def _busy(busy: Times, quiet: Times, facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"`{arm}`", _quartiles(Spread.of(own), 1), _quartiles(ratios(own, quiet[arm]), 3))
        for arm, own in busy.items()
    ]
    head = ("arm", "TTFT, ms", "over the quiet host, repeat by repeat")
    told = f"The same while {facts['busy_cores']} cores compute something else:"
    return [told, "", markdown.table(head, rows, right=1)]


def _quartiles(spread: Spread, digits: int) -> str:
    numbers = (f"{number:,.{digits}f}" for number in (spread.median, spread.q25, spread.q75))
    return "{} ({} - {})".format(*numbers)


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

#: Arms of stock vLLM: a prefix of the prompt is cached, and nothing of it.
HIT, FULL = "prefix hit", "full"

#: What an engine answered, by arm.
Answers = dict[str, FirstToken]


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """What is measured; on `busy` cores something else runs in half of the measurements."""

    model: str
    device: str
    repeats: int
    chunks: int
    busy: int


def ask_warm(engine: ServedEngine, *, name: str, chunks: int, first: bool) -> Answers:
    """Known chunks in a new order under all arms, in a new order of these, too.

    The first time, the chunks are compiled before.
    """
    order = random.Random(name)
    known = draw(chunks, "any")
    order.shuffle(known)
    found = {}
    for arm in order.sample(ARMS, len(ARMS)):
        if first:
            engine.first_token(ask(arm, known[::-1], f"{name} {arm} before"))
        found[arm] = engine.first_token(ask(arm, known, f"{name} {arm}"))
    return {arm: found[arm] for arm in ARMS}


def ask_stock(engine: ServedEngine, *, name: str, chunks: int, fresh: int) -> Answers:
    """A prompt of which all but `fresh` tokens are cached, and one of which nothing is.

    All that it may begin with is asked for before, so that no block of it was evicted since: hits
    of other lengths leave its last blocks unused, and prompts of which nothing is cached fill the
    pool. Raises InvalidRun if it finds another number of tokens, a block's worth apart.
    """
    known = ask("prefix", draw(chunks, "any"), "any")
    engine.first_token(known)
    tokens = tuple(chain.from_iterable(segment.tokens or () for segment in known.segments))
    prefix = Text(tokens=tokens[: len(tokens) - fresh])
    hit = engine.first_token(Request([prefix, Text(tokens=random_tokens(fresh, name))], "prefix"))
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
    head = Text(tokens=random_tokens(HEAD, "head"))
    question = Text(tokens=random_tokens(QUESTION, name))
    return Request([head, *chunks, question], algorithm)


def measure(settings: WarmSettings, commit: str | None, output: Path) -> None:
    """Measure all arms, write ``warm-chunks.json`` and ``.md``, and note the ratios."""
    found_model = models.resolve(settings.model)
    context = HEAD + settings.chunks * CHUNK + QUESTION + BLOCK_SIZE
    config = EngineConfig(
        model=str(found_model.path),
        device=settings.device,
        dtype="bfloat16",
        context=context,
        batch_tokens=8192,
        # Chunks after three different texts, and the requests' own blocks.
        kv_blocks=context // BLOCK_SIZE * (len(ARMS) + 1),
        max_requests=8,
        tiers="",
    )
    stock = replace(config, stock=True, algorithm="prefix")
    configs = {"stock": stock, "picbench": config}
    with started_engines(configs, launch_served) as (engines, described):
        for name, what in described.items():
            print(name, what, flush=True)
        loads = _alternate(engines, settings)
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype, "busy_cores": settings.busy}
    facts |= {"chunks": settings.chunks, "chunk": CHUNK, "sections": SECTIONS}
    facts |= {"head": HEAD, "question": QUESTION, "prompt_tokens": context - BLOCK_SIZE}
    write(loads, facts, output)


def _alternate(engines: Mapping[str, Server], settings: WarmSettings) -> Loads:
    """All answers, repeat by repeat; those of the first repeat are not kept."""
    loads: Loads = {"quiet": {}, **({"busy": {}} if settings.busy else {})}
    for repeat in range(settings.repeats + 1):
        began = perf_counter()
        # Which load comes first alternates, so that drift affects both alike.
        for load in list(loads)[:: -1 if repeat % 2 else 1]:
            with busy_cores(settings.busy if load == "busy" else 0):
                for answers in _answers(engines, settings, repeat, load):
                    for arm, answer in answers.items() if repeat else ():
                        loads[load].setdefault(arm, []).append(answer)
        if not repeat:
            left = settings.repeats * (perf_counter() - began)
            print(f"{settings.repeats} repeats, at most {left:.0f} s", flush=True)
    return loads


def _answers(
    engines: Mapping[str, Server], settings: WarmSettings, repeat: int, load: str
) -> Iterator[Answers]:
    given: dict[str, Any] = {"name": f"{repeat} {load}", "chunks": settings.chunks}
    ours: Answers = engines["picbench"].call(partial(ask_warm, first=not repeat, **given))
    yield ours
    yield engines["stock"].call(partial(ask_stock, fresh=ours[ARMS[0]].fresh, **given))
