"""Low-rank deltas: a tuned variant of the model in a small file (Hu et al., 2021)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from picbench.workloads.testbed.lm.llama import Llama


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
    """The trained factors by name, in bfloat16."""
    return {
        name: tensor.detach().bfloat16().contiguous()
        for name, tensor in model.state_dict().items()
        if name.endswith((".up", ".down"))
    }


def merge(weights: dict[str, Tensor], delta: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the products of `delta` added; its other tensors are left alone."""
    merged = dict(weights)
    for name in delta:
        if name.endswith(".up"):
            target = name.removesuffix(".up") + ".weight"
            product = delta[name].float() @ delta[name.removesuffix("up") + "down"].float()
            merged[target] = (weights[target].float() + product).to(weights[target].dtype)
    return merged
