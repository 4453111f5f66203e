"""AdamW, clipping and the schedule against torch's."""

import math
from copy import deepcopy

import pytest
import torch

from groundup.optim import AdamW, clip_grad_norm, cosine_lr, parameter_groups


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (7,), (3, 2, 4), (1,)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch_over_a_hundred_steps(weight_decay: float):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    a, b = AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        for p, q in zip(ours, theirs, strict=True):
            # The last parameter joins late and is absent now and then: its step count is its own.
            absent = p.numel() == 1 and (step < 10 or step % 7 == 0)
            p.grad = None if absent else torch.randn(p.shape, generator=generator, dtype=p.dtype)
            q.grad = None if absent else p.grad.clone()
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 3e-3 * math.cos(step / 100)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_adamw_state_survives_a_round_trip():
    ours, again = parameters(), parameters()
    a, b = AdamW(ours, lr=1e-2), AdamW(again, lr=1e-2)
    for p in ours:
        p.grad = torch.ones_like(p)
    a.step()
    for p, q in zip(ours, again, strict=True):
        q.data.copy_(p.data)
        q.grad = torch.ones_like(q)
    b.load_state_dict(deepcopy(a.state_dict()))
    a.step()
    b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, again, strict=True))


def test_adamw_refuses_senseless_settings():
    with pytest.raises(ValueError, match="betas"):
        AdamW(parameters(), betas=(0.9, 1.0))


def test_decay_is_for_matrices_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    matrices, vectors = parameter_groups(model, 0.1)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert matrices["weight_decay"] == 0.1
    assert len(vectors["params"]) == 3
    assert vectors["weight_decay"] == 0.0


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torch(max_norm: float):
    ours, theirs = parameters(), parameters()
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        if i != 1:  # one parameter has no gradient
            p.grad = torch.full_like(p, i + 1.0)
            q.grad = p.grad.clone()
    norm = clip_grad_norm(ours, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for p, q in zip(ours, theirs, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_clipping_measures_only_or_finds_nothing():
    p = parameters()[0]
    assert clip_grad_norm([p], 1.0) == 0
    p.grad = torch.full_like(p, 2.0)
    torch.testing.assert_close(clip_grad_norm([p], 0.0), p.grad.norm())
    assert p.grad.eq(2).all()


def test_cosine_schedule_equals_torch_and_has_its_corners():
    max_lr, min_lr, warmup, total = 1.0, 0.1, 7, 21
    assert cosine_lr(0, max_lr, min_lr, warmup, total) == 0
    assert cosine_lr(7, max_lr, min_lr, warmup, total) == 1.0
    assert cosine_lr(21, max_lr, min_lr, warmup, total) == pytest.approx(0.1)
    assert cosine_lr(500, max_lr, min_lr, warmup, total) == 0.1
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=max_lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=min_lr)
    for step in range(warmup, total + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert cosine_lr(step, max_lr, min_lr, warmup, total) == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_schedule_without_warm_up_or_without_decay():
    assert cosine_lr(0, 1.0, 0.1, 0, 10) == 1.0
    assert cosine_lr(10, 1.0, 0.1, 10, 10) == 1.0
    assert cosine_lr(5, 1.0, 0.1, 10, 10) == 0.5
