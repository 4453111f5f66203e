"""Gradient clipping by the global norm (Pascanu et al. 2013, algorithm 1).

In place, clipping reads and writes every gradient once more (8 bytes a float32 parameter). Where AdamW's kernel takes a
factor (base.py) only the norm is measured, and the kernel multiplies by `clip_factor` what it reads anyway.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, eps: float = 1e-6) -> Tensor:
    """Scale all gradients in place so that their joint L2 norm is at most `max_norm`; return the norm before.

    The scale is applied on the device, also when it is 1: asking whether it is would wait for the device.
    max_norm 0: only measure. Parameters without a gradient are skipped; none at all gives 0.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads)
    if max_norm and grads:
        torch._foreach_mul_(grads, clip_factor(norm, max_norm, eps))
    return norm


def total_norm(tensors: list[Tensor], device: torch.device | None = None) -> Tensor:
    """The joint L2 norm, a scalar; of no tensors 0, on `device`."""
    if not tensors:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def clip_factor(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    """What gradients of this joint norm are multiplied by."""
    return (max_norm / (norm + eps)).clamp(max=1.0)
