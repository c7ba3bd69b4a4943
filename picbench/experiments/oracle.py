"""Engines against the oracle: one of a model, or one of a tiny model of each architecture.

Prompts are random tokens of the model's vocabulary from a fixed seed. The last line says whether
every request agreed with the oracle.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from picbench.engines.algorithms import of_chunks, parse
from picbench.engines.config import DEFAULT_TIERS, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.model_config import read_model_config
from picbench.engines.request import Choice, Chunk, PromptSegment, Request, Result, Text
from picbench.engines.self_check import TOLERANCE
from picbench.engines.vllm.device import find
from picbench.errors import ConfigError, EngineError, closest
from picbench.run.measurements import Architectures, OracleCheck, Outcome
from picbench.run.runner import random_tokens
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads import models
from picbench.workloads.models.architectures import architectures, write

#: Tokens of a chunk, and before it in its document: before C more than any prompt of C alone has,
#: so that its keys are re-rotated backwards.
LENGTHS = {"A": (150, 0), "B": (35, 150), "C": (81, 200), "D": (400, 30)}
ORDERS = ("ABCD", "DCBA", "ABA", "C")


#: That of the request whose scores of chunks are divided.
TEMPERATURE = 0.7

#: By how many nats answers of quantised weights may differ: 0.022 was seen of INT8 in float32,
#: where most are within 2e-6, and other prompts differ by 1 and more.
ROUNDED = 0.05

#: The way of serving in which requests bring their replies.
FORCED = "forced"

#: A result, and the tokens that were picked, if any were.
Reply = tuple[Result, tuple[int, ...] | None]


class OracleCase(NamedTuple):
    """A request, the oracle's rule for it, and what it tests."""

    name: str
    request: Request
    rule: Any


def cases(vocabulary: int, orders: Sequence[str] = ORDERS) -> Iterator[OracleCase]:
    """Plain prompts and each algorithm over chunks in several orders."""
    from picbench.engines.oracle import Asked, Blend, epic, full, mepic, naive

    rules = {
        "naive": naive(),
        "epic:k=16": epic(16),
        "mepic": mepic(),
        "auto": mepic(),
        "cacheblend:r=0.15": Blend(0.15),
        "cacheblend:r=0.15:deviation=k": Blend(0.15, "k"),
        "mepic:select=question": Asked(),
        "prophetkv:r=0.2": Asked(share=0.2),
        "full": full(),
    }
    draw = partial(random_tokens, vocabulary=vocabulary)
    before = {name: draw(count, f"before {name}") for name, (_, count) in LENGTHS.items()}
    tokens = {name: draw(count, name) for name, (count, _) in LENGTHS.items()}
    chunks = {name: Chunk(tokens=t, document=before[name] + t) for name, t in tokens.items()}
    for order in orders:
        known = mepic().anchored().within([before[name] for name in order])
        for algorithm, rule in {**rules, "mepic:anchor=head:context=document": known}.items():
            question = Text(tokens=draw(19, f"{order} {algorithm}"))
            segments = [Text(tokens=draw(21, "system")), *(chunks[n] for n in order), question]
            yield OracleCase(f"{algorithm} {order}", Request(segments, algorithm=algorithm), rule)
    for length in (5, 333):
        request = Request([Text(tokens=draw(length, f"plain {length}"))])
        yield OracleCase(f"plain {length}", request, full())


def added_cases(vocabulary: int, bos: int | None) -> Iterator[OracleCase]:
    """Prompts that an algorithm changes, or whose segments have positions, gaps and slots.

    The last are plain and have one prefix, long enough to be read once for all of them.
    """
    from picbench.engines import oracle

    draw = partial(random_tokens, vocabulary=vocabulary)
    links = [range(first, first + 5) for first in (7, 12, 17)]
    rules = {"block-attention": oracle.block_attention()}
    rules["kvlink:n=5:first=7"] = oracle.kvlink(*links)
    if bos is not None:
        rules["epic:k=4:bos=chunk"] = oracle.epic_bos(4, bos)
    a, b = (Chunk(tokens=draw(LENGTHS[name][0], name)) for name in "AB")
    question = Text(tokens=draw(19, "question"))
    for algorithm, rule in rules.items():
        between = Text(tokens=draw(18, f"between {algorithm}"))
        segments = [Text(tokens=draw(21, "system")), a, between, b, a, question]
        yield OracleCase(algorithm, Request(segments, algorithm=algorithm), rule)
    placed = [
        replace(a, position=9, slots=((0, 2, 5), (70, 74, 4), (90, 90, 40))),
        replace(b, position=260),
        replace(question, position=400),
    ]
    for algorithm in ("prompt-cache", "naive", "mepic"):
        rule = oracle.mepic() if algorithm == "mepic" else oracle.naive()
        yield OracleCase(f"{algorithm} placed", Request(placed, algorithm=algorithm), rule)
    prefix = draw(560, "prefix")
    for number in range(3):
        text = Text(tokens=prefix + draw(17 + 20 * number, f"alike {number}"))
        yield OracleCase(f"plain alike {number}", Request([text]), oracle.full())


def tempered_case(vocabulary: int) -> OracleCase:
    """A prompt whose scores of chunks are divided, over chunks of the others."""
    from picbench.engines.oracle import naive

    draw = partial(random_tokens, vocabulary=vocabulary)
    chunks = [Chunk(tokens=draw(LENGTHS[name][0], name)) for name in "DBA"]
    segments = [Text(tokens=draw(21, "system")), *chunks, Text(tokens=draw(19, "question"))]
    request = Request(segments, algorithm=f"ape:temperature={TEMPERATURE}")
    return OracleCase("ape", request, replace(naive().anchored(), temperature=TEMPERATURE))


def measure(settings: OracleCheck) -> Outcome:
    """Compare an engine with the oracle; exit code 1 where any request differs."""
    config = EngineConfig(
        model=str(models.resolve(settings.model).path),
        asynchronous=not settings.synchronous,
        tiers=DEFAULT_TIERS["cpu"],  # Tiers are off by default on a GPU, and checked all the same.
        context=2048,
        batch_tokens=512,
        max_requests=32,
        **settings.model_dump(exclude={"model", "synchronous"}),
    )
    if "quantization_config" in read_model_config(config.model):
        good, reference = check_quantised(config), "stock vLLM"
    else:
        good, reference = check(config, TOLERANCE[settings.dtype], added=True), "the oracle"
    return Outcome(f"{'all' if good else 'NOT all'} agree with {reference}", 0 if good else 1)


def check_quantised(config: EngineConfig) -> bool:
    """Serve prompts in ways that must give stock vLLM's answers; whether all do, a line for each.

    Hugging Face's models compute with quantised weights in other ways than vLLM's kernels, whose
    own answers are therefore the reference: full recompute, and a prefix that was cached
    (`picbench.engines.self_check`). Kernels that round what comes into a layer may round a number
    of it to the next one where sums differ in their last digit, in stock vLLM as here. So answers
    may differ by `ROUNDED`, and by twice what stock's computed ones and those after a prefix do.
    """
    with Engine(replace(config, stock=True, algorithm="prefix", tiers="")) as stock:
        known = stock.checked_prompts()
    with Engine(config) as engine:
        print(engine.describe())
        found = engine.self_check(known).comparisons
    rounded = max(ROUNDED, 2 * known.rounding)
    limits = [max(c.limit, rounded) if c.control < inf else c.limit for c in found]
    right = [c.difference <= limit for c, limit in zip(found, limits, strict=True)]
    for c, good, limit in zip(found, right, limits, strict=True):
        print(f"{'ok' if good else 'WRONG':5} {c.name} {c.difference:.2e}, at most {limit:.2e}")
    return all(right)


def check(
    config: EngineConfig, tolerance: float, orders: Sequence[str] = ORDERS, *, added: bool = False
) -> bool:
    """Serve all cases, say a line for each, and return whether all are the oracle's.

    With `added` these are those of `added_cases`, too. Each is served four times: cold, with
    nothing cached; after other cases, whose chunks it shares; warm, all cases together, when no
    chunk may be compiled any more; and so with a reply that is forced. Where tokens are picked, the
    oracle replays the engine's picks; in float32 it must pick the same ones by itself.
    """
    from transformers import AutoConfig

    from picbench.engines.oracle import Oracle, distance
    from picbench.kernels.first_calls import settle_first_calls

    model = AutoConfig.from_pretrained(config.model).get_text_config()
    found = list(cases(model.vocab_size, orders))
    if added:
        found += added_cases(model.vocab_size, model.bos_token_id)
        if (model.rope_parameters or {}).get("partial_rotary_factor", 1) == 1:
            found.append(tempered_case(model.vocab_size))
            config = replace(config, temperatures=(TEMPERATURE,))
    # First, so that a model that neither knows is refused in the engine's words.
    served = _serve(config, [case.request for case in found])
    settle_first_calls()
    oracle, good = Oracle(config.model, config.context), True
    for case, *replies in zip(found, *served.values(), strict=True):
        segments = as_oracle(case.request.segments, model.pad_token_id or 0)
        own = oracle.picked(segments, case.rule) if replies[0][1] is not None else set()
        chunks = any(isinstance(segment, Chunk) for segment in case.request.segments)
        reuses = chunks and case.request.algorithm != "full"
        known: dict[tuple[Any, ...], Any] = {}
        for name, (result, picked) in zip(served, replies, strict=True):
            if result.choice is not None:
                given = as_served(case.request, result.choice).segments
                segments = as_oracle(given, model.pad_token_id or 0)
            if (key := (result.tokens, picked, result.choice and result.choice.texts)) not in known:
                rule = case.rule if picked is None else replace(case.rule, picked=picked)
                known[key] = oracle.logprobs(segments, rule, result.tokens)
            assert result.logprobs is not None
            error = distance(known[key], result.logprobs)
            same = name == FORCED or known[key].argmax(-1).tolist() == list(result.tokens)
            notes = [] if same else ["other token"]
            if other := len(set(picked or ()) - own):
                notes.append(f"{other} of {len(picked or ())} picked otherwise")
            right = error < tolerance and (not notes or config.dtype != "float32")
            reused = result.hits.chunk + result.hits.copied > 0 == result.counts.compile_work
            text = result.choice is not None and result.choice.texts
            if name == "warm" and reuses and not (reused or text):
                notes.append("nothing reused")
                right = False
            good &= right
            verdict = "ok" if right else "WRONG"
            print(f"{verdict:5} {case.name:16} {name} {error:.2e} {', '.join(notes)}")
    return good


def _serve(config: EngineConfig, requests: Sequence[Request]) -> dict[str, list[Reply]]:
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": 8, "ignore_eos": True}
    with Engine(replace(config, forced_replies=True)) as engine:

        def ask(request: Request, *, cold: bool = False) -> Reply:
            if cold:
                engine.reset()
            engine.note_picks()
            [result] = engine.generate([request], **options)
            return result, next(iter(engine.noted_picks), None)

        print(engine.describe())
        cold = [ask(request, cold=True) for request in requests]
        engine.reset()
        after = [ask(request) for request in requests]
        # Picks depend on a request and the KV of its chunks alone, which have not changed since.
        picks = [picked for _, picked in after]
        warm = engine.generate(requests, **options)
        replies = [reply.tokens[::-1] for reply in warm]
        given = [replace(r, reply=reply) for r, reply in zip(requests, replies, strict=True)]
        forced = engine.generate(given, **options)
        if [reply.tokens for reply in forced] != replies:
            raise EngineError("a reply has other tokens than were forced")
        together = {"warm": warm, FORCED: forced}
        served = {n: list(zip(found, picks, strict=True)) for n, found in together.items()}
        return {"cold": cold, "after": after, **served}


def as_served(request: Request, choice: Choice | None) -> Request:
    """The request that says itself how it was served, in place of one under ``auto``."""
    if choice is None or request.algorithm is None:
        return request
    segments, number = list[PromptSegment](), -1
    for segment in request.segments:
        number += isinstance(segment, Chunk)
        if isinstance(segment, Chunk) and number in choice.texts:
            segment = Text(segment.text, segment.tokens, segment.position)
        segments.append(segment)
    algorithm = of_chunks(parse(request.algorithm)).spec
    return replace(request, segments=segments, algorithm=algorithm)


def as_oracle(segments: Sequence[PromptSegment], placeholder: int) -> list[Any]:
    """Segments in the oracle's terms: chunks have placeholders in their slots."""
    from picbench.engines.oracle import OracleSegment

    found = []
    for segment in segments:
        sent = segment.tokens or ()
        if not isinstance(segment, Chunk):
            found.append(OracleSegment("text", sent, segment.position))
            continue
        tokens: tuple[int, ...] = ()
        slots, at = [], 0
        for start, end, length in segment.slots:
            tokens += sent[at:start]
            slots.append((len(tokens), length, sent[start:end]))
            tokens += (placeholder,) * length
            at = end
        dependent = [i for start, end in segment.dependent for i in range(start, end)]
        tokens += sent[at:]
        found.append(OracleSegment("chunk", tokens, segment.position, slots, dependent))
    return found


def check_architectures(settings: Architectures) -> Outcome:
    """Compare a tiny model of each architecture with the oracle, and write what was found.

    The exit code is 1 unless each is what the table says of this device, or better: nothing may be
    wrong, or fail without a reason. Raises ConfigError for an unknown name, and for a device that
    vLLM does not serve here.
    """
    known, only = {row.name: row for row in architectures()}, settings.only
    for name in only:
        if name not in known:
            raise ConfigError(f"`only` {name}: no such architecture", hint=closest(name, known))
    chosen = [row for name, row in known.items() if not only or name in only]
    device = find(settings.device).name
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(settings.jobs) as pool:
        # One after another: torch's generator belongs to all threads.
        models = [write(row, Path(scratch) / row.name) for row in chosen]
        types = (row.dtypes.get(device, settings.dtype) for row in chosen)
        asked = [settings.model_copy(update={"dtype": dtype}) for dtype in types]
        found = list(pool.map(_check, [row.name for row in chosen], models, asked))
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    facts |= settings.model_dump(include={"device", "dtype", "eager"})
    rows = [(row["name"], row["verdict"], row["line"].replace("|", "/")) for row in found]
    lines = table(("architecture", "verdict", "what was said"), rows)
    made = ", ".join(f"{name} {value}" for name, value in facts.items())
    shown = page("Architectures against the oracle", lines, made)
    document = {"schema": 1, "provenance": facts, "found": found}
    save(settings.output / "architectures", document, shown)
    good = True
    for one, row in zip(found, chosen, strict=True):
        claimed, verdict = row.gpu if device == "cuda" else row.cpu, one["verdict"]
        if claimed == "refused":
            good &= verdict == "refused" and row.why in one["line"]
        else:
            good &= verdict == "checked" or (claimed == "not checked" and verdict == "refused")
    return Outcome(shown, 0 if good else 1)


def _check(name: str, model: Path, settings: Architectures) -> dict[str, str]:
    """Name, verdict and line of an architecture, by the exit code and output of its process.

    vLLM logs before and after the line that counts. Where replies are wrong, it is the first that
    says so; an error is the last, as engines log under the same name before it.
    """
    flags = ["--device", settings.device, "--dtype", settings.dtype]
    flags += ["--eager"] if settings.eager else []
    command = [sys.executable, "-m", "picbench", "measure", "oracle", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kinds = {0: "checked", 1: "wrong", ConfigError.exit_code: "refused"}
    verdict = kinds.get(done.returncode, "failed")
    patterns = {"checked": "^all agree.*$", "wrong": "^WRONG.*$"}
    pattern = patterns.get(verdict, "^picbench: (.*)$")
    said = re.findall(pattern, f"{done.stdout}\n{done.stderr}", re.MULTILINE)
    said = said[:1] if verdict == "wrong" else said[-1:]
    line = said[0] if said else f"ended with exit code {done.returncode}"
    print(f"{verdict:8} {name:14} {line}", flush=True)
    if verdict == "failed":
        print(done.stderr[-4000:], flush=True)
    return {"name": name, "verdict": verdict, "line": line}
