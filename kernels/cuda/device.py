"""How wide the GPU is."""

import torch

# An H200's, where there is no GPU.
_ASSUMED = 132


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of this device."""
    if device.type != "cuda":
        return _ASSUMED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
