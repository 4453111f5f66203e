"""AdamW over any number of tensors in one launch: each weight and moment is read once and written once.

28 bytes a parameter pass through memory in float32 (weight, gradient, two moments in; weight, two moments out), against
about three times as much for a chain of operations. The tensors are cut into blocks of 2048; a table in GPU memory says
which tensor and which part of it a program works on, a second one where the tensors lie. Gradients move between steps,
so that one is sent anew each time (40 bytes a tensor).
Rejected: one launch a tensor (norms of 768 elements would be launches only), one flat copy of all weights (the model's
parameters would have to become views of it).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from groundup.errors import UserError
from groundup.kernels.backend import launch, runs_triton

BLOCK = 2048
"""Elements of a program."""


def adamw_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: Sequence[Tensor] = (),
    skip: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Step number `step` (from 1) of AdamW (Loshchilov & Hutter 2019, algorithm 2), in place.

    weights, exp_avg, exp_avg_sq: float32; gradients: float32 or bfloat16, all alike. `copies`: bfloat16 tensors that
    receive the new weights, rounded (the weights are then their masters). All contiguous, on one device. `skip`: a bool
    scalar there; where it is set, nothing changes. `factor`: a scalar by which the gradients are multiplied as they are
    read, for clipping. Raises UserError where no kernel can run.
    """
    if not weights:
        return
    if not runs_triton(weights[0]):
        raise UserError(f"kernels.adamw_step needs a GPU and Triton; the weights are on {weights[0].device}")
    columns = [weights, gradients, exp_avg, exp_avg_sq, copies or weights]
    for tensor in (x for column in columns for x in column):
        if not tensor.is_contiguous():
            raise UserError(f"kernels.adamw_step: a tensor of shape {tuple(tensor.shape)} is not contiguous")
    from groundup.kernels.adamw_triton import adamw_kernel

    device = weights[0].device
    addresses = [[x.data_ptr() for x in row] for row in zip(*columns, strict=True)]
    aligned = not any(address % 16 for row in addresses for address in row)
    table = torch.tensor(addresses)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    of_tensor, start, sizes = blocks(tuple(x.numel() for x in weights), device)
    if not len(of_tensor):
        return  # a rank may own nothing of a small model
    beta1, beta2 = betas
    launch(weights[0], adamw_kernel, len(of_tensor),
        table, of_tensor, start, sizes, table if skip is None else skip.view(torch.uint8),
        table if factor is None else factor.to(device, torch.float32),
        1 - lr * weight_decay, 1 - beta1, 1 - beta2, eps,
        (1 - beta2**step) ** -0.5, lr / (1 - beta1**step),
        BLOCK=BLOCK, BF16_GRADIENTS=gradients[0].dtype == torch.bfloat16, COPIES=bool(copies), ALIGNED=aligned,
        ASKED=skip is not None, SCALED=factor is not None,
    )  # fmt: skip


@lru_cache(maxsize=64)
def blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tensor of each block int32, its first element int64, elements of each tensor int64) for tensors of `sizes`."""
    counts = torch.tensor([-(-n // BLOCK) for n in sizes])
    of_tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.cumsum(counts, 0) - counts
    start = (torch.arange(len(of_tensor)) - first[of_tensor]) * BLOCK
    return of_tensor.int().to(device), start.to(device), torch.tensor(sizes).to(device)
