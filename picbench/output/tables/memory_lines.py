"""Lines below a run's table about memory in bytes."""

from collections.abc import Iterator, Mapping

from picbench.engines.ledger import MemoryUse
from picbench.output.summary import ArmSummary


def memory_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What each arm's workers held when the run ended, and what of it is not accounted for."""
    found = {name: arm.memory for name, arm in arms.items() if arm.memory is not None}
    blocks = {memory.block_bytes for memory in found.values() if memory.block_bytes}
    if blocks:
        sizes = " or ".join(f"{size:,} bytes" for size in sorted(blocks))
        yield f"KV: a block has {sizes} in all layers of a worker; peak of what requests held."
    for name, memory in found.items():
        for worker in memory.workers:
            yield f"{name}: {_account(worker)}"


def _account(use: MemoryUse) -> str:
    parts = (
        f"weights {gib(use.weights_bytes)}, KV pool {gib(use.pool_bytes)}, "
        f"workspaces {gib(use.workspace_bytes)}"
    )
    if use.held_bytes is None or use.residual_bytes is None:
        return f"{parts} GiB"
    held = "resident on the CPU" if use.device == "cpu" else "of torch's allocator"
    line = f"{parts}, residual {gib(use.residual_bytes)}: {gib(use.held_bytes)} GiB {held}"
    if use.driver_bytes is not None:
        line += f", {gib(use.driver_bytes)} GiB by the driver's count"
    return line


def gib(count: int) -> str:
    """Bytes in GiB, to a thousandth."""
    return f"{count / 2**30:.3f}"
