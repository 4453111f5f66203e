"""The readable FlashAttention-2 against attention written out in float64."""

from itertools import product

import pytest
import torch
from attention_truth import attention, make

from groundup.kernels.flash_torch import FlashAttention, flash_attention


@pytest.mark.parametrize(("causal", "n_q", "n_k"), [*product((False, True), (1, 64, 130), (64, 97)), (True, 100, 3)])
def test_forward_and_gradients_equal_eager_float64(causal: bool, n_q: int, n_k: int):
    q, k, v, d_out = make(2, 2, 2, n_q, n_k, 16, 24)
    out = FlashAttention.apply(q, k, v, causal)
    truth, _ = attention(q, k, v, causal)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(out, (q, k, v), d_out)
    theirs = torch.autograd.grad(truth, (q, k, v), d_out)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_grouped_heads_sum_their_gradients():
    q, k, v, d_out = make(2, 6, 2, 70, 70, 16, 16)
    out = flash_attention(q, k, v, causal=True)
    truth, _ = attention(q, k, v, True)
    torch.testing.assert_close(out, truth)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(truth, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_one_tensor_as_queries_keys_and_values_under_compile():
    """torch.compile takes an argument that comes three times for one, and loses gradients."""
    x, *_, d_out = make(1, 1, 1, 9, 9, 8, 8)
    truth = torch.autograd.grad(attention(x, x, x, True)[0], x, d_out)[0]
    compiled = torch.compile(lambda x: flash_attention(x, x, x), backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x, d_out)[0], truth)


def test_the_course_contract_one_saved_logsumexp_a_row():
    q, k, v, _ = (x.flatten(0, 1).float().detach().requires_grad_() for x in make(4, 1, 1, 128, 128, 64, 64))
    out = FlashAttention.apply(q, k, v)
    rows = [t for t in out.grad_fn.saved_tensors if t.shape == (4, 128)]
    assert len(rows) == 1
    torch.testing.assert_close(rows[0], torch.logsumexp(q @ k.transpose(-1, -2) / 8, -1))
    assert len(out.grad_fn.saved_tensors) == 5


def test_half_precision_is_no_worse_than_its_own_rounding():
    q, k, v, _ = make(1, 2, 2, 130, 130, 32, 32)
    truth, _ = attention(*(x.bfloat16().double() for x in (q, k, v)), True)
    out = FlashAttention.apply(*(x.bfloat16() for x in (q, k, v)), True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, truth.bfloat16(), rtol=2**-7, atol=1e-6)


def test_second_derivative_is_refused():
    q, k, v, _ = make(1, 1, 1, 8, 8, 16, 16)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(FlashAttention.apply(q, k, v).sum(), q, create_graph=True)
