"""The Gram form of Newton-Schulz against the plain iteration in float64."""

import pytest
import torch
from torch import Tensor

from groundup.kernels.newton_schulz import newton_schulz_gram, pays
from groundup.optim.muon import COEFFICIENTS, newton_schulz


def decaying(rows: int, columns: int) -> Tensor:
    """Singular values from 1 down to 1e-6."""
    left, right = torch.linalg.qr(torch.randn(rows, rows))[0], torch.linalg.qr(torch.randn(columns, rows))[0]
    return left @ torch.diag(10 ** torch.linspace(0, -6, rows)) @ right.T


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96), (33, 70)])
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_equals_the_plain_iteration(shape: tuple[int, int], steps: int):
    g = torch.randn(shape)
    truth = newton_schulz(g.double(), steps)
    error = (newton_schulz_gram(g, steps, COEFFICIENTS).double() - truth).norm() / truth.norm()
    assert error < 1e-2


@pytest.mark.parametrize("kind", ["decaying", "of rank 4", "of rank 1"])
def test_small_singular_values_do_not_run_away(kind: str):
    """Rounding makes eigenvalues near 0 negative, and each iteration makes those 12 times larger."""
    rank = 4 if "4" in kind else 1
    g = decaying(128, 512) if kind == "decaying" else torch.randn(128, rank) @ torch.randn(rank, 512)
    truth, half = newton_schulz(g.double(), 5), newton_schulz(g.bfloat16(), 5).double()
    ours = newton_schulz_gram(g, 5, COEFFICIENTS).double()
    assert torch.linalg.svdvals(ours).max() < 1.25
    assert (ours - truth).norm() < 0.3 * (half - truth).norm()


def test_zero_stays_zero_and_large_entries_do_not_overflow():
    assert newton_schulz_gram(torch.zeros(8, 20), 5, COEFFICIENTS).eq(0).all()
    g = torch.zeros(64, 512)
    g[3, 5] = 1e15
    out = newton_schulz_gram(g, 5, COEFFICIENTS)
    assert out.isfinite().all()
    assert 0.6 < out[3, 5] < 1.2


def test_where_it_pays():
    assert pays(2048, 8192)
    assert pays(8192, 2048)
    assert not pays(2048, 2048)
