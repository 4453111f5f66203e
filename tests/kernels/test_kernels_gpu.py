"""What only a GPU can show: a backward on a thread that has run nothing yet, a device that is not the current one."""

import threading

import pytest
import torch

from groundup.kernels import attention, linear_cross_entropy, rms_norm, rope, swiglu

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
