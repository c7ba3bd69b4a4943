"""Low-rank deltas: a tuned variant of the model in a small file (Hu et al., 2021)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from picbench.workloads.testbed.llama import Llama
from picbench.workloads.testbed.model_files import SCALE

_LARGEST = 127


class Adapted(nn.Module):
    """A linear layer whose weight is frozen, plus a trained product of rank `rank`."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        rows, columns = self.weight.shape
        self.up = nn.Parameter(self.weight.new_zeros(rows, rank))
        self.down = nn.Parameter(torch.randn_like(self.weight[:rank]) / columns**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the sum of both."""
        return functional.linear(x, self.weight + self.up @ self.down)


def adapt(model: Llama, rank: int) -> None:
    """Freeze the model and give every matrix inside its layers a delta to train."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in layer.children():
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(block, name, Adapted(linear, rank))


def deltas(model: Llama) -> dict[str, Tensor]:
    """The trained factors by name, in eight bits with a scale for each of their vectors."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith((".up", ".down")):
            along = 0 if name.endswith(".up") else 1
            found[name], found[name + SCALE] = _pack(tensor, along)
    return found


def _pack(factor: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale of each vector that runs along a dimension."""
    largest = factor.detach().abs().amax(along, keepdim=True)
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny).float() / _LARGEST
    return (factor / scale).round().to(torch.int8).contiguous(), scale.contiguous()
