"""The 2x2 ablation: keys rotated in attention or before it, and pads masked or counted.

Two engines, one of each way to cache keys, are up at once; each serves both kinds of pad. Times and
blocks are of warm prompts of random tokens, scores of the testbed's rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import sqrt
from random import Random
from statistics import fmean, median, stdev
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.engines.request import Chunk, Request, Result
from picbench.experiments.engine_speed import times_of
from picbench.run.measurements import Outcome, RopePadAblation
from picbench.run.runner import (
    ArmFigures,
    ArmsRecord,
    ExperimentPlan,
    Launcher,
    Measure,
    engine_of,
    facts_of,
    interleaved,
    random_chunks,
    random_text,
    run,
    say,
)
from picbench.run.schedule import to_request
from picbench.run.workload import load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.tables.page import Found, Spread, page, save
from picbench.tables.table import NOTHING, table
from picbench.workloads.testbed import DATASETS, answer, model_path
from picbench.workloads.testbed.prompt import dataset

#: The engines: keys cached as the device serves them fastest, or all of them without RoPE.
DEFAULT, FUSED = "default", "fused"

#: Algorithms by kind of pad, the default first.
PADS: Mapping[str, str] = {"masked": "mepic", "paper": "mepic:pad=paper"}

#: Engine and kind of pad.
VARIANTS = tuple(product((DEFAULT, FUSED), PADS))

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

#: Tokens of a chunk (half of its last block is pads), of the question, and of the timed reply.
CHUNK, QUESTION, REPLY = 504, 80, 64

#: A block of text, another one in each repeat: orders that begin alike would share linked blocks.
HEAD = BLOCK_SIZE

#: A plain prompt, which has no chunks, is as long as a quarter of the chunks.
PLAIN_SHARE = 4

#: Rows that are served at once.
AT_ONCE = 60


def _plain_tokens(settings: RopePadAblation) -> int:
    """Tokens of a prompt without chunks."""
    return settings.chunks // PLAIN_SHARE * CHUNK


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
    Random(f"pads {name}").shuffle(kinds)
    found: dict[str, float] = {}
    for pad in kinds:
        found |= {f"{pad} {key}": value for key, value in _warm(engine, name, pad, chunks).items()}
    return found


def _warm(engine: Engine, name: str, pad: str, count: int) -> dict[str, float]:
    """One prompt whose chunks are cached, in an order that the engine has not seen."""
    chunks = random_chunks(count, CHUNK, "chunk")
    engine.generate([_prompt(chunks, "", PADS[pad])], max_tokens=1)
    Random(name).shuffle(chunks)
    engine.measure()
    result = _timed(engine, _prompt(chunks, name, PADS[pad]))
    held = max(snapshot.referenced for snapshot in engine.memory)
    blocks = {"blocks": held, "own_blocks": held - result.hits.chunk}
    return times_of(result) | blocks | {"linked": float(result.counts.linked)}


def plain(engine: Engine, name: str, *, tokens: int) -> dict[str, float]:
    """One prompt without chunks and with nothing cached; memory that attention holds by itself."""
    result = _timed(engine, Request([random_text(tokens, f"plain {name}")], "prefix"))
    return times_of(result) | {"workspace_mib": engine.workspace_bytes / 2**20}


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


def _prompt(chunks: Sequence[Chunk], name: str, algorithm: str) -> Request:
    head, question = random_text(HEAD, f"head {name}"), random_text(QUESTION, f"question {name}")
    return Request([head, *chunks, question], algorithm)


def _timed(engine: Engine, request: Request) -> Result:
    [result] = engine.generate([request], max_tokens=REPLY, ignore_eos=True)
    return result


def measure(settings: RopePadAblation, launcher: Launcher | None = None) -> Outcome:
    """Measure all variants, and write ``rope-pad-ablation.json`` and ``.md``."""
    config = timed_config(settings)
    timed, scored = ArmsRecord(say), ArmsRecord(say)
    run(timed_plan(settings, config), timed, say, launcher=launcher)
    run(scored_plan(settings), scored, say, launcher=launcher)
    facts = ablation_facts(settings, config)
    found = document(timed.found, scored.found, facts)
    rendered = render(timed.found, scored.found, facts)
    save(settings.output / "rope-pad-ablation", found, rendered)
    return Outcome(rendered)


def timed_config(settings: RopePadAblation) -> EngineConfig:
    """The default engine for the timed prompts, with room for all chunks under both pads."""
    context = settings.chunks * (CHUNK + BLOCK_SIZE) + QUESTION + REPLY + 4 * BLOCK_SIZE
    return engine_of(
        settings,
        eager=settings.eager,
        context=context,
        batch_tokens=8192,
        kv_blocks=5 * context // BLOCK_SIZE,
        max_requests=8,
    )


def timed_plan(settings: RopePadAblation, config: EngineConfig) -> ExperimentPlan:
    """Prompts with and without chunks."""
    measures: dict[str, Measure] = {
        "chunks": partial(times, chunks=settings.chunks),
        "no chunks": partial(plain, tokens=_plain_tokens(settings)),
    }
    return interleaved("timed", {}, _engines(config), measures, settings.repeats)


def scored_plan(settings: RopePadAblation) -> ExperimentPlan:
    """All rows, some at a time, once."""
    config = engine_of(settings, model=str(model_path()), eager=settings.eager, kv_blocks=4096)
    rows = list(_rows(settings.rows))
    measures: dict[str, Measure] = {
        f"rows from {start}": partial(scores, prompts=rows[start : start + AT_ONCE])
        for start in range(0, len(rows), AT_ONCE)
    }
    return interleaved("scored", {}, _engines(config), measures, 1, warm_up=False)


def _engines(config: EngineConfig) -> Mapping[str, EngineConfig]:
    return {DEFAULT: config, FUSED: replace(config, keys_without_rope=True)}


def _rows(count: int) -> Iterator[ScoredPrompt]:
    for name in DATASETS:
        wanted = {"algo": ("mepic",), "dataset": name, "limit": count}
        for number, sample in enumerate(load_workload(parse_config(wanted)).samples):
            yield ScoredPrompt(name, number, to_request(sample), sample.answers)


def ablation_facts(settings: RopePadAblation, config: EngineConfig) -> dict[str, Any]:
    """What was measured, and on what; of the machine also how busy it is."""
    named = (*provenance.ENGINE, "cores", "load")
    asked = settings.model_dump(exclude={"output", "commit"})
    # Bytes of a KV block in all layers; 0 if the model's configuration does not tell.
    footprint = GpuFootprint.of(config, read_model_config(config.model))
    return provenance.facts(*named, device=settings.device, commit=settings.commit) | {
        "settings": asked | {"model": facts_of(settings)["model"]},
        "block_bytes": footprint.block if footprint else 0,
        "chunk": CHUNK,
        "question": QUESTION,
        "plain": _plain_tokens(settings),
        "reply": REPLY,
    }


@dataclass(frozen=True, slots=True)
class PairedScores:
    """Scores of a variant on rows that the default one answered, too.

    `difference` is the mean of the variant's less the default's, `error` its standard error, and
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
        return cls(fmean(ours), fmean(apart), error, sum(map(bool, apart)), len(apart))

    def __str__(self) -> str:
        return f"{self.difference:+.3f} ± {self.error:.3f}"


def ratios(timed: Found, keys: str, figure: str, base: str) -> Spread:
    """A figure of an engine over the default engine's `base`, repeat by repeat."""
    return Spread.of_ratios(timed[keys][figure], timed[DEFAULT][base])


def paired_scores(scored: Found, keys: str, pad: str, name: str = "") -> PairedScores:
    """A variant's scores on all rows, or on those of one data set, against the default one's."""
    rows = [key.partition(" ")[2] for key in scored[keys] if key.startswith(f"{pad} {name}")]
    ours = [scored[keys][f"{pad} {row}"][0] for row in rows]
    return PairedScores.of(ours, [scored[DEFAULT][f"masked {row}"][0] for row in rows])


def document(timed: ArmFigures, scored: ArmFigures, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What ``rope-pad-ablation.json`` has."""
    figures = ("ttft_ms", "tpot_ms", "blocks", "own_blocks")
    return {
        "schema": 1,
        "provenance": facts,
        "timed": timed,
        "ratios": {
            f"{keys} {pad}": {
                name: asdict(ratios(timed, keys, f"{pad} {name}", f"masked {name}"))
                for name in figures
            }
            for keys, pad in VARIANTS
        },
        "scores": {f"{k} {p}": asdict(paired_scores(scored, k, p)) for k, p in VARIANTS},
        "scored": {key: {n: v[0] for n, v in rows.items()} for key, rows in scored.items()},
    }


def render(timed: Found, scored: Found, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    return page(
        "RoPE in attention or before it, pads masked or counted",
        _caption(facts),
        "## Chunks that are cached",
        _times(timed, facts),
        "## No chunks",
        f"A prompt of {facts['plain']:,} random tokens of which nothing is cached; and the memory "
        "that attention held by then beside the KV pool, for all that was timed.",
        _plain(timed, facts),
        "## Scores",
        "Mean score on the testbed's rows; in the last columns the difference to the default "
        "cell with its standard error, and rows with another score.",
        _scores(scored, facts),
        "## Is the overhead negligible?",
        "MEPIC says of rotating keys in attention that its overhead is negligible. Here:",
        "\n".join(_verdict(timed, scored)),
    )


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


def _times(timed: Found, facts: Mapping[str, Any]) -> str:
    head = ["keys", "pads", "TTFT, ms", "ratio", "time per token, ms", "ratio"]
    head += ["KV blocks", "its own", "MiB", "linked tokens"]
    rows = []
    for keys, pad in VARIANTS:
        figures = timed[keys]
        middle = partial(_middle, figures, pad)
        size = middle("blocks") * facts["block_bytes"] / 2**20
        row = [_keys(facts, keys), pad]
        for name in ("ttft_ms", "tpot_ms"):
            row += _with_ratio(timed, keys, f"{pad} {name}", f"masked {name}")
        row += [f"{middle(name):,.0f}" for name in ("blocks", "own_blocks")]
        rows.append([*row, f"{size:,.1f}" if size else NOTHING, f"{middle('linked'):,.0f}"])
    return table(head, rows, right=2)


def _middle(figures: Mapping[str, Sequence[float]], pad: str, name: str) -> float:
    return median(figures[f"{pad} {name}"])


def _with_ratio(timed: Found, keys: str, figure: str, base: str) -> tuple[str, str]:
    """A figure, and its ratio to the default engine's `base`."""
    return Spread.of(timed[keys][figure]).text(1), ratios(timed, keys, figure, base).text(3)


def _plain(timed: Found, facts: Mapping[str, Any]) -> str:
    head = ("keys", "TTFT, ms", "ratio", "time per token, ms", "ratio", "beside the pool, MiB")
    rows = [
        (
            _keys(facts, keys),
            *_with_ratio(timed, keys, "ttft_ms", "ttft_ms"),
            *_with_ratio(timed, keys, "tpot_ms", "tpot_ms"),
            f"{max(timed[keys]['workspace_mib']):,.0f}",
        )
        for keys in (DEFAULT, FUSED)
    ]
    return table(head, rows, right=1)


def _scores(scored: Found, facts: Mapping[str, Any]) -> str:
    names = [name for name in DATASETS if any(f" {name} " in key for key in scored[DEFAULT])]
    rows = []
    for keys, pad in VARIANTS:
        means = [paired_scores(scored, keys, pad, f"{name} ").mean for name in names]
        whole = paired_scores(scored, keys, pad)
        shown = [f"{mean:.3f}" for mean in (*means, whole.mean)]
        changed = f"{whole.changed} of {whole.n}"
        rows.append([_keys(facts, keys), pad, *shown, str(whole), changed])
    return table(["keys", "pads", *names, "all", "difference", "changed"], rows, right=2)


def _verdict(timed: Found, scored: Found) -> Iterator[str]:
    figures = {"time to the first token": "ttft_ms", "time per token": "tpot_ms"}
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
        f"- score: {pads} with the paper's pads, {keys} with every key without RoPE (n={pads.n})."
    )


def _judged(found: Spread) -> str:
    if max(found.q75 - 1, 1 - found.q25) <= NEGLIGIBLE:
        word = "negligible"
    elif found.q25 > 1:
        word = "more"
    else:
        word = "less" if found.q75 < 1 else "not to be told from 1 in this spread"
    return f"{found.text(3)} of the default's, {word}"


def _keys(facts: Mapping[str, Any], keys: str) -> str:
    return _KEYS[facts["settings"]["device"]][keys]
