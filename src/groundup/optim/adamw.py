"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

Decay comes before the step, as in PyTorch; state a parameter: `step` (int), `exp_avg`, `exp_avg_sq` (as the parameter).
"""

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn


def adamw_update(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One parameter's step number `step` (from 1), in place. The readable form."""
    beta1, beta2 = betas
    p.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # Both moments start at zero; dividing by 1 - beta^step takes that bias out.
    root = exp_avg_sq.sqrt().div_(sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


def adamw_update_many(
    p: list[Tensor],
    grad: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The same for many parameters: on a GPU one launch a line instead of one a line and parameter."""
    beta1, beta2 = betas
    torch._foreach_mul_(p, 1 - lr * weight_decay)
    torch._foreach_lerp_(exp_avg, grad, 1 - beta1)
    torch._foreach_mul_(exp_avg_sq, beta2)
    torch._foreach_addcmul_(exp_avg_sq, grad, grad, value=1 - beta2)
    root = torch._foreach_sqrt(exp_avg_sq)
    torch._foreach_div_(root, sqrt(1 - beta2**step))
    torch._foreach_add_(root, eps)
    torch._foreach_addcdiv_(p, exp_avg, root, value=-lr / (1 - beta1**step))


class AdamW(torch.optim.Optimizer):
    """AdamW over parameters or parameter groups; equal to torch.optim.AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative, betas {betas} in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for step, params in self._by_step(group["params"]).items():
                self._update(params, step, settings)
        return loss

    def _by_step(self, params: list[Tensor]) -> dict[int, list[Tensor]]:
        """Count the step of every parameter with a gradient; parameters that joined later are at another number."""
        groups: dict[int, list[Tensor]] = {}
        for p in params:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            groups.setdefault(int(state["step"]), []).append(p)
        return groups

    def _update(self, params: list[Tensor], step: int, settings: tuple) -> None:
        tensors = [(p, cast(Tensor, p.grad), self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in params]
        if params[0].is_cuda:
            p, grad, exp_avg, exp_avg_sq = (list(column) for column in zip(*tensors, strict=True))
            adamw_update_many(p, grad, exp_avg, exp_avg_sq, step, *settings)
        else:
            for p, grad, exp_avg, exp_avg_sq in tensors:
                adamw_update(p, grad, exp_avg, exp_avg_sq, step, *settings)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norm gains) do not: decay would pull a gain from 1 to 0."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
