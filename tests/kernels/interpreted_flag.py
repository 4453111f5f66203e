"""Run by test_interpreted.py: AdamW leaves a step out by a flag that its kernel reads; the host counts afterwards."""

import pytest
import torch

from groundup.optim import AdamW, clip_grad_norm
from groundup.optim.clip import clip_factor

FLAGS = [False, True, False, True, True, False]


def model(kind: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(kind)) for shape in ((33, 5), (2500,), (1,))]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_steps_left_out_by_the_flag_are_as_if_never_called(kind: torch.dtype):
    ours, theirs = model(kind), model(kind)
    by_flag, plainly = AdamW(ours, lr=0.1), AdamW(theirs, lr=0.1)
    assert by_flag.heeds_flag()
    generator = torch.Generator().manual_seed(1)
    for skip in FLAGS:
        for a, b in zip(ours, theirs, strict=True):
            b.grad = torch.randn(b.shape, generator=generator).to(kind)
            a.grad = b.grad.clone()
            if skip:
                a.grad[0] = torch.nan
        by_flag.step_unless(torch.tensor(skip))
        if not skip:
            plainly.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    states = by_flag.state_dict()["state"].values(), plainly.state_dict()["state"].values()
    for a, b in zip(*states, strict=True):
        assert a["step"] == b["step"] == FLAGS.count(False)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


def test_a_step_that_was_left_out_is_counted_until_the_optimizer_is_asked():
    (weight,) = parameters = model(torch.float32)[:1]
    optimizer = AdamW(parameters, lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step_unless(torch.tensor(True))
    assert optimizer.state[weight]["step"] == 1
    optimizer.settle()
    optimizer.settle()  # once is enough
    assert optimizer.state[weight]["step"] == 0
    assert optimizer.state[weight]["exp_avg"].eq(0).all()


def test_what_the_kernel_does_not_take_asks_the_host():
    """A gradient that is not contiguous goes the plain way, which must heed the flag as well."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer, before = AdamW([weight], lr=0.1), weight.detach().clone()
    for skip in (True, False):
        weight.grad = torch.ones(4, 6).T
        optimizer.step_unless(torch.tensor(skip))
        assert torch.equal(weight, before) == skip
    assert optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_factor_is_as_if_the_gradients_had_been_clipped(kind: torch.dtype, contiguous: bool):
    """Large gradients are clipped, small ones are not; without a factor nothing is. bf16: rounding them is spared."""
    ours, theirs = model(kind), model(kind)
    by_factor, plainly = AdamW(ours, lr=0.1), AdamW(theirs, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for scale, clips in ((10.0, True), (1e-3, True), (10.0, False), (5.0, True)):
        for a, b in zip(ours, theirs, strict=True):
            grad = torch.randn(b.shape, generator=generator) * scale
            b.grad = grad.to(kind)
            a.grad = b.grad.clone() if contiguous or b.ndim == 1 else b.grad.T.clone().T
        if clips:
            by_factor.factor = clip_factor(clip_grad_norm(ours, 0.0), 0.5)
            clip_grad_norm(theirs, 0.5)
        by_factor.step_unless(torch.tensor(False))
        plainly.step()
        assert by_factor.factor is None
        for a, b in zip(ours, theirs, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                tolerance = 0 if kind == torch.float32 and contiguous else 2**-7
                found, expected = by_factor.state[a][name], plainly.state[b][name]
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max())
