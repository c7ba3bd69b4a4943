"""Engines against the oracle: one of a model, or one of a tiny model of each architecture.

Prompts are random tokens of the model's vocabulary from a fixed seed. The last line says whether
every request agreed with the oracle.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from picbench.engines.config import DEFAULT_TIERS, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.engines.self_check import TOLERANCE
from picbench.errors import ConfigError, closest
from picbench.run.measurements import Architectures, OracleCheck, Outcome
from picbench.run.runner import random_tokens
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads import models
from picbench.workloads.models.architectures import Architecture, architectures, write

LENGTHS = {"A": 150, "B": 35, "C": 81, "D": 400}
ORDERS = ("ABCD", "DCBA", "ABA", "C")
_OPTIONS: Mapping[str, Any] = {"max_tokens": 6, "logprobs": 8, "ignore_eos": True}

#: Tokens of a prefix that is long enough to be read once for several plain requests.
PREFIX = 560

#: Tokens before a chunk in its document: more than any prompt of C alone has, so that its keys are
#: re-rotated backwards.
BEFORE = {"A": 0, "B": 150, "C": 200, "D": 30}


@dataclass(frozen=True, slots=True)
class OracleCase:
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
        "cacheblend:r=0.15": Blend(0.15),
        "cacheblend:r=0.15:deviation=k": Blend(0.15, "k"),
        "mepic:select=question": Asked(),
        "full": full(),
    }
    draw = partial(random_tokens, vocabulary=vocabulary)
    before = {name: draw(count, f"before {name}") for name, count in BEFORE.items()}
    for order in orders:
        known = mepic().anchored().within([before[name] for name in order])
        for algorithm, rule in {**rules, "mepic:anchored=on:context=document": known}.items():
            tokens = [(name, draw(LENGTHS[name], name)) for name in order]
            chunks = [Chunk(tokens=own, document=before[name] + own) for name, own in tokens]
            question = Text(tokens=draw(19, f"{order} {algorithm}"))
            segments = [Text(tokens=draw(21, "system")), *chunks, question]
            yield OracleCase(f"{algorithm} {order}", Request(segments, algorithm=algorithm), rule)
    for length in (5, 333):
        request = Request([Text(tokens=draw(length, f"plain {length}"))])
        yield OracleCase(f"plain {length}", request, full())


def added_cases(vocabulary: int, bos: int | None) -> Iterator[OracleCase]:
    """Prompts that an algorithm changes, or whose segments have positions, gaps and slots."""
    from picbench.engines.oracle import block_attention, epic_bos, kvlink, mepic, naive

    draw = partial(random_tokens, vocabulary=vocabulary)
    links = [range(first, first + 5) for first in (7, 12, 17)]
    rules = {"block-attention": block_attention(), "kvlink:n=5:first=7": kvlink(*links)}
    if bos is not None:
        rules["epic:k=4:bos=chunk"] = epic_bos(4, bos)
    a, b = (Chunk(tokens=draw(LENGTHS[name], name)) for name in "AB")
    question = Text(tokens=draw(19, "question"))
    for algorithm, rule in rules.items():
        between = Text(tokens=draw(18, f"between {algorithm}"))
        segments = [Text(tokens=draw(21, "system")), a, between, b, a, question]
        yield OracleCase(algorithm, Request(segments, algorithm=algorithm), rule)
    for algorithm, rule in {"prompt-cache": naive(), "naive": naive(), "mepic": mepic()}.items():
        placed = [
            replace(a, position=9, slots=((0, 2, 5), (70, 74, 4), (90, 90, 40))),
            replace(b, position=260),
            replace(question, position=400),
        ]
        yield OracleCase(f"{algorithm} placed", Request(placed, algorithm=algorithm), rule)


def alike_cases(vocabulary: int) -> Iterator[OracleCase]:
    """Plain prompts with one prefix, which requests that decode together may read once."""
    from picbench.engines.oracle import full

    draw = partial(random_tokens, vocabulary=vocabulary)
    prefix = draw(PREFIX, "prefix")
    for number in range(3):
        own = draw(17 + 20 * number, f"alike {number}")
        yield OracleCase(f"plain alike {number}", Request([Text(tokens=prefix + own)]), full())


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
    good = check(config, TOLERANCE[settings.dtype], added=True)
    return Outcome(f"{'all' if good else 'NOT all'} agree with the oracle", 0 if good else 1)


def check(
    config: EngineConfig,
    tolerance: float,
    orders: Sequence[str] = ORDERS,
    *,
    added: bool = False,
) -> bool:
    """Serve all cases, say a line for each, and return whether all are the oracle's.

    With `added` these are those of `added_cases` and `alike_cases`, too. Each is served three
    times: cold, with nothing cached; after other cases, whose chunks it shares; and warm, all cases
    together, when no chunk may be compiled any more. Where tokens are picked, the oracle replays
    the engine's picks; in float32 it must pick the same ones by itself.
    """
    from transformers import AutoConfig

    from picbench.engines.oracle import Oracle, distance
    from picbench.kernels.first_calls import settle_first_calls

    model = AutoConfig.from_pretrained(config.model)
    found = list(cases(model.vocab_size, orders))
    if added:
        found += added_cases(model.vocab_size, model.bos_token_id)
        found += alike_cases(model.vocab_size)
    # First, so that a model that neither knows is refused in the engine's words.
    served = _serve(config, [case.request for case in found])
    settle_first_calls()
    oracle, good = Oracle(config.model), True
    for case, *replies in zip(found, *served.values(), strict=True):
        segments = as_oracle(case.request.segments, model.pad_token_id or 0)
        own = oracle.picked(segments, case.rule) if replies[0].picked is not None else set()
        known: dict[tuple[Any, Any], Any] = {}
        for name, (result, picked) in zip(served, replies, strict=True):
            if (key := (result.tokens, picked)) not in known:
                rule = case.rule if picked is None else case.rule.replay(picked)
                known[key] = oracle.logprobs(segments, rule, result.tokens)
            assert result.logprobs is not None
            error = distance(known[key], result.logprobs)
            same = known[key].argmax(-1).tolist() == list(result.tokens)
            reused = name != "warm" or _is_warm(case, result)
            other = len(set(picked or ()) - own)
            exact = (same and not other) or config.dtype != "float32"
            right = error < tolerance and reused and exact
            good &= right
            notes = [*([] if same else ["other token"]), *([] if reused else ["nothing reused"])]
            notes += [f"{other} of {len(picked or ())} picked otherwise"] if other else []
            verdict = "ok" if right else "WRONG"
            print(f"{verdict:5} {case.name:16} {name} {error:.2e} {', '.join(notes)}")
    return good


def _is_warm(case: OracleCase, result: Result) -> bool:
    """Whether chunks were reused and none was compiled, where the algorithm reuses any."""
    chunks = any(isinstance(segment, Chunk) for segment in case.request.segments)
    if not chunks or case.request.algorithm == "full":
        return True
    return result.hits.chunk + result.hits.copied > 0 == result.counts.compiled


class _Reply(NamedTuple):
    """What an engine answered, and the tokens that it picked, if it did."""

    result: Result
    picked: tuple[int, ...] | None


def _serve(config: EngineConfig, requests: Sequence[Request]) -> dict[str, list[_Reply]]:
    cold: list[_Reply] = []
    with Engine(config) as engine:
        print(engine.describe())
        for request in requests:
            engine.reset()
            cold.append(_reply(engine, request))
        engine.reset()
        after = [_reply(engine, request) for request in requests]
        # Picks depend on a request and the KV of its chunks alone, which have not changed since.
        warm = map(_Reply, engine.generate(requests, **_OPTIONS), (reply.picked for reply in after))
        return {"cold": cold, "after": after, "warm": list(warm)}


def _reply(engine: Engine, request: Request) -> _Reply:
    engine.note_picks()
    [result] = engine.generate([request], **_OPTIONS)
    return _Reply(result, next(iter(engine.noted_picks), None))


def as_oracle(segments: Sequence[PromptSegment], placeholder: int) -> list[Any]:
    """Segments in the oracle's terms: chunks have placeholders in their slots."""
    return [_as_oracle(segment, placeholder) for segment in segments]


def _as_oracle(segment: PromptSegment, placeholder: int) -> Any:
    from picbench.engines.oracle import OracleSegment

    sent = segment.tokens or ()
    if not isinstance(segment, Chunk):
        return OracleSegment("text", sent, segment.position)
    tokens: tuple[int, ...] = ()
    slots, at = [], 0
    for start, end, length in segment.slots:
        tokens += sent[at:start]
        slots.append((len(tokens), length, sent[start:end]))
        tokens += (placeholder,) * length
        at = end
    dependent = [i for start, end in segment.dependent for i in range(start, end)]
    return OracleSegment("chunk", tokens + sent[at:], segment.position, slots, dependent)


CheckOutcome = Literal["checked", "refused", "wrong", "failed"]

#: Verdicts by exit code of ``picbench measure oracle``.
_VERDICTS: Mapping[int, CheckOutcome] = {0: "checked", 1: "wrong", ConfigError.exit_code: "refused"}

#: The line that says what became of a process.
_LINES: Mapping[CheckOutcome, str] = {
    "checked": "^all agree.*$",
    "wrong": "^WRONG.*$",
    "refused": "^picbench: (.*)$",
    "failed": "^picbench: (.*)$",
}

#: Characters of the log of a process that failed.
_TAIL = 4000


@dataclass(frozen=True, slots=True)
class ArchitectureVerdict:
    """What became of one architecture; `line` is what its process said of it."""

    name: str
    verdict: CheckOutcome
    line: str

    def is_as_tabled(self, row: Architecture, device: str) -> bool:
        """Whether it is the table's; nothing may be wrong, or fail without a reason."""
        claimed = row.gpu if device == "cuda" else row.cpu
        if claimed == "refused":
            return self.verdict == "refused" and row.why in self.line
        return self.verdict == "checked" or (claimed == "not checked" and self.verdict == "refused")


def check_architectures(settings: Architectures) -> Outcome:
    """Compare a tiny model of each architecture with the oracle, and write what was found.

    The exit code is 1 unless each is what the table says of this device, or better. Raises
    ConfigError for an unknown name.
    """
    known, only = architectures(), settings.only
    names = [row.name for row in known]
    for name in only:
        if name not in names:
            raise ConfigError(f"`only` {name}: no such architecture", hint=closest(name, names))
    chosen = [row for row in known if not only or row.name in only]
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(settings.jobs) as pool:
        # One after another: torch's generator belongs to all threads.
        models = [write(row, Path(scratch) / row.name) for row in chosen]
        checking = partial(_check, settings=settings)
        found = list(pool.map(checking, [row.name for row in chosen], models))
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    facts |= settings.model_dump(include={"device", "dtype", "eager"})
    document = {"schema": 1, "provenance": facts, "found": [asdict(row) for row in found]}
    shown = render(found, facts)
    save(settings.output / "architectures", document, shown)
    pairs = zip(found, chosen, strict=True)
    good = all(one.is_as_tabled(row, settings.device) for one, row in pairs)
    return Outcome(shown, 0 if good else 1)


def render(found: Sequence[ArchitectureVerdict], facts: Mapping[str, Any]) -> str:
    """The page: a line for each architecture, and what was measured with what."""
    lines = table(
        ("architecture", "verdict", "what was said"),
        [(row.name, row.verdict, row.line.replace("|", "/")) for row in found],
    )
    made = ", ".join(f"{name} {value}" for name, value in facts.items())
    return page("Architectures against the oracle", lines, made)


def _check(name: str, model: Path, *, settings: Architectures) -> ArchitectureVerdict:
    flags = ["--device", settings.device, "--dtype", settings.dtype]
    flags += ["--eager"] if settings.eager else []
    command = [sys.executable, "-m", "picbench", "measure", "oracle", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = judge(name, done.returncode, done.stdout, done.stderr)
    print(f"{found.verdict:8} {found.name:14} {found.line}", flush=True)
    if found.verdict == "failed":
        print(done.stderr[-_TAIL:], flush=True)
    return found


def judge(name: str, code: int, stdout: str, stderr: str) -> ArchitectureVerdict:
    """What a process's exit code and output say; vLLM logs before and after the line that counts.

    Where replies are wrong, the line is the first that says so. The error is the last line: engines
    log under the same name before it.
    """
    verdict = _VERDICTS.get(code, "failed")
    said = re.findall(_LINES[verdict], f"{stdout}\n{stderr}", re.MULTILINE)
    if not said:
        return ArchitectureVerdict(name, verdict, f"ended with exit code {code}")
    return ArchitectureVerdict(name, verdict, said[0 if verdict == "wrong" else -1])
