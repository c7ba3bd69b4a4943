"""The page and the file of the 2x2 ablation, `rope_pad_ablation`: ratios within repeats, scores."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.experiments.engines import ArmFigures, Measure, random_tokens, run_interleaved
from picbench.experiments.page import Spread, save
from picbench.run.schedule import to_request
from picbench.run.workload import load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.tables import table as markdown
from picbench.workloads import models
from picbench.workloads.testbed import DATASETS, answer, model_path
from picbench.workloads.testbed.prompt import dataset

#: The engines: keys cached as the device serves them fastest, or all of them without RoPE.
DEFAULT, FUSED = "default", "fused"

#: Algorithms by kind of pad, the default first.
PADS: Mapping[str, str] = {"masked": "mepic", "paper": "mepic:pad=paper"}

#: A ratio is called negligible if both quartiles are within this of 1.
NEGLIGIBLE = 0.02

#: How each engine caches keys, by device.
_KEYS = {
    "cuda": {
        DEFAULT: "with RoPE, re-rotated by the shift",
        FUSED: "without RoPE, rotated in the kernel",
    },
    "cpu": {
        DEFAULT: "chunks' without RoPE, others with it",
        FUSED: "without RoPE, rotated when read",
    },
}


@dataclass(frozen=True, slots=True)
class PairedScores:
    """Scores of a cell on rows that the default cell answered, too.

    `difference` is the mean of the cell's less the default's, `error` its standard error, and
    `changed` how many rows have another score.
    """

    mean: float
    difference: float
    error: float
    changed: int
    n: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "PairedScores":
        """Compare two rows or more."""
        apart = [a - b for a, b in zip(ours, theirs, strict=True)]
        error = stdev(apart) / sqrt(len(apart))
        changed = sum(map(bool, apart))
        return cls(fmean(ours), fmean(apart), error, changed, len(apart))


def write(timed: ArmFigures, scored: ArmFigures, facts: Mapping[str, Any], output: Path) -> str:
    """Write ``rope-pad-ablation.json`` and ``.md``; return the page."""
    document = {
        "schema": 1,
        "provenance": facts,
        "timed": timed,
        "ratios": {f"{k} {p}": _all_ratios(timed, k, p) for k, p in _cells()},
        "scores": {f"{k} {p}": asdict(paired_scores(scored, k, p)) for k, p in _cells()},
        "scored": {key: {n: v[0] for n, v in rows.items()} for key, rows in scored.items()},
    }
    page = render(timed, scored, facts)
    save(output / "rope-pad-ablation", document, page)
    return page


def ratios(timed: ArmFigures, keys: str, figure: str, base: str) -> Spread:
    """A figure of an engine over the default engine's `base`, repeat by repeat."""
    ours, theirs = timed[keys][figure], timed[DEFAULT][base]
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def paired_scores(scored: ArmFigures, keys: str, pad: str, name: str = "") -> PairedScores:
    """A cell's scores on all rows, or on those of one data set, against the default cell's."""
    rows = [key.partition(" ")[2] for key in scored[keys] if key.startswith(f"{pad} {name}")]
    ours = [scored[keys][f"{pad} {row}"][0] for row in rows]
    return PairedScores.of(ours, [scored[DEFAULT][f"masked {row}"][0] for row in rows])


def render(timed: ArmFigures, scored: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    return "\n".join(
        [
            "# RoPE in attention or before it, pads masked or counted",
            "",
            _caption(facts),
            "",
            "## Chunks that are cached",
            "",
            _times(timed, facts),
            "",
            "## No chunks",
            "",
            _plain(timed, facts),
            "",
            "## Scores",
            "",
            "Mean score on the testbed's rows; in the last columns the difference to the default "
            "cell with its standard error, and rows with another score.",
            "",
            _scores(scored, facts),
            "",
            "## Is the overhead negligible?",
            "",
            *_verdict(timed, scored),
            "",
        ]
    )


def _cells() -> Iterator[tuple[str, str]]:
    return product((DEFAULT, FUSED), PADS)


def _all_ratios(timed: ArmFigures, keys: str, pad: str) -> dict[str, Any]:
    figures = ("ttft_ms", "tpot_ms", "blocks", "own_blocks")
    return {f: asdict(ratios(timed, keys, f"{pad} {f}", f"masked {f}")) for f in figures}


def _caption(facts: Mapping[str, Any]) -> str:
    asked = facts["settings"]
    return (
        f"{facts['gpu']}, driver {facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, "
        f"commit {facts['commit']}; {asked['dtype']}{', eager' if asked['eager'] else ''}; "
        f"{facts['cores']} cores, load average {facts['load'][2]:.1f} over the last 15 minutes. "
        f"Times and blocks: {asked['model']}, {asked['chunks']} cached chunks of {facts['chunk']} "
        f"random tokens in a new order, a question of {facts['question']}, a reply of "
        f"{facts['reply']}, one request at a time; n={asked['repeats']} repeats after one that is "
        "not kept. Two engines were up at once and took turns in every repeat, each with both "
        "kinds of pad in random order. Figures are medians with quartiles; ratios are taken "
        "within a repeat, against the default cell (first row)."
    )


def _times(timed: ArmFigures, facts: Mapping[str, Any]) -> str:
    head = ["keys", "pads", "TTFT, ms", "ratio", "time per token, ms", "ratio"]
    head += ["KV blocks", "its own", "MiB", "linked tokens"]
    rows = []
    for keys, pad in _cells():
        row = [_keys(facts, keys), pad]
        for figure in ("ttft_ms", "tpot_ms"):
            row.append(_spread(Spread.of(timed[keys][f"{pad} {figure}"])))
            row.append(_spread(ratios(timed, keys, f"{pad} {figure}", f"masked {figure}"), 3))
        blocks = median(timed[keys][f"{pad} blocks"])
        own = median(timed[keys][f"{pad} own_blocks"])
        row += [f"{blocks:,.0f}", f"{own:,.0f}", _mebibytes(blocks, facts)]
        rows.append([*row, f"{median(timed[keys][f'{pad} linked']):,.0f}"])
    return markdown.table(head, rows, right=2)


def _plain(timed: ArmFigures, facts: Mapping[str, Any]) -> str:
    rows = []
    for keys in (DEFAULT, FUSED):
        row = [_keys(facts, keys)]
        for figure in ("ttft_ms", "tpot_ms"):
            row.append(_spread(Spread.of(timed[keys][figure])))
            row.append(_spread(ratios(timed, keys, figure, figure), 3))
        rows.append([*row, f"{max(timed[keys]['workspace_mib']):,.0f}"])
    head = ["keys", "TTFT, ms", "ratio", "time per token, ms", "ratio", "beside the pool, MiB"]
    about = (
        f"A prompt of {facts['plain']:,} random tokens of which nothing is cached; and the memory "
        "that attention held by then beside the KV pool, for all that was timed."
    )
    return f"{about}\n\n{markdown.table(head, rows, right=1)}"


def _scores(scored: ArmFigures, facts: Mapping[str, Any]) -> str:
    names = [name for name in DATASETS if any(f" {name} " in key for key in scored[DEFAULT])]
    rows = []
    for keys, pad in _cells():
        means = [paired_scores(scored, keys, pad, f"{name} ").mean for name in names]
        whole = paired_scores(scored, keys, pad)
        row = [_keys(facts, keys), pad, *(f"{mean:.3f}" for mean in means), f"{whole.mean:.3f}"]
        rows.append(
            [*row, f"{whole.difference:+.3f} ± {whole.error:.3f}", f"{whole.changed} of {whole.n}"]
        )
    return markdown.table(["keys", "pads", *names, "all", "difference", "changed"], rows, right=2)


def _verdict(timed: ArmFigures, scored: ArmFigures) -> Iterator[str]:
    figures = {"time to the first token": "ttft_ms", "time per token": "tpot_ms"}
    yield "MEPIC says of rotating keys in attention that its overhead is negligible. Here:"
    yield ""
    for name, figure in figures.items():
        found = ratios(timed, FUSED, f"masked {figure}", f"masked {figure}")
        yield f"- {name} after cached chunks, every key without RoPE: {_judged(found)};"
    for name, figure in figures.items():
        yield f"- {name} without chunks: {_judged(ratios(timed, FUSED, figure, figure))};"
    for name, figure in {**figures, "KV blocks of a request": "blocks"}.items():
        found = ratios(timed, DEFAULT, f"paper {figure}", f"masked {figure}")
        yield f"- {name}, the paper's pads: {_judged(found)};"
    pads, keys = paired_scores(scored, DEFAULT, "paper"), paired_scores(scored, FUSED, "masked")
    yield (
        f"- score: {pads.difference:+.3f} ± {pads.error:.3f} with the paper's pads, "
        f"{keys.difference:+.3f} ± {keys.error:.3f} with every key without RoPE (n={pads.n})."
    )


def _judged(found: Spread) -> str:
    if max(found.q75 - 1, 1 - found.q25) <= NEGLIGIBLE:
        word = "negligible"
    elif found.q25 > 1:
        word = "more"
    else:
        word = "less" if found.q75 < 1 else "not to be told from 1 in this spread"
    return f"{_spread(found, 3)} of the default's, {word}"


def _keys(facts: Mapping[str, Any], keys: str) -> str:
    return _KEYS[facts["settings"]["device"]][keys]


def _spread(found: Spread, digits: int = 1) -> str:
    ends = (found.median, found.q25, found.q75)
    middle, low, high = (f"{number:,.{digits}f}" for number in ends)
    return f"{middle} ({low} - {high})"


def _mebibytes(blocks: float, facts: Mapping[str, Any]) -> str:
    each = facts["block_bytes"]
    return f"{blocks * each / 2**20:,.1f}" if each else "-"


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
