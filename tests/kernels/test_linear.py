"""The product with a weight gradient in float32, on the CPU (on a GPU: the compiled model, test_kernels_gpu.py)."""

import pytest
import torch

from groundup.kernels import fused_linear, linear, swiglu_feed_forward
from groundup.kernels.backend import agree, proven
from groundup.kernels.linear import turned_linear


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


def swiglu_backward(d_hidden: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """In place of the Triton kernel."""
    (gate, up), d = (t.float() for t in gate_up.chunk(2, -1)), d_hidden.float()
    s = torch.sigmoid(gate)
    return torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1).to(gate_up.dtype)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_with_what_follows_them(weights: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """The operators' two steps in place of their kernels: the same numbers and gradients as in float64."""
    monkeypatch.setattr(fused_linear, "takes", lambda *_: True)
    monkeypatch.setattr(fused_linear, "right", lambda *_: False)
    monkeypatch.setattr(fused_linear, "swiglu_backward_op", swiglu_backward)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 24, 32), (40, 32), (2 * 48, 32), (32, 48), (2, 24, 40), (2, 24, 32)]
    x, weight, widen, narrow, beside, below = (torch.randn(s, generator=generator) for s in shapes)
    given = [t.to(weights).requires_grad_() for t in (weight / 6, widen / 6, narrow / 7)]
    given += [t.bfloat16().requires_grad_() for t in (x, beside, below)]

    def both(weight, widen, narrow, x, beside, below):
        return linear(x, weight, beside), swiglu_feed_forward(x, widen, narrow, below)

    function = torch.compile(both, backend="aot_eager", fullgraph=True) if compiled else both
    with torch.autocast("cpu", torch.bfloat16):
        ours = function(*given)
    wide = [t.detach().double().requires_grad_() for t in given]
    weight, widen, narrow, x, beside, below = wide
    gate, up = (x @ widen.T).chunk(2, -1)
    truth = x @ weight.T + beside, torch.nn.functional.silu(gate) * up @ narrow.T + below
    flows = [torch.randn(t.shape, generator=generator).bfloat16() for t in ours]
    grads = torch.autograd.grad(ours, given, flows)
    for g, t in zip(grads, given, strict=True):
        assert g.dtype == t.dtype
    for a, b in zip(
        [*ours, *grads], [*truth, *torch.autograd.grad(truth, wide, [f.double() for f in flows])], strict=True
    ):
        assert (a.double() - b).norm() / b.norm() < 8e-3


def test_a_product_turned_by_rope(monkeypatch: pytest.MonkeyPatch):
    """Two heads of 64 are turned, one is not; the gradient that comes in is that of before."""
    assert turned_linear(torch.ones(1, 8, 16), torch.ones(64, 16), (torch.ones(8, 32), torch.ones(8, 32)), 64) is None
    monkeypatch.setattr(fused_linear, "takes", lambda *_: True)
    monkeypatch.setattr(fused_linear, "right", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator, requires_grad=True) for s in ((2, 8, 16), (192, 16)))
    angle, flow = torch.randn(8, 32, generator=generator), torch.randn(2, 8, 192, generator=generator)
    out = turned_linear(x, weight, (angle.cos(), angle.sin()), 128)
    assert out is not None
    pairs = torch.view_as_complex((x @ weight.T).unflatten(-1, (3, 32, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-3)
    torch.testing.assert_close(out[..., :128], expected[..., :128])
    torch.testing.assert_close(out[..., 128:], (x @ weight.T)[..., 128:])
    ours, plain = (torch.autograd.grad(y, (x, weight), flow) for y in (out, x @ weight.T))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["residual_op", "turned_op", "swiglu_op", "swiglu_linear_backward_op"])
def test_operators_say_what_they_are(name: str, monkeypatch: pytest.MonkeyPatch):
    """Schema and shape rule against what they do."""
    monkeypatch.setattr(fused_linear, "right", lambda *_: False)
    monkeypatch.setattr(fused_linear, "swiglu_backward_op", swiglu_backward)
    x, weight = torch.randn(2, 8, 16), torch.randn(192, 16)
    arguments = {
        "residual_op": (x, weight, torch.randn(2, 8, 192)),
        "turned_op": (x, weight, torch.rand(8, 32), torch.rand(8, 32), 128),
        "swiglu_op": (x, weight),
        "swiglu_linear_backward_op": (x, torch.randn(16, 96), torch.randn(2, 8, 192)),
    }
    torch.library.opcheck(getattr(fused_linear, name), arguments[name])


def test_a_check_that_fails_is_said_once_and_kept(monkeypatch: pytest.MonkeyPatch):
    def no() -> bool:
        raise ValueError("no")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    proofs: dict[str, bool] = {}
    with pytest.warns(UserWarning, match="kernel a: ValueError at its first use: no; using two steps"):
        assert not proven(proofs, "a", "kernel a", "two steps", no)
    with pytest.warns(UserWarning, match="kernel b: wrong on a small check; using two steps"):
        assert not proven(proofs, "b", "kernel b", "two steps", lambda: False)
    assert proven(proofs, "c", "kernel c", "two steps", lambda: proven(proofs, "c", "", "", lambda: False))
    assert proofs == {"a": False, "b": False, "c": True}
    assert not proven(proofs, "a", "kernel a", "two steps", lambda: True)
    x = torch.randn(8)
    assert agree(x.bfloat16(), x)
    assert not agree(x * 1.1, x)
    assert not agree(x * float("nan"), x)
