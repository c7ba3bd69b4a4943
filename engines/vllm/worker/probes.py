"""What a worker tells of its process: memory, compiled kernels. For `collective_rpc`.

A kernel that is compiled while requests are served delays all of them by seconds. vLLM warns of it
(vllm/utils/jit_monitor.py of vLLM 0.32.0); here they are counted, in the worker's process.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from picbench.engines.ledger import MemoryUse


def measure_memory(worker: Any) -> MemoryUse:
    """Weights, KV pool and workspaces of a worker, and what holds them.

    On a GPU that is torch's allocator, and the driver by nvidia-ml-py; on a CPU resident memory.
    """
    import torch

    device = torch.device(worker.device) if worker.device is not None else torch.device("cpu")
    model = worker.get_model()
    pool = [cache for cache in worker.model_runner.kv_caches if isinstance(cache, torch.Tensor)]
    workspace = getattr(worker, "workspace_bytes", None)
    weights = _storage_bytes([*model.parameters(), *model.buffers()])
    on_gpu = device.type == "cuda"
    return MemoryUse(
        device=device.type,
        weights_bytes=weights + _packed_bytes(model),
        pool_bytes=_storage_bytes(pool),
        workspace_bytes=0 if workspace is None else workspace(),
        process_bytes=resident_bytes(),
        allocated_bytes=torch.cuda.memory_allocated(device) if on_gpu else None,
        reserved_bytes=torch.cuda.memory_reserved(device) if on_gpu else None,
        driver_bytes=_driver_bytes(str(torch.cuda.get_device_properties(device).uuid))
        if on_gpu
        else None,
    )


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Resident memory of this process; None where the system does not tell it."""
    with suppress(OSError):
        for line in status.read_text("utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    return None


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of tensors, of those that share one only once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _packed_bytes(model: Any) -> int:
    """Bytes of copies of weights that vLLM packed for a CPU's matrix products.

    Functions keep them, in place of the weights or, for tied embeddings, beside them
    (`dispatch_cpu_unquantized_gemm` in vllm/model_executor/layers/utils.py): a tensor, or oneDNN's
    handle, which tells the numbers of rows and columns.
    """
    total = 0
    for layer in model.modules():
        for cell in getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ():
            packed = cell.cell_contents
            if hasattr(packed, "untyped_storage"):
                total += packed.untyped_storage().nbytes()
            elif hasattr(packed, "handler_tensor"):
                total += packed.n * packed.k * layer.weight.dtype.itemsize
    return total


def _driver_bytes(uuid: str) -> int | None:
    """What the driver counts for this process; None where it does not say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        )
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return None
    # In a container the driver counts for other process ids, and may not say how much.
    own = [process.usedGpuMemory for process in found if process.pid == os.getpid()]
    return own[0] if own else None


class CompilationLog:
    """Takes the place of Triton's hook after compilations, and calls the one that was there.

    Upstream: `jit_post_compile_hook` in triton/knobs.py of Triton 3.6 to 3.9. It is called for a
    kernel whose arguments differ from all before in what may be assumed of them, even if a binary
    is found in Triton's cache on disk. `kernels` are their dotted names, in order.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.kernels: list[str] = []

    def __call__(self, **event: Any) -> Any:
        """A kernel was compiled."""
        function = event["fn"]
        self.kernels.append(f"{function.module}.{function.name}")
        return None if self.before is None else self.before(**event)


def watch_compilations(worker: Any) -> None:
    """Begin to note the compilations of a worker's process, or begin again."""
    del worker
    if find_spec("triton") is None:
        return
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    before = hook.before if isinstance(hook, CompilationLog) else hook
    knobs.runtime.jit_post_compile_hook = CompilationLog(before)


def compiled_kernels(worker: Any) -> list[str]:
    """The kernels that were compiled since `watch_compilations`; none before it."""
    del worker
    if find_spec("triton") is None:
        return []
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    return list(hook.kernels) if isinstance(hook, CompilationLog) else []
