"""Run by test_interpreted.py: RoPE and attention of one projection against both apart, in float64."""

import pytest
import torch

from groundup.kernels import rotary_attention
from groundup.kernels.attention import Rule, reference
from groundup.kernels.elementwise import turned


def apart(qkv: torch.Tensor, rotation, n_heads: int, softcap: float) -> torch.Tensor:
    kv = (qkv.shape[2] - n_heads) // 2
    q, k, v = qkv.transpose(1, 2).split([n_heads, kv, kv], dim=1)
    if rotation is not None:
        q, k = (turned(x, *(t.double() for t in rotation)) for x in (q, k))
    return reference(q, k, v, Rule(True, 0, softcap, qkv.shape[-1] ** -0.5), None)[0].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("seq", "n_heads", "kv", "d", "softcap", "rope"),
    [(37, 2, 2, 16, 0.0, True), (48, 4, 2, 24, 0.0, True), (33, 3, 1, 16, 5.0, False), (20, 2, 2, 10, 0.0, True)],
)
def test_against_rope_and_attention_apart(dtype, seq, n_heads, kv, d, softcap, rope):
    """d 10: rows that do not start on 16 bytes take the operators apart."""
    torch.manual_seed(0)
    qkv = torch.randn(2, seq, n_heads + 2 * kv, d).to(dtype).requires_grad_()
    angle = torch.randn(seq, d // 2)
    rotation = (angle.cos(), angle.sin()) if rope else None
    ours = rotary_attention(qkv, rotation, n_heads, softcap=softcap, backend="flash-triton")
    wide = qkv.detach().double().requires_grad_()
    truth = apart(wide, rotation, n_heads, softcap)
    flow = torch.randn(2, seq, n_heads, d).to(dtype)
    before = qkv.detach().clone()
    (grad,) = torch.autograd.grad(ours, qkv, flow, retain_graph=True)
    (expected,) = torch.autograd.grad(truth, wide, flow.double())
    for a, b in ((ours, truth), (grad, expected)):
        assert a.dtype == dtype
        assert (a.double() - b).norm() / b.norm() < (2e-6 if dtype == torch.float32 else 1.2e-2)
    # Nothing that autograd kept was turned in place.
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, flow)[0], grad, rtol=0, atol=0)
    torch.testing.assert_close(qkv.detach(), before, rtol=0, atol=0)


def test_the_operator_is_registered_in_full():
    qkv, angle = torch.randn(1, 9, 4, 16, requires_grad=True), torch.randn(9, 8)
    for rotation in ((angle.cos(), angle.sin()), (None, None)):
        torch.library.opcheck(
            torch.ops.groundup.rotary_attention.default, (qkv, *rotation, 2, 0.0, False, True), atol=1e-5, rtol=1e-5
        )
