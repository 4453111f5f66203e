"""Muon: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    M ← lerp(M, G, 1 - μ)          momentum
    U ← lerp(G, M, μ)              Nesterov's look ahead
    O ← newton_schulz(U)           ≈ the nearest (semi-)orthogonal matrix: U's singular vectors, all values near 1
    W ← (1 - lr · λ) W - lr · f(W's shape) · O

For the hidden matrices only; embeddings, head and norms are AdamW's, in groups of the same optimizer (groups.py).
The factor f, for a weight of d_out rows and d_in columns:

    original      sqrt(max(1, d_out / d_in)): the output changes by about unit scale (Jordan et al. 2024)
    match-adamw   0.2 · sqrt(max(d_out, d_in)): O has rank min(d_out, d_in), so its root mean square is 1 / sqrt(max);
                  the product's is 0.2, which is AdamW's, so lr and decay carry over (Liu et al. 2025, section 2.2)

Cost: per matrix and iteration 2 · (2 m² n + m³) FLOPs, m ≤ n its sides: five iterations are 1-2% of a training step's
FLOPs at 0.5 M tokens a batch, far more at small batches. Memory: one moment instead of AdamW's two.
Rejected: an SVD (exact, 10 to 100 times slower); attention's q, k and v joined into one matrix (their spectra differ).
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from groundup.kernels.newton_schulz import newton_schulz_gram, pays
from groundup.optim.adamw import adamw_step, check_settings
from groundup.optim.base import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan et al. 2024: steep at 0, so that five iterations lift small singular values; the others end in 0.7 … 1.2."""
FACTORS = {
    "original": lambda d_out, d_in: sqrt(max(1.0, d_out / d_in)),
    "match-adamw": lambda d_out, d_in: 0.2 * sqrt(max(d_out, d_in)),
}


def newton_schulz(
    g: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """`g` (..., d_out, d_in) with its singular values driven towards 1; zero stays zero. Computed in g's type.

    Each iteration maps every singular value s, at first in [0, 1] (Frobenius norm 1), to a s + b s³ + c s⁵.
    """
    a, b, c = coefficients
    x = g / g.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    tall = g.shape[-2] > g.shape[-1]
    if tall:
        x = x.mT  # the smaller Gram matrix
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def orthogonalize(g: Tensor, steps: int) -> Tensor:
    """Newton-Schulz as the optimizer calls it. The back-end is chosen here.

    On a GPU in half precision: the iteration forgives rounding (Jordan et al.), and tensor cores make it cheap. Wide
    matrices take the Gram form.
    """
    if not g.is_cuda:
        return newton_schulz(g, steps)
    if pays(*g.shape):
        return newton_schulz_gram(g, steps, COEFFICIENTS).to(g.dtype)
    return newton_schulz(g.bfloat16(), steps).to(g.dtype)


def muon_update(
    p: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    lr: float,
    momentum: float,
    weight_decay: float,
    steps: int,
    factor: float,
) -> None:
    """One matrix' step, in place; `factor` is that of its shape."""
    momentum_buffer.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(momentum_buffer, momentum), steps)
    p.mul_(1 - lr * weight_decay)
    p.add_(update, alpha=-lr * factor)


class Muon(Optimizer):
    """Muon for groups with `muon` True (the default; matrices only), AdamW for the others."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        steps: int = 5,
        factor: str = "match-adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        muon: bool = True,
        master_weights: bool = True,
        seed: int = 0,
    ):
        check_settings(lr, betas, eps, weight_decay)
        if not 0 <= momentum < 1 or steps < 1 or factor not in FACTORS:
            raise ValueError(
                f"momentum {momentum} must be in [0, 1), steps {steps} at least 1, factor {factor!r} in {[*FACTORS]}"
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "factor": factor}
        defaults |= {"betas": betas, "eps": eps, "muon": muon}
        super().__init__(params, defaults, master_weights, seed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError when a Muon group holds anything but matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
        if group["muon"] and shapes:
            self.param_groups.pop()
            raise ValueError(
                f"Muon is for matrices, not for a parameter of shape {shapes[0]}: give its group muon=False"
            )

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["muon"] else ("exp_avg", "exp_avg_sq")

    def update(
        self, columns: list[list[Tensor]], step: int, group: dict[str, Any], copies: Sequence[Tensor] = ()
    ) -> None:
        if not group["muon"]:
            adamw_step(columns, step, group, copies)
            return
        settings = (group["lr"], group["momentum"], group["weight_decay"], group["steps"])
        for p, grad, buffer in zip(*columns, strict=True):
            muon_update(p, grad.to(p.dtype), buffer, *settings, FACTORS[group["factor"]](*p.shape))
        if copies:
            torch._foreach_copy_(list(copies), columns[0])
