"""Muon: an optimizer with momentum and orthogonal updates of matrices.

Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Newton-Schulz coefficients (quintic) of the reference implementation, which move all singular values close to 1.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices of a stack [N, rows, cols]."""
    x: Tensor = update / (update.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters.  Parameters of one shape are stacked and orthogonalised together."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[tuple(parameter.shape)].append(parameter)
            for (rows, cols), parameters in by_shape.items():
                update = orthogonalise(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                scale = max(1.0, rows / cols) ** 0.5
                for parameter, one in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(one, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        state, grad = self.state[parameter], parameter.grad
        if grad is None:
            raise RuntimeError("Muon.step() needs the gradients of all its parameters")
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(grad, 1 - momentum)
        nesterov: Tensor = grad.lerp(state["momentum"], momentum)
        return nesterov
