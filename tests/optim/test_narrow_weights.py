"""bf16 parameters: master weights and stochastic rounding against float32 and against chance."""

from copy import deepcopy

import pytest
import torch

from groundup.optim import AdamW, Muon
from groundup.optim.base import stochastic_round_

KINDS = {"adamw": AdamW, "muon": Muon}


def pair(dtype: torch.dtype, shape: tuple[int, int] = (16, 24)) -> torch.nn.Parameter:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return torch.nn.Parameter(start.to(dtype))


def steps(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        p.grad = grad.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_a_float32_run(kind: str):
    narrow, wide = pair(torch.bfloat16), pair(torch.float32)
    a, b = KINDS[kind]([narrow], lr=1e-4), KINDS[kind]([wide], lr=1e-4)
    steps(narrow, a, 0, 50)
    steps(wide, b, 0, 50)
    assert torch.equal(a.state[narrow]["master"], wide)
    assert torch.equal(narrow, wide.bfloat16())
    assert all(v.dtype == torch.float32 for v in a.state[narrow].values() if isinstance(v, torch.Tensor))
    # What it is for: rounding to nearest would have lost nearly every update of this size.
    assert (wide - pair(torch.float32)).abs().median() < 2**-7 * wide.abs().median()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_master_weights_is_one_update(kind: str, monkeypatch: pytest.MonkeyPatch):
    shapes = [(16, 24), (8, 8), (24, 3)]
    narrow, wide = ([pair(dtype, shape) for shape in shapes] for dtype in (torch.bfloat16, torch.float32))
    a, b = KINDS[kind](narrow, lr=1e-4), KINDS[kind](wide, lr=1e-4)
    calls, update = [], a.update
    monkeypatch.setattr(a, "update", lambda columns, *rest: calls.append(len(columns[0])) or update(columns, *rest))
    for step in range(4):
        for params in (narrow, wide):
            for p in params:
                generator = torch.Generator().manual_seed(step + p.numel())
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        a.step()
        b.step()
    assert calls == [3] * 4
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(a.state[p]["master"], q)
        assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_follows_a_float32_run_on_average(kind: str):
    wide = pair(torch.float32)
    steps(wide, KINDS[kind]([wide], lr=1e-3), 0, 40)
    finals = []
    for seed in range(64):
        narrow = pair(torch.bfloat16)
        optimizer = KINDS[kind]([narrow], lr=1e-3, master_weights=False, seed=seed)
        steps(narrow, optimizer, 0, 40)
        finals.append(narrow.detach().float())
        assert all(v.dtype == torch.bfloat16 for v in optimizer.state[narrow].values() if isinstance(v, torch.Tensor))
    moved = (wide - pair(torch.float32)).detach()
    error = torch.stack(finals).mean(0) - wide.detach()
    assert error.norm() < 0.2 * moved.norm()  # chance alone: 0.1
    assert len({final.sum().item() for final in finals}) > 32


def test_stochastic_rounding_is_unbiased_and_takes_neighbours_only():
    values = torch.tensor([1.0, 1.001, -1.001, 3.3e-5, -7.7, 0.0, float("inf")])
    down = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    up = ((values.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    n, generator = 20_000, torch.Generator().manual_seed(3)
    rounded = torch.empty(n, len(values), dtype=torch.bfloat16)
    stochastic_round_(rounded, values.expand(n, -1), generator)
    wide = rounded.float()
    assert ((wide == down) | (wide == up)).all()
    assert (wide[:, [0, 5, 6]] == values[[0, 5, 6]]).all()  # what bf16 can hold stays
    share = (wide == up).float().mean(0)[1:5]
    expected = ((values - down) / (up - down))[1:5]
    torch.testing.assert_close(share, expected, rtol=0, atol=4 * (0.25 / n) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("master_weights", [True, False])
def test_state_survives_a_round_trip_bit_for_bit(kind: str, master_weights: bool):
    one, two = pair(torch.bfloat16), pair(torch.bfloat16)
    a, b = (KINDS[kind]([p], lr=1e-3, master_weights=master_weights, seed=5) for p in (one, two))
    steps(one, a, 0, 5)
    two.data.copy_(one.data)
    b.load_state_dict(deepcopy(a.state_dict()))
    steps(one, a, 5, 5)
    steps(two, b, 5, 5)
    assert torch.equal(one, two)
    for name, value in a.state[one].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(b.state[two][name])), name
        assert torch.as_tensor(value).dtype == torch.as_tensor(b.state[two][name]).dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [True, False])
def test_state_made_beforehand_changes_nothing(kind: str, dtype: torch.dtype, master_weights: bool):
    weights = [pair(dtype) for _ in range(2)]
    optimizers = [KINDS[kind]([p], lr=1e-2, master_weights=master_weights) for p in weights]
    optimizers[0].make_state()
    assert optimizers[0].state[weights[0]]["step"] == 0
    for p, optimizer in zip(weights, optimizers, strict=True):
        steps(p, optimizer, 0, 3)
        optimizer.make_state()  # what is there stays
        steps(p, optimizer, 3, 2)
    assert torch.equal(*weights)
    states = [optimizer.state[p] for p, optimizer in zip(weights, optimizers, strict=True)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][name])), name
