"""Run by test_interpreted.py: SwiGLU and RoPE in Triton against PyTorch's gradients of the formulas in float64."""

import pytest
import torch

from groundup.kernels.elementwise import rope, swiglu, turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [61, 1500])
def test_swiglu(dtype, width: int):
    """Odd widths, more than a block of columns, an input whose rows do not follow each other."""
    gate_up = torch.randn(5, 7, 2 * width).to(dtype).transpose(0, 1).requires_grad_()
    d_out = torch.randn(7, 5, width).to(dtype)
    out = swiglu(gate_up, backend="triton")
    wide = gate_up.detach().double().requires_grad_()
    truth = wide[..., :width] * torch.sigmoid(wide[..., :width]) * wide[..., width:]
    ours = [out, *torch.autograd.grad(out, gate_up, d_out)]
    theirs = [truth, *torch.autograd.grad(truth, wide, d_out.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() / b.norm() < (1e-6 if dtype == torch.float32 else 6e-3)
    torch.testing.assert_close(swiglu(gate_up, backend="torch"), out)


@pytest.mark.parametrize("d", [2, 24, 64])
def test_rope(d: int):
    packed = torch.randn(2, 9, 3, 2, d).requires_grad_()
    q, k = packed[:, :, :2].flatten(2, 3).transpose(1, 2), packed[:, :, 2].transpose(1, 2)
    angle = torch.randn(9, d // 2)
    ours = rope(q, k, angle.cos(), angle.sin(), backend="triton")
    theirs = [turned(x, angle.cos(), angle.sin()) for x in (q, k)]
    flows = [torch.randn_like(x) for x in theirs]
    grads = [torch.autograd.grad(pair, packed, flows, retain_graph=True)[0] for pair in (ours, theirs)]
    for a, b in zip((*ours, grads[0]), (*theirs, grads[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_operators_are_registered_in_full():
    torch.library.opcheck(torch.ops.groundup.swiglu.default, (torch.randn(3, 6, requires_grad=True),))
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 1, 3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.groundup.rope.default, (q, k, torch.randn(3, 2), torch.randn(3, 2), False))
