"""The page of one engine on several GPUs, and the summary's figures of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picbench.measure.report import spread, update_summary
from picbench.measure.serving.decode_load_page import ratio
from picbench.measure.serving.rounds_file import CellFigures, RoundsFound
from picbench.output import markdown
from picbench.statistics.paired import paired_ratio
from picbench.whole_files import write_whole

OURS, STOCK = "mepic", "stock"

#: The cell in which replies are compared, and its arms.
REPLIES = "replies"


def arm_name(who: str, gpus: int) -> str:
    """What an arm on this many GPUs is called."""
    return f"{who} x{gpus}"


def write_scaling(found: RoundsFound, path: Path) -> str:
    """Write the page beside its file, and the summary's figures; the page."""
    page = render_scaling(found)
    write_whole(path.with_suffix(".md"), page.encode())
    update_summary(path.parent, scaling_figures(found))
    return page


def scaling_figures(found: RoundsFound) -> dict[str, float]:
    """Throughput of several GPUs over one at the longest prompts, and the least over stock's."""
    workers = found.facts["workers"]
    lengths = _lengths(found)
    over_stock = {
        length: paired_ratio(_gains(found, length, STOCK), _gains(found, length, OURS)).value
        for length in lengths
    }
    ours = found.cells[lengths[-1]]
    one, several = (ours[arm_name(OURS, gpus)]["tokens_s"] for gpus in (1, workers))
    return {
        f"tp{workers}_scaling": paired_ratio(one, several).value,
        f"tp{workers}_vs_stock_tp{workers}": min(over_stock.values()),
    }


def render_scaling(found: RoundsFound) -> str:
    """The page, in Markdown."""
    facts, lengths = found.facts, _lengths(found)
    workers, scene = facts["workers"], facts["scenes"][lengths[0]]
    rows = [
        (
            f"{int(length):,}",
            arm,
            str(len(figures["tokens_s"])),
            spread(figures["tokens_s"], 0),
            spread(figures["tpot_ms"], 2),
            spread(figures["ttft_ms"], 0),
        )
        for length in lengths
        for arm, figures in found.cells[length].items()
    ]
    gains = [
        (
            f"{int(length):,}",
            *(
                ratio(
                    found.cells[length][arm_name(who, workers)]["tokens_s"],
                    found.cells[length][arm_name(who, 1)]["tokens_s"],
                )
                for who in (OURS, STOCK)
            ),
            ratio(_gains(found, length, OURS), _gains(found, length, STOCK)),
        )
        for length in lengths
    ]
    head = ("prompt", "engine", "n", "tokens/s", "time per token, ms", "TTFT p50, ms")
    lines = [
        "# One engine on several GPUs",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. {scene['requests']} requests at once, of chunks of {scene['length']} "
        f"tokens that are in the pool, half of twice as many, in a random order, and a question of "
        f"{scene['question']}; replies of {scene['reply']}. `{OURS}` is an engine of picbench "
        f"(shared decode: {facts['shared_decode']}{_graphs(facts)}), `{STOCK}` stock vLLM, whose "
        "requests have all these chunks as one common prefix. All engines are up at once, with "
        f"pools of {facts['pool']:,} blocks, and take turns, another one first in each round; "
        "median (lowest - highest). Tokens generated a second, prompts included.",
        "",
        markdown.table(head, rows, right=2),
        "",
        f"{workers} GPUs over one, tokens a second; geometric mean of rounds (95 %).",
        "",
        markdown.table(("prompt", OURS, STOCK, f"{OURS} over {STOCK}"), gains, right=0),
        "",
        *_replies(found.facts, found.cells.get(REPLIES)),
        *(f"{cell} failed: {error.splitlines()[0]}" for cell, error in found.failures.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _replies(facts: Mapping[str, Any], figures: CellFigures | None) -> list[str]:
    if figures is None:
        return []
    asked = facts["replies"]
    one, several = (figures[arm_name(REPLIES, gpus)] for gpus in (1, facts["workers"]))
    equal = sum(several[name] == sums for name, sums in one.items())
    return [
        f"{asked['model']} in {asked['dtype']}, as it is served, on {facts['workers']} GPUs and "
        f"on one: {equal} of {len(one)} replies of {asked['reply']} tokens are equal.",
        "",
    ]


def _gains(found: RoundsFound, length: str, who: str) -> Sequence[float]:
    """Tokens a second of several GPUs over one, round by round."""
    one, several = (
        found.cells[length][arm_name(who, gpus)]["tokens_s"] for gpus in (1, found.facts["workers"])
    )
    return [more / less for more, less in zip(several, one, strict=True)]


def _lengths(found: RoundsFound) -> list[str]:
    """The measured lengths, shortest first."""
    return sorted(found.cells.keys() - {REPLIES}, key=int)


def _graphs(facts: Mapping[str, Any]) -> str:
    if "graph_tokens" not in facts:
        return ""
    return f", CUDA graphs of up to {facts['graph_tokens']:,} tokens"
