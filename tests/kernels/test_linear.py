"""The product with a weight gradient in float32, on the CPU (on a GPU: the compiled model, test_kernels_gpu.py)."""

import pytest
import torch

from groundup.kernels import linear


def made(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 200, 48, generator=generator, requires_grad=True)
    weight = torch.randn(40, 48, generator=generator, requires_grad=True)
    return x, weight, torch.randn(3, 200, 40, generator=generator).to(kind)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weight_gradient_is_never_rounded_to_half_precision(kind: torch.dtype, compiled: bool):
    x, weight, d_out = made(kind)
    function = torch.compile(linear, backend="aot_eager", fullgraph=True) if compiled else linear
    with torch.autocast("cpu", kind):
        out, plain = function(x, weight), x @ weight.T
    assert out.dtype == kind
    assert torch.equal(out, plain)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), d_out)
    # The truth of the operands as they were multiplied.
    half, rows = x.detach().to(kind).double(), d_out.double()
    expected = rows.flatten(0, -2).T @ half.flatten(0, -2)
    assert d_weight.dtype == torch.float32
    torch.testing.assert_close(d_weight.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(d_x, torch.autograd.grad(plain, x, d_out)[0])


def test_elsewhere_it_is_the_plain_product():
    x, weight, d_out = made(torch.float32)
    out = linear(x, weight)
    assert torch.equal(out, x @ weight.T)
    _, d_weight = torch.autograd.grad(out, (x, weight), d_out, create_graph=True)
    assert d_weight.grad_fn is not None
    with torch.autocast("cpu", torch.bfloat16):
        half = linear(x, weight.detach().bfloat16().requires_grad_())
    assert half.dtype == torch.bfloat16


def test_one_row_and_float64():
    x, weight, _ = made(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x[0, 0], weight)
    _, d_weight = torch.autograd.grad(out.sum(), (x, weight))
    torch.testing.assert_close(d_weight, x[0, 0].bfloat16().float().expand_as(weight))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        linear(x.double(), weight)  # as the plain product: nothing is cast down


def test_only_what_is_asked_for():
    x, weight, d_out = made(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x.detach(), weight)
    assert torch.autograd.grad(out, weight, d_out)[0].shape == weight.shape
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight.detach())
    assert torch.autograd.grad(out, x, d_out)[0].shape == x.shape


def test_a_second_derivative_is_refused():
    x, weight, d_out = made(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, weight, d_out, create_graph=True)
