"""Host tensors to the device without waiting."""

import torch
from torch import Tensor


def upload(source: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on `device`.

    It is staged in pinned memory, which PyTorch keeps until the copy is done, so the caller may
    change `source` at once.
    """
    if device.type != "cuda":
        return source.to(device, copy=True)
    return source.pin_memory().to(device, non_blocking=True)
