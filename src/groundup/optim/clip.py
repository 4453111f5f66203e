"""Gradient clipping by the global norm (Pascanu et al. 2013, algorithm 1)."""

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
    if not grads:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if max_norm:
        torch._foreach_mul_(grads, (max_norm / (norm + eps)).clamp(max=1.0))
    return norm
