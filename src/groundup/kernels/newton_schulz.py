"""Newton-Schulz iterations on the Gram matrix: Muon's orthogonalisation of wide matrices at half the cost.

X ← (aI + bG + cG²) X with G = X Xᵀ, five times over, costs 4 m² n + 2 m³ FLOPs a time for X of m rows, n ≥ m columns.
All the factors P = aI + bG + cG² are polynomials of the first Gram matrix and commute, so G ← P G P and Q ← P Q can be
carried alone, m × m, and X is multiplied once: X ← Q X. Two products with n columns instead of ten.

Rounding: an eigenvalue of G near 0 that rounding makes negative grows by a² ≈ 12 an iteration. So the Gram matrix is
formed anew after at most three iterations (from an X whose small singular values have grown by up to a³ ≈ 41), which
keeps what rounding adds below 1e-2. The small matrices are float16, not bfloat16: their entries stay within a³, and
three more bits of mantissa are free. FLOPs for five iterations: 8 m² n + 28 m³ against 20 m² n + 10 m³, so it pays from
n = 1.5 m on: 1.5 × at n = 4 m. Every product here is a symmetric matrix; computing one triangle only would halve the m³
terms, but 2048 rows are 136 tiles of 128 × 128 below the diagonal for the 132 multiprocessors of an H200, two rounds
where one is enough for half of the full square's.
"""

import torch
from torch import Tensor

RESTART = 3
"""Iterations on one Gram matrix."""


def pays(rows: int, columns: int) -> bool:
    """Whether the Gram form takes fewer FLOPs than the plain one."""
    return 2 * max(rows, columns) >= 3 * min(rows, columns)


def newton_schulz_gram(g: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float = 1e-7) -> Tensor:
    """`g` (d_out, d_in) with its singular values driven towards 1, in float16, as optim.muon.newton_schulz."""
    tall = g.shape[0] > g.shape[1]
    x = g.mT if tall else g
    # Root mean square 1, so that float16 does not round small entries to nothing; the Gram matrix takes it back.
    scale = (x.shape[0] * x.shape[1]) ** 0.5
    x = (x * (scale / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=eps))).half()
    alpha = 1 / scale**2
    for first in range(0, steps, RESTART):
        gram = torch.addmm(x.new_zeros(1), x, x.mT, beta=0, alpha=alpha)
        x = product_of_factors(gram, min(RESTART, steps - first), coefficients) @ x
        if first == 0:
            x.div_(scale)
        alpha = 1.0
    return x.mT if tall else x


def product_of_factors(gram: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Q with Q X = `steps` iterations on X, from the Gram matrix of X (m, m)."""
    a, b, c = coefficients
    q = None
    for step in range(steps):
        p = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal().add_(a)
        q = p if q is None else p @ q
        if step + 1 < steps:
            gram = p @ gram @ p
    assert q is not None
    return q
