"""Run by test_interpreted.py: RMSNorm and linear cross entropy in Triton against float64."""

from importlib import import_module

import pytest
import torch

from groundup.kernels import adamw_step, linear_cross_entropy, rms_norm
from groundup.kernels.linear_cross_entropy import rows_in_place, scale_in_place
from groundup.kernels.rms_norm import forward_op

chunks = import_module("groundup.kernels.linear_cross_entropy")


def apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 50), (5, 64), (9, 300)])
def test_rms_norm(shape, residual: bool, dtype):
    torch.manual_seed(0)
    x, r, d_out, d_total = (torch.randn(shape).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1]).requires_grad_()
    leaves = [x.requires_grad_(), *([r.requires_grad_()] if residual else [])]
    result = rms_norm(x, weight, residual=r if residual else None, backend="triton")
    outs, flows = (result, (d_out, d_total)) if residual else ((result,), (d_out,))
    ours = torch.autograd.grad(outs, (*leaves, weight), flows)

    wide = [t.detach().double().requires_grad_() for t in (*leaves, weight)]
    total = sum(wide[:-1])
    # What is normalised is the rounded sum; its rounding has no gradient.
    total = total + ((outs[1] if residual else x).detach().double() - total.detach())
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * wide[-1]
    theirs = torch.autograd.grad((out, total) if residual else (out,), wide, [f.double() for f in flows])
    bound = 1e-6 if dtype == torch.float32 else 6e-3
    assert apart(outs[0], out) < bound
    for a, b in zip(ours, theirs, strict=True):
        assert apart(a, b) < (bound if a.dtype == dtype else 1e-6)


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
@pytest.mark.parametrize("width", [1024, 2048, 8192])
def test_rms_norm_of_whole_rows(width: int, kinds):
    """Half precision and a power of two: forward_row_kernel, but for 1024 with a weight in float32."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, width + 16).to(kinds[0])[:, 16:], torch.randn(width).to(kinds[1])
    out, rstd, _ = forward_op._init_fn(x, None, weight, 1e-5)
    truth = torch.rsqrt(x.double().square().mean(-1) + 1e-5)
    assert apart(out, x.double() * truth[:, None] * weight) < 4e-3
    assert apart(rstd, truth) < 1e-6


def test_rms_norm_of_a_transposed_input_and_an_expanded_gradient():
    x = torch.randn(40, 6).T.requires_grad_()
    weight = torch.randn(40, requires_grad=True)
    rms_norm(x, weight, backend="triton").sum().backward()
    ours, x.grad, weight_grad, weight.grad = x.grad, None, weight.grad, None
    rms_norm(x, weight, backend="torch").sum().backward()
    torch.testing.assert_close(ours, x.grad)
    torch.testing.assert_close(weight_grad, weight.grad)


def test_float64_is_torch_s():
    """The kernels compute in float32."""
    x, weight = torch.randn(3, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    with pytest.warns(UserWarning, match="float64"):
        out = rms_norm(x, weight, backend="triton")
    torch.testing.assert_close(out, rms_norm(x, weight, backend="torch"), rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_rms_norm_of_two_types_has_the_first_one(kinds):
    x, r = (torch.randn(3, 20).to(kind).requires_grad_() for kind in kinds)
    weight = torch.randn(20)
    ours, theirs = (rms_norm(x, weight, residual=r, backend=backend) for backend in ("triton", "torch"))
    flows = [torch.randn(3, 20).to(kinds[0]) for _ in range(2)]
    grads = [torch.autograd.grad(pair, (x, r), flows) for pair in (ours, theirs)]
    for a, b in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
    assert ours[0].dtype == ours[1].dtype == kinds[0]


def test_rms_norm_whose_sum_alone_is_used():
    x, r, weight = (torch.randn(shape, requires_grad=True) for shape in ((3, 20), (3, 20), (20,)))
    total = rms_norm(x, weight, residual=r, backend="triton")[1]
    grads = torch.autograd.grad(total.sum(), (x, r, weight), allow_unused=True)
    assert grads[0].eq(1).all()
    assert grads[1].eq(1).all()
    assert grads[2] is None


def test_operators_are_registered_in_full():
    x, weight = torch.randn(6, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    for residual in (None, x.detach() * 2):
        torch.library.opcheck(torch.ops.groundup.rms_norm_forward.default, (x, residual, weight, 1e-5))
    head, targets = torch.randn(11, 40, requires_grad=True), torch.randint(0, 11, (6,))
    arguments = (x, head, targets, torch.tensor(3.0), 0.0, 0.0, True, True, True)
    torch.library.opcheck(torch.ops.groundup.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, 0.0), (1e-2, 3.0)])
@pytest.mark.parametrize("vocab", [37, 48, 257])
def test_linear_cross_entropy_equals_the_plain_chunks(vocab: int, z_loss: float, softcap: float):
    """48 columns need no padding; 37 and 257 are padded to 64 and 320."""
    torch.manual_seed(0)
    x, head = torch.randn(2, 9, 12, requires_grad=True), torch.randn(vocab, 12, requires_grad=True)
    targets = torch.randint(0, vocab, (2, 9))
    targets[0, :3] = -100
    found = []
    for backend in ("triton", "torch"):
        loss = linear_cross_entropy(x, head, targets, None, z_loss, softcap, backend)
        found.append([loss, *torch.autograd.grad(loss, (x, head))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "vocab", "z_loss", "softcap"),
    [(torch.bfloat16, 112, 0.0, 0.0), (torch.bfloat16, 57, 1e-2, 3.0), (torch.float16, 112, 0.0, 0.0)],
)
def test_the_opening_chunk_equals_the_others(monkeypatch, dtype, vocab: int, z_loss: float, softcap: float):
    """16 of 24 tokens begin in the memory of dW, in pieces of 32 columns; of 112 the last 16 are one."""
    torch.manual_seed(0)
    x, head = torch.randn(24, 40).to(dtype).requires_grad_(), torch.randn(vocab, 40).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (24,))
    targets[:3] = -100
    monkeypatch.setattr(chunks, "LOSS_BLOCK", 32)
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 8)
    found = []
    for rows in (16, 0):
        monkeypatch.setattr(chunks, "opening_rows", lambda *_, rows=rows: rows)
        loss = linear_cross_entropy(x, head, targets, None, z_loss, softcap, "triton")
        found.append([loss, *torch.autograd.grad(loss, (x, head))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_targets_that_do_not_follow_each_other():
    """reshape(-1) of a column is a view with a stride."""
    x, head = torch.randn(6, 12), torch.randn(16, 12)
    targets = torch.arange(12).view(6, 2)[:, 1]
    assert targets.reshape(-1).stride() == (2,)
    ours, theirs = (linear_cross_entropy(x, head, t, backend="triton") for t in (targets, targets.clone()))
    assert torch.equal(ours, theirs)


def test_a_target_outside_the_vocabulary_touches_no_other_row():
    """Rows of 37 logits and 11 columns of padding; the rows before and after are not the kernel's."""
    torch.manual_seed(0)
    memory, losses = torch.randn(6, 48), torch.empty(4)
    before = memory.clone()
    rows_in_place(memory[1:5], torch.tensor([-1, 40, 3, 48]), losses, torch.ones(()), 0.0, 0.0, True, 37)
    for row in (0, 5):
        assert torch.equal(memory[row], before[row])
    assert losses.isnan().tolist() == [True, True, False, True]
    assert memory[1:5, :37].isnan().all(1).tolist() == [True, True, False, True]
    p = torch.softmax(before[3, :37], 0)
    p[3] -= 1
    torch.testing.assert_close(memory[3, :37], p)


def test_columns_past_the_vocabulary_take_no_probability():
    """With every logit at -100 and a softcap, padding treated as logits would hold most of the mass."""
    logits, losses = torch.full((2, 17), -100.0), torch.empty(2)
    rows_in_place(logits, torch.tensor([3, 16]), losses, torch.ones(()), 0.0, 30.0, True, 17)
    torch.testing.assert_close(losses, torch.full((2,), torch.log(torch.tensor(17.0)).item()))
    torch.testing.assert_close(logits.sum(1), torch.zeros(2), atol=1e-6, rtol=0)


def test_padding_takes_no_probability_and_has_no_gradient():
    logits, losses = torch.zeros(2, 64), torch.empty(2)
    rows_in_place(logits, torch.tensor([3, 36]), losses, torch.ones(()), 0.0, 0.0, True, 37)
    torch.testing.assert_close(losses, torch.full((2,), torch.log(torch.tensor(37.0)).item()))
    assert logits[:, 37:].eq(0).all()
    torch.testing.assert_close(logits.sum(1), torch.zeros(2), atol=1e-6, rtol=0)


def test_a_row_that_is_all_minus_infinity_but_one():
    logits, losses = torch.full((1, 5000), float("-inf")), torch.empty(1)
    logits[0, 4900] = 1.0
    rows_in_place(logits, torch.tensor([4900]), losses, torch.ones(()), 0.0, 0.0, True, 5000)
    assert losses.item() == 0.0
    assert logits.eq(0).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_adamw_over_many_tensors(kind: torch.dtype):
    """Odd sizes, one off 16 bytes, five steps; torch in float64 is the truth, bf16 copies are the rounded weights."""
    shapes = [(3, 5), (4099,), (64, 70), (1,)]
    weights = [torch.randn(s) for s in shapes[:-1]] + [torch.randn(2)[1:]]
    truth = [w.double().requires_grad_() for w in weights]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(truth, **settings)
    for step in range(1, 6):
        gradients = [torch.randn(s).to(kind) for s in shapes]
        for p, g in zip(truth, gradients, strict=True):
            p.grad = g.double()
        optimizer.step()
        adamw_step(weights, gradients, first, second, step, **settings, copies=copies)
    for ours, theirs, copy in zip(weights, truth, copies, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(copy.float(), ours, rtol=2**-7, atol=0)


@pytest.mark.parametrize("betas", [(0.9, 0.9999), (0.999, 0.95)])
def test_adamw_s_moments_are_exact_where_beta_is_near_1(betas: tuple[float, float]):
    """1 - beta taken in float32 would be off by 2e-4 of itself."""
    weight, first, second = torch.zeros(50), torch.zeros(50), torch.zeros(50)
    truth = torch.zeros(2, 50, dtype=torch.float64)
    for step in range(1, 4):
        gradient = torch.randn(50)
        adamw_step([weight], [gradient], [first], [second], step, 1e-3, betas, 1e-8, 0.0)
        powers = torch.stack((gradient.double(), gradient.double() ** 2))
        truth = truth + (powers - truth) * (1 - torch.tensor(betas, dtype=torch.float64)[:, None])
    torch.testing.assert_close(torch.stack((first, second)).double(), truth, rtol=1e-6, atol=1e-9)


def test_scaling_in_place():
    x = torch.randn(9000)
    expected = x * 3
    scale_in_place(x, torch.tensor(1.0), True)
    scale_in_place(x, torch.tensor(3.0), True)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
