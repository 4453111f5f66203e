"""Schedules other than the cosine, and the choice by name."""

from dataclasses import replace

import pytest
import torch

from groundup.config import OptimConfig
from groundup.errors import UserError
from groundup.optim import constant_lr, cosine_lr, learning_rate, linear_lr, wsd_lr


def test_linear_equals_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=16)
    for step in range(5, 22):
        assert linear_lr(step, 2.0, 0.2, 5, 21) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()
    assert [linear_lr(s, 2.0, 0.2, 5, 21) for s in (0, 1, 5, 21, 99)] == [0, 0.4, 2.0, 0.2, 0.2]


def test_warmup_stable_decay_has_its_three_parts():
    rates = [wsd_lr(step, 1.0, 0.1, 10, 100, 20) for step in range(121)]
    assert rates[:11] == pytest.approx([s / 10 for s in range(11)])
    assert rates[10:81] == [1.0] * 71
    assert rates[80:101] == pytest.approx([1 - 0.9 * s / 20 for s in range(21)])
    assert rates[100:] == [0.1] * 21
    # The plateau knows nothing of the end: a longer run has the same one.
    assert rates[:80] == [wsd_lr(step, 1.0, 0.1, 10, 1000, 20) for step in range(80)]


def test_a_warm_up_that_reaches_into_the_decay_delays_it():
    assert [wsd_lr(step, 1.0, 0.0, 8, 10, 5) for step in (4, 8, 9, 10)] == [0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_a_warm_up_as_long_as_the_run_reaches_the_peak_at_its_end(name):
    optim = OptimConfig(lr=5.0, min_lr_ratio=0.1, warmup_steps=5, schedule=name)
    assert [learning_rate(step, optim, 5) for step in range(1, 6)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert learning_rate(0, replace(optim, warmup_steps=0), 5) == 5.0


def test_constant_stays():
    assert [constant_lr(step, 3.0, 4) for step in (0, 2, 4, 10**6)] == [0, 1.5, 3.0, 3.0]


def test_the_configuration_chooses():
    optim = OptimConfig(lr=2.0, min_lr_ratio=0.05, warmup_steps=3, decay_share=0.25)
    for step in (0, 2, 3, 17, 30, 39, 40, 50):
        by = {name: learning_rate(step, replace(optim, schedule=name), 40) for name in ("cosine", "linear", "wsd")}
        assert by["cosine"] == cosine_lr(step, 2.0, 0.1, 3, 40)
        assert by["linear"] == linear_lr(step, 2.0, 0.1, 3, 40)
        assert by["wsd"] == wsd_lr(step, 2.0, 0.1, 3, 40, 10)
        assert learning_rate(step, replace(optim, schedule="constant"), 40) == constant_lr(step, 2.0, 3)
    with pytest.raises(UserError, match="decay_share"):
        replace(optim, decay_share=1.5).resolve()
