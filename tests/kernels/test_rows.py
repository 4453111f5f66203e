"""RMSNorm and linear cross entropy, the PyTorch side, against float64 and torch's own."""

from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groundup.errors import UserError
from groundup.kernels import RMSNorm, linear_cross_entropy, rms_norm
from groundup.kernels.rms_norm import backward_weight, backward_x

# The package gives the function this name; the module is behind it.
chunks = import_module("groundup.kernels.linear_cross_entropy")


def test_hand_derived_backward_equals_autograd():
    x = torch.randn(4, 5, 50, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: RMSNorm.apply(x, w), (x, weight))
    d_out = torch.randn_like(x)
    theirs = torch.autograd.grad(torch_rms_norm(x, (50,), weight, 1e-5), (x, weight), d_out)
    torch.testing.assert_close(backward_x(d_out, x, weight), theirs[0])
    torch.testing.assert_close(backward_weight(d_out, x, weight), theirs[1])


def test_fused_residual_is_the_two_steps():
    x, r, weight = torch.randn(3, 20).bfloat16(), torch.randn(3, 20).bfloat16(), torch.randn(20)
    out, total = rms_norm(x, weight, residual=r)
    assert torch.equal(total, x + r)
    assert torch.equal(out, rms_norm(x + r, weight))


def eager(x, weight, targets, n_valid, z_loss, softcap):
    logits = x.flatten(0, -2) @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    valid = targets.flatten() != -100
    z = (torch.logsumexp(logits, -1) ** 2 * valid).sum() * z_loss
    total = cross_entropy(logits, targets.flatten(), reduction="sum") + z
    return total / (valid.sum().clamp(min=1) if n_valid is None else n_valid)


@pytest.mark.parametrize("n_valid", [None, 7.0, torch.tensor(9)])
@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 3.0), (1e-2, 3.0)])
def test_loss_and_gradients_over_several_chunks(monkeypatch, n_valid, z_loss: float, softcap: float):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    x = torch.randn(5, 60, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 37, (5, 60))
    targets[0, :7] = -100
    ours, theirs = (f(x, weight, targets, n_valid, z_loss, softcap) for f in (linear_cross_entropy, eager))
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(2.5 * loss, (x, weight)) for loss in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("columns", "width", "rows"), [(128256, 64, 128), (50304, 48, 80), (20000, 32, 64)])
def test_a_piece_of_the_opening_is_read_before_dw_comes_over_it(columns: int, width: int, rows: int):
    d_weight = torch.empty(columns, width)
    pieces, parts = chunks.places_of_pieces(d_weight, rows, torch.bfloat16)

    def span(t: torch.Tensor) -> range:
        return range(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())

    def apart(a: range, b: range) -> bool:
        return a.stop <= b.start or b.stop <= a.start

    assert sum(piece.shape[1] for piece in pieces) == columns
    for i, piece in enumerate(pieces):
        assert piece.shape == (rows, len(range(columns)[parts[i]]))
        assert all(apart(span(piece), span(d_weight[part])) for part in parts[: i + 1])
        assert all(apart(span(piece), span(other)) for other in pieces[:i])
        assert i == len(pieces) - 1 or span(piece).stop <= span(d_weight).stop


def test_chunks_are_larger_where_the_weight_is_float32():
    """GPT-2 350M's step: 4 instead of 13 passes over dW; a weight in bf16 keeps to what its own gradient leaves."""
    assert chunks.chunk_rows(16384, 50304, 1024, 2, 4) == 4096
    assert chunks.chunk_rows(16384, 50304, 1024, 2, 2) == 1312
    assert chunks.chunk_rows(16384, 128256, 2048, 2, 2) == 880  # 0.70 GiB with dW in float32, beyond both gradients
    assert chunks.chunk_rows(1 << 17, 128256, 2048, 2, 4) * 128256 * 2 <= 1 << 30
    assert chunks.opening_rows(16384, 128256, 2048, 2, 880) == 4096  # their logits are as large as dW in float32
    assert chunks.opening_rows(16384, 50304, 768, 2, 1312) == 0
    assert chunks.piece_columns(128256) * 8 == 128256


def test_weight_gradient_is_summed_in_float32_over_chunks(monkeypatch):
    """256 chunks whose parts nearly cancel in bf16: the error must stay that of one rounding."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 1)
    x, weight = torch.randn(256, 8).bfloat16(), torch.randn(16, 8).bfloat16().requires_grad_()
    targets = torch.randint(0, 16, (256,))
    ours = torch.autograd.grad(linear_cross_entropy(x, weight, targets), weight)[0]
    wide = weight.detach().double().requires_grad_()
    truth = torch.autograd.grad(eager(x.double(), wide, targets, None, 0.0, 0.0), wide)[0]
    assert (ours.double() - truth).norm() / truth.norm() < 6e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weight_type", [torch.float16, torch.float32])
def test_float16_gradients_are_divided_after_the_loss_scale(compiled: bool, weight_type: torch.dtype):
    """One over 2¹⁹ tokens is nothing in float16, and 2¹⁷ over 2¹⁹ is fine: the scale has to come in first."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 64).half().requires_grad_(), (torch.randn(512, 64) / 8).to(weight_type).requires_grad_()
    targets = torch.randint(0, 512, (64,))
    function = torch.compile(linear_cross_entropy, backend="aot_eager") if compiled else linear_cross_entropy
    ours = torch.autograd.grad(2**17 * function(x, weight, targets, 2**19), (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    theirs = torch.autograd.grad(2**17 * eager(*wide, targets, 2**19, 0.0, 0.0), wide)
    for a, b, leaf in zip(ours, theirs, (x, weight), strict=True):
        assert a.dtype == leaf.dtype
        assert (a.double() - b).norm() / b.norm() < 1e-3


def test_all_ignored_gives_zero():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.full((6,), -100))
    grads = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0
    assert all(g.eq(0).all() for g in grads)


def test_a_retained_graph_may_be_differentiated_again():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(0, 11, (6,))
    loss = linear_cross_entropy(x, weight, targets)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    theirs = torch.autograd.grad(eager(*wide, targets, None, 0.0, 0.0), wide)
    # All are looked at after the last one: what was handed out stays as it was.
    factors = (1, 0, 3)
    ours = [torch.autograd.grad(c * loss, (x, weight), retain_graph=c < 3) for c in factors]
    for factor, pair in zip(factors, ours, strict=True):
        for a, b in zip(pair, theirs, strict=True):
            torch.testing.assert_close(a.double(), factor * b, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, torch.zeros(6, dtype=int)), x, create_graph=True)


def test_gradients_are_made_only_where_asked_for():
    x, weight = torch.randn(6, 8), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(0, 11, (6,))
    loss = linear_cross_entropy(x, weight, targets)
    theirs = cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(v, weight)[0] for v in (loss, theirs)))
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), theirs)


@pytest.mark.parametrize("foreign", [-1, 11, 2**40])
def test_a_target_outside_the_vocabulary_is_not_a_number(foreign: int):
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8)
    loss = linear_cross_entropy(x, weight, torch.tensor([0, -100, foreign, 10, 3, 3]))
    grad = torch.autograd.grad(loss, x)[0]
    assert loss.isnan()
    assert grad.isnan().all(1).tolist() == [i == 2 for i in range(6)]
    assert grad[1].eq(0).all()


class Watch(TorchDispatchMode):
    """What passes through torch's operators."""

    def __init__(self):
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        return out


def test_a_count_from_the_host_is_no_copy_that_waits():
    with FakeTensorMode():
        x, targets = torch.empty(4, 8, device="cuda"), torch.empty(4, device="cuda", dtype=torch.int64)
        with Watch() as watch:
            linear_cross_entropy(x, x, targets, 7)
    assert watch.seen
    assert all(t.is_cuda for t in watch.seen)


def test_the_inputs_are_not_copied_in_float32():
    x, targets = torch.randn(40, 24).bfloat16(), torch.randint(0, 11, (40,))
    flags = (torch.tensor(40.0), 0.0, 0.0, True, False, False)
    with Watch() as watch:
        chunks.forward_op._init_fn(x, torch.randn(11, 24), targets, *flags)
    assert not [t for t in watch.seen if t.shape == x.shape and t.dtype == torch.float32]


def test_narrowing_in_place_reads_before_it_overwrites():
    wide = torch.randn(2000, 700)
    expected = wide.to(torch.bfloat16)
    narrow = chunks.narrowed(wide, torch.bfloat16)
    assert torch.equal(narrow, expected)
    assert narrow.data_ptr() == wide.data_ptr()


def test_messages():
    with pytest.raises(UserError, match="do not fit together"):
        linear_cross_entropy(torch.randn(4, 8), torch.randn(5, 7), torch.zeros(4, dtype=int))
    with pytest.raises(UserError, match="do not fit together"):
        rms_norm(torch.randn(4, 8), torch.randn(7))
    with pytest.raises(UserError, match="cannot run"):
        rms_norm(torch.randn(4, 8), torch.randn(8), backend="triton")
