"""What only a GPU can show: a backward on a thread that has run nothing yet, a device that is not the current one."""

import threading

import pytest
import torch

from groundup.kernels import (
    attention,
    fused_linear,
    linear_cross_entropy,
    rms_norm,
    rope,
    swiglu,
    swiglu_feed_forward,
)
from groundup.kernels.linear import turned_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def gradients(device: str, thread: bool = False) -> list[torch.Tensor]:
    """Of x, through every kernel that the model has."""
    generator = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 2, 64, 64, generator=generator), torch.randn(64, 32, generator=generator)
    x = x.to(device, torch.bfloat16).requires_grad_()
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    triton = {"backend": "triton"}
    q, k = rope(rms_norm(x, torch.ones(64, device=device), **triton), x, cos, sin, **triton)
    y = swiglu(attention(q, k, x, backend="flash-triton"), **triton).flatten(0, 2)
    targets = torch.arange(len(y), device=device) % 32
    loss = linear_cross_entropy(y, torch.eye(32, device=device).bfloat16(), targets, **triton)
    if thread:
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    else:
        loss.backward()
    assert x.grad is not None
    return [loss.detach().cpu(), x.grad.cpu()]


def test_a_backward_that_runs_first_in_a_fresh_thread():
    threaded, plain = gradients("cuda", thread=True), gradients("cuda")
    for a, b in zip(threaded, plain, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    with torch.cuda.device(0):
        for a, b in zip(gradients("cuda:1"), gradients("cuda:0"), strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(
    torch.cuda.get_device_capability()[0] != 9 if torch.cuda.is_available() else True, reason="Hopper's"
)
@pytest.mark.parametrize(("rows", "d_model", "d_ff"), [(2, 336, 320), (7, 1024, 2752), (40, 768, 2048)])
def test_products_with_what_follows_them_on_hopper(rows: int, d_model: int, d_ff: int, monkeypatch: pytest.MonkeyPatch):
    """Several tiles a block and more steps than stages; tails of columns; twice the same bits."""
    monkeypatch.setattr(fused_linear, "LEAST", 0)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    def apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
        return float((ours.double() - truth).norm() / truth.norm())

    x, below, flow = (normal(rows, 128, d_model) for _ in range(3))
    widen, narrow = normal(2 * d_ff, d_model) * d_model**-0.5, normal(d_model, d_ff) * d_ff**-0.5
    given = [t.requires_grad_() for t in (x, widen, narrow, below)]
    wide = [t.detach().double().requires_grad_() for t in given]
    gate, up = (wide[0] @ wide[1].T).chunk(2, -1)
    truth = torch.nn.functional.silu(gate) * up @ wide[2].T + wide[3]
    expected = torch.autograd.grad(truth, wide, flow.double())
    runs = []
    for _ in range(2):
        out = swiglu_feed_forward(*given)
        runs.append([out, *torch.autograd.grad(out, given, flow)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(apart(a, b) < 8e-3 for a, b in zip(runs[0], [truth, *expected], strict=True))
    for head in (64, 128):
        weight, angle = normal(3 * head, d_model) * d_model**-0.5, torch.randn(128, head // 2, device="cuda")
        turned = turned_linear(x, weight, (angle.cos(), angle.sin()), 2 * head)
        assert turned is not None
        plain = (x.double() @ weight.double().T).unflatten(-1, (3, head // 2, 2))
        complex_angle = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
        q = torch.view_as_real(torch.view_as_complex(plain) * complex_angle[:, None])
        both = torch.cat([q[:, :, :2], plain[:, :, 2:]], 2).flatten(2)
        assert apart(turned, both) < 3e-3
    names = {name for _, name, _ in fused_linear._proof}
    assert names == {"swiglu_linear", "residual_linear", "swiglu_linear_backward", "turned_linear"}
    assert all(fused_linear._proof.values())
