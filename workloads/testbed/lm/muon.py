"""Muon: momentum, orthogonalised, for the matrices inside the layers (Jordan et al., 2024)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# The quintic's coefficients, from the authors' code: steep at zero, rough around one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Steps along the nearest orthogonal matrix to the momentum of each gradient."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter; those of one shape together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for same_shape in by_shape.values():
                self._update(same_shape, group)

    def _update(self, same_shape: list[Parameter], group: dict[str, Any]) -> None:
        momenta = torch.stack([self._momentum(p, group["momentum"]) for p in same_shape])
        rows, columns = same_shape[0].shape
        lr = group["lr"]
        for parameter, direction in zip(same_shape, _orthogonal(momenta), strict=True):
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(direction.to(parameter.dtype), alpha=-lr * max(1, rows / columns) ** 0.5)

    def _momentum(self, parameter: Parameter, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        held: Tensor = state["momentum"].lerp_(grad, 1 - momentum)
        return grad.lerp(held, momentum)


def _orthogonal(stack: Tensor) -> Tensor:
    """Bring all singular values of every matrix near one, by Newton and Schulz's iteration."""
    a, b, c = _QUINTIC
    tall = stack.size(-2) > stack.size(-1)
    x = (stack.mT if tall else stack).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if tall else x
    return found
