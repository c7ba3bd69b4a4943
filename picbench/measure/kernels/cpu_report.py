"""A benchmark's results as a page that people read."""

from collections.abc import Sequence
from typing import Any


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table: ratios of the fastest runs, and paired medians."""
    lines = [
        "| heads | type | work | requests | new | context | stock us | in place | unrotated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        case, shape = result["case"], result["case"]["shape"]
        cells = [
            f"{shape['num_heads']}/{shape['num_kv_heads']}x{shape['head_size']}",
            shape["dtype"],
            case["name"],
            *(str(case[name]) for name in ("requests", "new", "context")),
            f"{result['layer_us']['stock']['best']:.0f}",
            *(_ratio(result, name) for name in ("in_place", "unrotated")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(document: dict[str, Any]) -> str:
    """The Markdown page of a run: what was measured where, and the table."""
    run = document["provenance"]
    return (
        "# CPU attention against stock vLLM\n\n"
        "One layer's whole attention path (store, then attend) for plain requests. Ratios to stock "
        "are of the\nfastest runs; in brackets the median and quartiles of ratios paired within a "
        "round. `in place`: keys are\nrotated before they are stored. `unrotated`: keys are "
        "rotated when they are read.\nThe engine serves plain requests in place; chunks "
        "rest unrotated, and so does everything with\n`keys_without_rope`.\n\n"
        f"{run['cpu']} ({run['capability']}), {run['threads']} threads, torch {run['torch']}, "
        f"vLLM {run['vllm']}, random inputs,\nseed {run['seed']}, "
        f"at most {run['rounds']} rounds, commit {run['commit'][:12]}.\n\n"
        f"{table(document['results'])}\n"
    )


def _ratio(result: dict[str, Any], arm: str) -> str:
    paired = result["paired_ratio"][arm]
    spread = f"{paired['median']:.2f}, {paired['q25']:.2f}-{paired['q75']:.2f}"
    return f"{result['ratio_of_best'][arm]:.2f} ({spread})"
