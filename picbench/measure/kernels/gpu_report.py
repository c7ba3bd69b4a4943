"""The measurements of the CUDA kernels as a page that people read."""

from collections.abc import Sequence
from typing import Any


def report(document: dict[str, Any]) -> str:
    """The Markdown page of a run: what was measured where, and a table a kernel."""
    run = document["provenance"]
    results = document["results"]
    return (
        "# CUDA kernels against FlashAttention-3\n\n"
        "One layer's attention, random keys, values and queries, CUDA graphs replayed in random "
        "order within a round.\nTimes are medians; ratios are medians paired within a round, "
        "quartiles in brackets. Every measured kernel was\nchecked on the measured inputs before: "
        "relative error against float64 under 1e-2.\n\n"
        f"{run['gpu']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, Triton "
        f"{run['triton']}, vLLM {run['vllm']} (FlashAttention-3),\n32 heads, 8 KV heads, head size "
        f"128, bfloat16, blocks of 16, seed {run['seed']}, {run['rounds']} rounds, commit "
        f"{run['commit']}.\n\n"
        "## Decode\n\n"
        "Requests of chunks whose first blocks were recomputed; FlashAttention-3 reads as many\n"
        "keys of plain requests, with vLLM's settings under CUDA graphs. Speed against it: more\n"
        "is better. `turned`: keys rest rotated as their chunk was compiled, the query is turned\n"
        "back (served). `unrotated`: keys rest unrotated and are rotated when they are read.\n"
        "`parts`: FlashAttention-3 over a sequence for each chunk, outputs merged.\n\n"
        f"{_decode_table(results)}\n\n"
        "## Link and prefill\n\n"
        "Time of all that attention needs, copies of keys too, against FlashAttention-3 over a\n"
        "plain request with as many new tokens at its end: less is better. `runs`: blocks of 16\n"
        "new tokens at the head of each chunk and a question; they see about half of the keys\n"
        "that a tail of as many tokens sees. `tail`: all new tokens at the end. Served by a walk\n"
        "over the pages where keys rest, or over gathered keys by FlashAttention-3 (FA3) or our\n"
        "tiles. Workspace: "
        f"{run['workspace_bytes'] >> 20} MiB.\n\n"
        f"{_link_table(results)}\n"
    )


def _decode_table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| requests | context | chunk | FA3 ms | FA3 TB/s | turned | unrotated | parts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _of(results, "decode"):
        stock = row["ms"]["fa3"]["median"]
        cells = [
            *(str(row[name]) for name in ("requests", "context", "chunk")),
            f"{stock:.3f}",
            f"{row['bytes'] / stock / 1e9:.2f}",
            *(_spread(row["speed_vs_fa3"][arm]) for arm in ("turned", "unrotated", "parts")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _link_table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| form | new | context | served by | FA3 ms | ours ms | ours / FA3 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _of(results, "link"):
        cells = [
            *(str(row[name]) for name in ("form", "new", "context", "served_by")),
            *(f"{row['ms'][arm]['median']:.3f}" for arm in ("fa3", "link")),
            _spread(row["time_vs_fa3"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(results: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in results if row["kind"] == kind]


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q25']:.2f}-{ratio['q75']:.2f})"
