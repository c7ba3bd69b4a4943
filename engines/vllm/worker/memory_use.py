"""What a worker's process holds in memory, stock vLLM's as well; sent to workers to be called."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from picbench.engines.ledger import MemoryUse


def measure_memory(worker: Any) -> MemoryUse:
    """Weights, KV pool and picbench's workspaces of a worker, and what holds them.

    On a GPU that is torch's allocator, and the driver's count for this process where nvidia-ml-py
    is installed; on a CPU the resident memory of the process.
    """
    import torch

    device = torch.device(worker.device) if worker.device is not None else torch.device("cpu")
    model = worker.get_model()
    pool = [cache for cache in worker.model_runner.kv_caches if isinstance(cache, torch.Tensor)]
    workspace = getattr(worker, "workspace_bytes", None)
    on_gpu = device.type == "cuda"
    return MemoryUse(
        device=device.type,
        weights_bytes=_storage_bytes([*model.parameters(), *model.buffers()]),
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
