"""A race as ratios, and as a page that people read."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

#: Milliseconds or tokens a second of one arm, repeat by repeat.
Found = Mapping[str, Mapping[str, Sequence[float]]]

_ROWS = {
    "ttft_ms": "TTFT of one plain request of 2,048 tokens, ms",
    "tpot_ms": "time per output token of it, ms",
    "tokens_per_s": "64 plain requests of 1,024 + 128 tokens, tokens/s",
    "warm_ttft_ms": "TTFT of 64 warm chunks and a question, 32k tokens, ms",
    "warm_tpot_ms": "time per output token of it, ms",
    "hit_ttft_ms": "TTFT of a prefix hit that leaves as many new tokens, ms",
}


def ratios(found: Found) -> dict[str, dict[str, float]]:
    """What `results/gpu/summary.json` says of a race: medians, picbench over stock vLLM.

    `speedup_vs_full` is the other way round: full recompute's TTFT over warm chunks'.
    """
    stock, ours = ({k: median(v) for k, v in found[arm].items()} for arm in ("stock", "picbench"))
    return {
        "pic_off": {
            "throughput_ratio": ours["tokens_per_s"] / stock["tokens_per_s"],
            "ttft_ratio": ours["ttft_ms"] / stock["ttft_ms"],
            "tpot_ratio": ours["tpot_ms"] / stock["tpot_ms"],
        },
        "warm_32k": {
            "speedup_vs_full": stock["warm_ttft_ms"] / ours["warm_ttft_ms"],
            "ratio_vs_prefix_hit": ours["warm_ttft_ms"] / stock["hit_ttft_ms"],
        },
    }


def render(found: Found, facts: Mapping[str, Any]) -> str:
    """The race as a Markdown page; `facts` say where and on what it ran."""
    figures = ratios(found)
    warm, off = figures["warm_32k"], figures["pic_off"]
    lines = [
        "# The engine against stock vLLM on a GPU",
        "",
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, vLLM {facts['vllm']} "
        f"(FlashAttention-3, CUDA graphs, torch.compile),\ncommit {facts['commit']}. "
        f"{facts['model']}, dummy weights, bfloat16: times, not answers. Both engines at once, "
        "in turns,\nin processes of their own; median (lowest - highest).",
        "",
        "| | stock vLLM | picbench |",
        "| --- | ---: | ---: |",
        *(
            f"| {text} | {_cell(found, 'stock', key)} | {_cell(found, 'picbench', key)} |"
            for key, text in _ROWS.items()
        ),
        "",
        f"Plain requests: TTFT {off['ttft_ratio']:.3f}, time per output token "
        f"{off['tpot_ratio']:.3f}, throughput {off['throughput_ratio']:.3f} of stock vLLM's. "
        f"Warm chunks (mepic):\n{warm['speedup_vs_full']:.1f} times faster to the first token "
        f"than full recompute, {warm['ratio_vs_prefix_hit']:.2f} of a prefix hit's time.",
    ]
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float] | None, digits: int, *, counted: bool = False) -> str:
    """``median (lowest - highest)``, and how many if `counted`; a dash of nothing."""
    if not values:
        return "-"
    middle, low, high = (
        f"{number:,.{digits}f}" for number in (median(values), min(values), max(values))
    )
    return f"{middle} ({low} - {high}{f', n={len(values)}' if counted else ''})"


def _cell(found: Found, arm: str, key: str) -> str:
    return spread(found[arm].get(key), 2, counted=True)
