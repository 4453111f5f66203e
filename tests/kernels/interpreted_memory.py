"""Run by test_interpreted.py: kernels write every element of what they return, and nothing beside it."""

import threading
from importlib import import_module

import pytest
import torch
from attention_truth import make
from torch.utils._python_dispatch import TorchDispatchMode

from groundup.kernels import adamw_step, attention, elementwise, linear_cross_entropy, rms_norm, rope, swiglu

# The package gives functions these names; the modules are behind them.
attend, norm, rotary, loss = (
    import_module(f"groundup.kernels.{name}")
    for name in ("attention", "rms_norm", "rotary_attention", "linear_cross_entropy")
)
GUARD, MARK = 64, 77.0
"""Elements before and behind every fresh tensor, and what they hold."""
aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)


class Guarded(TorchDispatchMode):
    """Memory that is handed out uninitialised is full of NaN and lies between two guard bands."""

    def __init__(self):
        super().__init__()
        self.handed_out: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in EMPTY or not out.is_floating_point() or not out.numel():
            return out
        memory = torch.full((out.numel() + 2 * GUARD,), MARK, dtype=out.dtype)
        memory[GUARD:-GUARD] = torch.nan
        self.handed_out.append(memory)
        return memory.as_strided(out.shape, out.stride(), GUARD)

    def check(self) -> None:
        assert self.handed_out
        for memory in self.handed_out:
            assert memory[:GUARD].eq(MARK).all()
            assert memory[-GUARD:].eq(MARK).all()


def attention_passes(d: int, d_v: int) -> list[torch.Tensor]:
    q, k, v, d_out = (x.detach().float() for x in make(1, 2, 1, 21, 37, d, d_v))
    flags = (True, 0, 0.0, 0.25, False, True)
    out, lse = attend.forward_op._init_fn(q, k, v, None, None, *flags)
    return [out, lse, *attend.backward_op._init_fn(d_out, None, q, k, v, out, lse, None, None, *flags)]


def norm_passes() -> list[torch.Tensor]:
    x, r, d_out, weight = torch.randn(5, 50), torch.randn(5, 50), torch.randn(5, 50), torch.randn(50)
    out, rstd, total = norm.forward_op._init_fn(x, r, weight, 1e-5)
    return [out, rstd, total, *norm.backward_op._init_fn(d_out, x, total, weight, rstd)]


def norm_of_whole_rows() -> list[torch.Tensor]:
    x, weight = torch.randn(5, 1024).bfloat16(), torch.randn(1024).bfloat16()
    return list(norm.forward_op._init_fn(x, None, weight, 1e-5))


def swiglu_passes() -> list[torch.Tensor]:
    x = torch.randn(3, 2 * 1100)
    out = elementwise.swiglu_op._init_fn(x)
    return [out, elementwise.swiglu_backward_op._init_fn(out, x)]


def rotary_passes() -> list[torch.Tensor]:
    qkv, angle, flags = torch.randn(1, 21, 4, 24), torch.randn(21, 12), (2, 0.0, False, True)
    out, lse, turned = rotary.forward_op._init_fn(qkv, angle.cos(), angle.sin(), *flags, False)
    d_out = torch.randn(1, 2, 21, 24)
    return [out, turned, rotary.backward_op._init_fn(d_out, turned, out, lse, angle.cos(), angle.sin(), *flags)]


PASSES = {
    "attention": lambda: attention_passes(16, 24),
    "attention, padded": lambda: attention_passes(18, 17),
    "norm": norm_passes,
    "norm of whole rows": norm_of_whole_rows,
    "swiglu": swiglu_passes,
    "rope": lambda: elementwise.rope_op._init_fn(*torch.randn(2, 1, 2, 9, 24), *torch.randn(2, 9, 12), False),
    "rotary": rotary_passes,
    "loss": lambda: loss.forward_op._init_fn(
        torch.randn(9, 12), torch.randn(37, 12), torch.arange(9), torch.tensor(9.0), 0.0, 0.0, True, True, True
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_everything_is_written_and_nothing_beside_it(name: str):
    with torch.no_grad(), Guarded() as guarded:
        results = PASSES[name]()
    guarded.check()
    assert all(x.isfinite().all() for x in results)


def test_adamw_writes_its_tensors_alone():
    memory = torch.full((4, 2500 + 2 * GUARD), MARK)
    memory[:, GUARD:-GUARD] = torch.rand(4, 2500)
    adamw_step(*([row[GUARD:-GUARD]] for row in memory), 1, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    assert memory[:, :GUARD].eq(MARK).all()
    assert memory[:, -GUARD:].eq(MARK).all()


def test_all_labels_ignored_is_zero():
    x, head = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    value = linear_cross_entropy(x, head, torch.full((6,), -100), backend="triton")
    grads = torch.autograd.grad(value, (x, head))
    assert value.item() == 0
    assert all(g.eq(0).all() for g in grads)


SECOND = {
    "norm": lambda x: rms_norm(x, torch.ones(16), backend="triton"),
    "swiglu": lambda x: swiglu(x, backend="triton"),
    "rotary": lambda x: rotary.rotary_attention(x[:, :, :9].transpose(1, 2), None, 1, backend="flash-triton"),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_gradient_of_a_gradient_is_refused(name: str):
    x = torch.randn(1, 3, 9, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(SECOND[name](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_rope_may_be_differentiated_twice():
    q, k, angle = torch.randn(1, 2, 9, 24, requires_grad=True), torch.randn(1, 1, 9, 24), torch.randn(9, 12)
    out = rope(q, k, angle.cos(), angle.sin(), backend="triton")[0]
    (grad,) = torch.autograd.grad(out.square().sum() / 2, q, create_graph=True)
    # A rotation keeps lengths: the gradient is q itself.
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), q)[0], torch.ones_like(q))


def test_a_backward_in_another_thread():
    q, k, v, d_out = (x.detach().float().requires_grad_() for x in make(1, 1, 1, 9, 9, 16, 16))
    out = attention(q, k, v, backend="flash-triton")
    thread = threading.Thread(target=lambda: out.backward(d_out))
    thread.start()
    thread.join()
    theirs = torch.autograd.grad(attention(q, k, v, backend="flash-triton"), (q, k, v), d_out)
    for x, b in zip((q, k, v), theirs, strict=True):
        assert torch.equal(x.grad, b)
