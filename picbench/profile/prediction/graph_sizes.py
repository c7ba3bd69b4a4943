"""The largest steps that CUDA graphs served where a grid was measured.

The host starts the kernels of larger steps one by one, which takes longer than the GPU needs for
some hundred tokens. So cells of engines with other graphs took other times there.
"""

from collections.abc import Iterator, Mapping

from picbench.engines.algorithms import Registry
from picbench.grid.measured_grid import GridFacts
from picbench.profile.prediction.arm_kinds import links_chunks

#: Of engines whose files do not say: vLLM's choice for engines of 64 requests.
_UNRECORDED = 128


def captured(facts: GridFacts, *, linked: bool) -> int:
    """Tokens of the largest step that graphs of arms of a kind served; 0 without graphs."""
    sizes = facts.graph_tokens
    if sizes is None:
        return _UNRECORDED if _on_gpu(facts) else 0
    registry = Registry()
    kinds = {arm: links_chunks(registry.parse(arm)) for arm in sizes}
    return max((size for arm, size in sizes.items() if kinds[arm] is linked), default=0)


def graph_sizes(facts: GridFacts) -> str:
    """In words: by arm, where they are not all the same."""
    if not _on_gpu(facts) or (facts.graph_tokens and not any(facts.graph_tokens.values())):
        return "no CUDA graphs"
    if facts.graph_tokens is None:
        return f"CUDA graphs whose size its file does not say ({_UNRECORDED} tokens, or 512 later)"
    return f"CUDA graphs of up to {' and '.join(_sizes(facts.graph_tokens))} tokens"


def same_graphs(one: GridFacts, other: GridFacts) -> bool:
    """Whether the arms that two grids have in common had graphs of the same sizes."""
    here, there = one.graph_tokens, other.graph_tokens
    if here is None or there is None:
        return here is there or not (_on_gpu(one) or _on_gpu(other))
    return all(here[arm] == there[arm] for arm in here if arm in there)


def graph_warning(measured: GridFacts, grid: GridFacts, name: str) -> str | None:
    """What to know of a grid's predictions for what was `measured`; None for the same graphs.

    `name` says what that is.
    """
    if same_graphs(measured, grid):
        return None
    return (
        f"{name}: {graph_sizes(measured)}, --grid: {graph_sizes(grid)}. Steps between these sizes "
        "take other times; measure the grid again (picbench measure break-even)."
    )


def _on_gpu(facts: GridFacts) -> bool:
    return facts.versions.get("driver", "none") != "none"


def _sizes(tokens: Mapping[str, int]) -> Iterator[str]:
    for size in sorted(set(tokens.values())):
        arms = [arm for arm, own in tokens.items() if own == size]
        yield f"{size:,}" + ("" if len(arms) == len(tokens) else f" ({', '.join(arms)})")
