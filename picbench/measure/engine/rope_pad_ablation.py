"""MEPIC's two choices taken apart: where keys get RoPE, and whether pads count. A 2x2 ablation.

Two engines are up at once, one that caches every key without RoPE and rotates it in attention, as
MEPIC (arXiv 2512.16822, section on fused RoPE attention) describes it, and picbench's default. Both
serve ``mepic`` with masked pads, which take no positions, and with the paper's, which are tokens
like any other. Times and blocks are those of one prompt of random tokens whose chunks are cached,
in the same order for all four cells of a repeat; scores are of the testbed's rows.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.inputs.workload import load_workload
from picbench.measure.engine.interleaved import Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.engine.rope_pad_report import DEFAULT, FUSED, PADS, write
from picbench.output import provenance
from picbench.run.config import parse_config
from picbench.run.protocol import to_request
from picbench.workloads import models
from picbench.workloads.testbed import DATASETS, answer, model_path
from picbench.workloads.testbed.testbed_prompt import dataset

#: Tokens of a chunk (half of its last block is pads), of the question, and of the timed reply.
CHUNK, QUESTION, REPLY = 504, 80, 64

#: A block of text, another one in each repeat: orders that begin alike would share linked blocks.
HEAD = BLOCK_SIZE

#: A plain prompt, which has no chunks, is as long as a quarter of the chunks.
PLAIN_SHARE = 4

#: Rows that are served at once.
AT_ONCE = 60


@dataclass(frozen=True, slots=True)
class AblationSettings:
    """`model` is timed on prompts of `chunks` chunks; the testbed answers `rows` of each set."""

    model: str
    device: str
    dtype: str
    chunks: int = 64
    repeats: int = 9
    rows: int = 50
    eager: bool = False


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A row of a data set as a request, and its right answers."""

    dataset: str
    row: int
    request: Request
    answers: tuple[str, ...]


def times(engine: Engine, name: str, *, chunks: int) -> dict[str, float]:
    """Milliseconds, blocks and linked tokens of one warm prompt under both kinds of pad."""
    kinds = list(PADS)
    random.Random(f"pads {name}").shuffle(kinds)
    found: dict[str, float] = {}
    for pad in kinds:
        found |= {f"{pad} {key}": value for key, value in _warm(engine, name, pad, chunks).items()}
    return found


def _warm(engine: Engine, name: str, pad: str, count: int) -> dict[str, float]:
    """One prompt whose chunks are cached, in an order that the engine has not seen."""
    chunks = [Chunk(tokens=random_tokens(CHUNK, f"chunk {i}")) for i in range(count)]
    engine.generate([_prompt(chunks, "", PADS[pad])], max_tokens=1)
    random.Random(name).shuffle(chunks)
    engine.measure()
    result = _timed(engine, _prompt(chunks, name, PADS[pad]))
    held = max(snapshot.referenced for snapshot in engine.memory)
    blocks = {"blocks": held, "own_blocks": held - result.hits.chunk}
    return _milliseconds(result) | blocks | {"linked": float(result.counts.linked)}


def plain(engine: Engine, name: str, *, tokens: int) -> dict[str, float]:
    """One prompt without chunks and with nothing cached; memory that attention holds by itself."""
    prompt = Text(tokens=random_tokens(tokens, f"plain {name}"))
    result = _timed(engine, Request([prompt], "prefix"))
    return _milliseconds(result) | {"workspace_mib": engine.workspace_bytes / 2**20}


def scores(engine: Engine, name: str, *, prompts: Sequence[ScoredPrompt]) -> dict[str, float]:
    """The score of each row under both kinds of pad."""
    found: dict[str, float] = {}
    for pad, algorithm in PADS.items():
        asked = [replace(prompt.request, algorithm=algorithm) for prompt in prompts]
        for prompt, result in zip(prompts, engine.generate(asked), strict=True):
            reply = answer(prompt.dataset, result.text)
            score = dataset(prompt.dataset).score(reply, prompt.answers)
            found[f"{pad} {prompt.dataset} {prompt.row}"] = score
    return found


def measure(settings: AblationSettings, commit: str | None, output: Path) -> str:
    """Measure all cells, write ``rope-pad-ablation.json`` and ``.md``, and return the page."""
    model = models.resolve(settings.model)
    config = timed_config(settings, str(model.path))
    measures: dict[str, Measure] = {
        "chunks": partial(times, chunks=settings.chunks),
        "no chunks": partial(plain, tokens=settings.chunks // PLAIN_SHARE * CHUNK),
    }
    timed = run_interleaved(_engines(config), measures, settings.repeats)
    rows = list(_rows(settings.rows))
    groups: dict[str, Measure] = {
        f"rows from {start}": partial(scores, prompts=rows[start : start + AT_ONCE])
        for start in range(0, len(rows), AT_ONCE)
    }
    scored = run_interleaved(_engines(_scored_config(settings)), groups, 1, warm_up=False)
    named = (*provenance.ENGINE, "cores", "load")
    facts = provenance.facts(*named, device=settings.device, commit=commit)
    facts |= {"settings": asdict(settings) | {"model": model.label}}
    facts |= {"block_bytes": _block_bytes(config), "chunk": CHUNK, "question": QUESTION}
    facts |= {"plain": settings.chunks // PLAIN_SHARE * CHUNK, "reply": REPLY}
    return write(timed, scored, facts, output)


def timed_config(settings: AblationSettings, path: str) -> EngineConfig:
    """The default engine for the timed prompts, with room for all chunks under both pads."""
    context = settings.chunks * (CHUNK + BLOCK_SIZE) + QUESTION + REPLY + 4 * BLOCK_SIZE
    return EngineConfig(
        model=path,
        device=settings.device,
        dtype=settings.dtype,
        eager=settings.eager,
        context=context,
        batch_tokens=8192,
        kv_blocks=5 * context // BLOCK_SIZE,
        max_requests=8,
        tiers="",
    )


def _scored_config(settings: AblationSettings) -> EngineConfig:
    return EngineConfig(
        model=str(model_path()),
        device=settings.device,
        dtype=settings.dtype,
        eager=settings.eager,
        kv_blocks=4096,
        tiers="",
    )


def _engines(config: EngineConfig) -> Mapping[str, EngineConfig]:
    return {DEFAULT: config, FUSED: replace(config, keys_without_rope=True)}


def _rows(count: int) -> Iterator[ScoredPrompt]:
    for name in DATASETS:
        wanted = {"algo": ("mepic",), "dataset": name, "limit": count}
        for number, sample in enumerate(load_workload(parse_config(wanted)).samples):
            yield ScoredPrompt(name, number, to_request(sample), sample.answers)


def _prompt(chunks: Sequence[Chunk], name: str, algorithm: str) -> Request:
    head = Text(tokens=random_tokens(HEAD, f"head {name}"))
    question = Text(tokens=random_tokens(QUESTION, f"question {name}"))
    return Request([head, *chunks, question], algorithm)


def _timed(engine: Engine, request: Request) -> Result:
    [result] = engine.generate([request], max_tokens=REPLY, ignore_eos=True)
    return result


def _milliseconds(result: Result) -> dict[str, float]:
    timings = result.timings
    return {"ttft_ms": timings.ttft * 1e3, "tpot_ms": (timings.tpot or 0.0) * 1e3}


def _block_bytes(config: EngineConfig) -> int:
    """Bytes of a KV block in all layers; 0 if the model's configuration does not tell."""
    footprint = GpuFootprint.of(config, read_model_config(config.model))
    return footprint.block if footprint else 0
