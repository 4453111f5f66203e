"""Run by test_interpreted.py: RoPE and attention of one projection against both apart, in float64."""

import pytest
import torch

from groundup.errors import UserError
from groundup.kernels import flash_hopper, flash_triton, rotary_attention
from groundup.kernels.attention import Rule, reference
from groundup.kernels.elementwise import turned
from groundup.kernels.rotary_attention import forward_op


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_a_projection_that_is_given_away_is_turned_in_place(compiled: bool, softcap: float):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 33, 32, requires_grad=True), torch.randn(6 * 16, 32, requires_grad=True)
    angle, flow = torch.randn(33, 8), torch.randn(2, 33, 4, 16)

    def attend(x, weight, give):
        qkv = (x @ weight.T).unflatten(-1, (-1, 16))
        rotation = (angle.cos(), angle.sin())
        return rotary_attention(qkv, rotation, 4, softcap=softcap, backend="flash-triton", give=give)

    kept = attend(x, weight, False)
    given = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(x, weight, True)
    assert torch.equal(kept, given)
    for a, b in zip(*(torch.autograd.grad(out, (x, weight), flow) for out in (kept, given)), strict=True):
        assert torch.equal(a, b)
    qkv = (x @ weight.T).unflatten(-1, (-1, 16)).detach()
    before = qkv.clone()
    rotary_attention(qkv, (angle.cos(), angle.sin()), 4, backend="flash-triton", give=True)
    q, k = (turned(t, angle.cos(), angle.sin()) for t in before.transpose(1, 2).split([4, 1, 1], 1)[:2])
    torch.testing.assert_close(qkv.transpose(1, 2), torch.cat([q, k, before.transpose(1, 2)[:, 5:]], 1))


def test_heads_that_do_not_fit_are_refused():
    qkv = torch.randn(1, 8, 7, 16)
    for n_heads, message in ((3, "2 key heads do not divide 3 query heads"), (4, "3 heads"), (7, "0 heads"), (9, "-2")):
        with pytest.raises(UserError, match=message):
            rotary_attention(qkv, None, n_heads, backend="flash-triton")


def test_the_operator_is_registered_in_full():
    qkv, angle = torch.randn(1, 9, 4, 16, requires_grad=True), torch.randn(9, 8)
    for rotation in ((angle.cos(), angle.sin()), (None, None)):
        torch.library.opcheck(
            torch.ops.groundup.rotary_attention.default,
            (qkv, *rotation, 2, 0.0, False, True, False),
            atol=1e-5,
            rtol=1e-5,
        )
    torch.library.opcheck(torch.ops.groundup.turn_.default, (qkv.detach(), angle.cos(), angle.sin(), 2))


@pytest.mark.parametrize("rope", [True, False])
def test_sums_of_queries_in_float32_are_scaled_and_turned(rope: bool, monkeypatch):
    """What the Hopper backward hands over, dQ / scale in float32, from the plain kernels instead."""

    def query_sums(d_out, d_lse, q, k, v, out, lse, rule, into):
        d_q, d_k, d_v = flash_triton.attention_backward(d_out, d_lse, q, k, v, out, lse, rule)
        into[0].copy_(d_k)
        into[1].copy_(d_v)
        return (d_q.float() / rule.scale).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(flash_hopper, "pays", lambda keys_from, q, k: keys_from is flash_hopper.BACKWARD_FROM)
    monkeypatch.setattr(flash_hopper, "query_sums", query_sums)
    torch.manual_seed(0)
    qkv, flow = torch.randn(2, 33, 4, 16).bfloat16().requires_grad_(), torch.randn(2, 2, 33, 16).bfloat16()
    angle = torch.randn(33, 8)
    rotation = (angle.cos(), angle.sin()) if rope else (None, None)
    grads = []
    for hopper in (True, False):
        out = forward_op(qkv, *rotation, 2, 0.0, hopper, not hopper, False)[0]
        grads.append(torch.autograd.grad(out, qkv, flow)[0])
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-3)
