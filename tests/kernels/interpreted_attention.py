"""Run by test_interpreted.py: the attention kernels against attention written out in float64."""

import pytest
import torch
from attention_truth import attention as truth
from attention_truth import make
from torch._subclasses.fake_tensor import FakeTensorMode

from groundup.kernels import FlashAttentionTriton, attention
from groundup.kernels.attention import backward_op, forward_op

IDS = torch.tensor([[0] * 10 + [1] + [2] * 40 + [3] * 19, [0] * 70])
CASES = {
    "causal": ((1, 1, 1, 40, 40, 16, 16), {}),
    "more keys, grouped, wider v": ((1, 4, 2, 20, 37, 16, 32), {}),
    "rows that see nothing": ((1, 2, 1, 50, 37, 16, 16), {}),
    "full, padded widths": ((1, 2, 2, 33, 45, 24, 20), {"causal": False}),
    "window": ((1, 1, 1, 60, 60, 16, 16), {"window": 20}),
    "window without end": ((1, 1, 1, 16, 16, 16, 16), {"window": 2**31 - 1}),
    "softcap": ((1, 1, 1, 40, 40, 16, 16), {"softcap": 5.0}),
    "documents": ((2, 2, 1, 70, 70, 16, 16), {"documents": IDS}),
    "documents, full": ((2, 1, 1, 70, 70, 16, 16), {"documents": IDS, "causal": False}),
    "documents, window": ((2, 1, 1, 70, 70, 16, 16), {"documents": IDS, "window": 7}),
    "documents of one sequence for the batch": ((2, 1, 1, 40, 40, 16, 16), {"documents": IDS[:1, :40]}),
    "one query": ((1, 2, 1, 1, 9, 16, 16), {}),
    "another scale": ((1, 1, 1, 20, 20, 16, 16), {"scale": 0.7}),
}


@pytest.mark.parametrize("name", CASES)
def test_output_logsumexp_and_gradients(name: str):
    shape, options = CASES[name]
    *exact, d_out = make(*shape)
    q, k, v = (x.detach().float().requires_grad_() for x in exact)
    out, lse = attention(q, k, v, backend="flash-triton", return_lse=True, **options)
    documents = options.get("documents")
    named = {"causal": True} | options | {"documents": None if documents is None else (documents, documents)}
    true_out, true_lse = truth(*exact, **named)
    seen = torch.isfinite(true_lse)
    torch.testing.assert_close(out.double(), true_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)
    d_lse = torch.randn(true_lse.shape, dtype=torch.float64).masked_fill(~seen, 0.0)
    ours = torch.autograd.grad((out, lse), (q, k, v), (d_out.float(), d_lse.float()))
    theirs = torch.autograd.grad((true_out, true_lse), exact, (d_out, d_lse))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_bfloat16_is_within_its_rounding():
    *exact, d_out = make(1, 2, 1, 40, 40, 16, 16)
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    out = attention(*half, backend="flash-triton")
    ours = torch.autograd.grad(out, half, d_out.bfloat16())
    wide = [x.detach().double().requires_grad_() for x in half]
    true_out, _ = truth(*wide, True)
    theirs = torch.autograd.grad(true_out, wide, d_out.bfloat16().double())
    for a, b in zip((out, *ours), (true_out, *theirs), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() / b.norm() < 6e-3


def test_any_strides_and_an_expanded_gradient():
    packed = torch.randn(2, 18, 3, 2, 16).requires_grad_()
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    attention(q, k, v, backend="flash-triton").sum().backward()
    ours, packed.grad = packed.grad, None
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    truth(q, k, v, True)[0].sum().backward()
    torch.testing.assert_close(ours, packed.grad, rtol=1e-4, atol=1e-5)


def test_nothing_to_attend_to_gives_zeros():
    q, k = torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(1, 1, 0, 16)
    out = attention(q, k, k, backend="flash-triton")
    assert out.eq(0).all()
    assert torch.autograd.grad(out.sum(), q)[0].eq(0).all()


def test_the_operator_is_registered_in_full_and_has_no_second_derivative():
    q, k, v, _ = (x.detach().float().requires_grad_() for x in make(1, 1, 1, 5, 5, 16, 16))
    flags = (True, 0, 0.0, 0.25, False, True)
    torch.library.opcheck(torch.ops.groundup.attention_forward.default, (q, k, v, None, None, *flags))
    grad = torch.autograd.grad(attention(q, k, v, backend="flash-triton").sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


@pytest.mark.parametrize(("n_k", "d", "d_v"), [(8, 16, 16), (8, 18, 20), (8, 16, 18), (0, 16, 16)])
def test_strides_are_those_the_compiler_was_promised(n_k: int, d: int, d_v: int):
    """Rows that do not start on 16 bytes are padded inside; what comes back lies in memory as all else does."""
    q, k, v, d_out = make(2, 2, 2, 8, n_k, d, d_v, torch.float32)
    flags = (True, 0, 0.0, 0.25, False, True)

    def both(q, k, v, d_out):
        out, lse = forward_op(q, k, v, None, None, *flags)
        return [out, lse, *backward_op(d_out, None, q, k, v, out, lse, None, None, *flags)]

    with torch.no_grad():
        real = both(q, k, v, d_out)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = both(*(mode.from_tensor(x) for x in (q, k, v, d_out)))
    assert [(x.shape, x.stride()) for x in real] == [(x.shape, x.stride()) for x in fake]


def test_one_graph_under_compile():
    q, k, v, d_out = (x.detach().float().requires_grad_() for x in make(1, 2, 1, 5, 5, 16, 16))
    function = torch.compile(lambda *x: attention(*x, backend="flash-triton"), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(function(q, k, v), (q, k, v), d_out)
    theirs = torch.autograd.grad(attention(q, k, v, backend="flash-triton"), (q, k, v), d_out)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_the_course_contract():
    q, k, v, d_out = (x.detach()[:, 0].float().requires_grad_() for x in make(2, 1, 1, 40, 40, 16, 16))
    out = FlashAttentionTriton.apply(q, k, v, True)
    rows = [t for t in out.grad_fn.saved_tensors if t.shape == (2, 40)]
    assert len(rows) == 1
    true_out, true_lse = truth(*(x[:, None] for x in (q, k, v)), True)
    torch.testing.assert_close(rows[0], true_lse[:, 0])
    ours = torch.autograd.grad(out, (q, k, v), d_out)
    theirs = torch.autograd.grad(true_out[:, 0], (q, k, v), d_out)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
