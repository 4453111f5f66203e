"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

Decay comes before the step, as in PyTorch; state a parameter: `step` (int), `exp_avg`, `exp_avg_sq` (as the parameter).
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from groundup.kernels import adamw_step as adamw_kernel
from groundup.kernels.backend import runs_triton
from groundup.optim.base import NARROW, Optimizer, own_part


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


class AdamW(Optimizer):
    """AdamW over parameters or parameter groups; equal to torch.optim.AdamW. bf16 parameters: see base.py."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        master_weights: bool = True,
        seed: int = 0,
    ):
        check_settings(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, master_weights, seed)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, columns: list[list[Tensor]], step: int, group: dict[str, Any], copies: Sequence[Tensor] = ()
    ) -> None:
        adamw_step(columns, step, group, copies, self.flag, self.factor)

    def heeds_flag(self) -> bool:
        params = [p for group in self.param_groups for p in group["params"]]
        return all(
            runs_triton(p) and p.dtype in (torch.float32, *(NARROW if self.master_weights else ())) for p in params
        )


def adamw_step(
    columns: list[list[Tensor]],
    step: int,
    group: dict[str, Any],
    copies: Sequence[Tensor] = (),
    flag: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Step `step` of a group: columns are weights, gradients, exp_avg, exp_avg_sq. The back-end is chosen here.

    copies: bf16 tensors that receive the new weights, rounded. flag: nothing changes where it is set. factor: of the
    gradients.
    """
    settings = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
    # A shard of FSDP2's (a DTensor) is moved like any tensor: every element by itself.
    columns, copies = [[own_part(x) for x in column] for column in columns], [own_part(x) for x in copies]
    p, grad, exp_avg, exp_avg_sq = columns
    if runs_triton(p[0]) and _suits_kernel(columns, copies):
        adamw_kernel(p, grad, exp_avg, exp_avg_sq, step, *settings, copies, flag, factor)
        return
    if flag is not None and flag.item():
        return
    grad = [g.to(weight.dtype) for g, weight in zip(grad, p, strict=True)]
    if factor is not None:
        grad = torch._foreach_mul(grad, factor)
    for tensors in zip(p, grad, exp_avg, exp_avg_sq, strict=True):
        adamw_update(*tensors, step, *settings)
    if copies:
        torch._foreach_copy_(copies, p)


def _suits_kernel(columns: list[list[Tensor]], copies: Sequence[Tensor]) -> bool:
    """float32 but for the gradients of masters, which are bf16; all contiguous."""
    p, grad, *moments = columns
    narrow, wide = {g.dtype for g in grad}, {x.dtype for column in (p, *moments) for x in column}
    types = wide == {torch.float32} and narrow == {torch.bfloat16 if copies else torch.float32}
    return types and all(all(map(Tensor.is_contiguous, column)) for column in (*columns, copies))


def check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for settings that AdamW cannot have."""
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative, betas {betas} in [0, 1)"
        )
