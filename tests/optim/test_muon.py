"""Muon against an SVD, torch's own Muon, and its groups."""

import math

import pytest
import torch

from groundup.config import ModelConfig, OptimConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.optim import AdamW, Muon, describe_groups, make_optimizer, newton_schulz, set_learning_rate
from groundup.optim.muon import COEFFICIENTS, FACTORS

TINY = ModelConfig(vocab_size=11, context_length=8, d_model=8, n_layers=2, n_heads=2, d_ff=16)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 7)])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_newton_schulz_maps_each_singular_value_by_the_quintic(shape: tuple[int, ...], steps: int):
    g = random(*shape)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / g.norm(dim=(-2, -1)).unsqueeze(-1)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(g, steps), u @ torch.diag_embed(s) @ vh, rtol=1e-9, atol=1e-11)


def test_coefficients_of_a_convergent_iteration_give_the_polar_factor():
    g = random(7, 4)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    polar = newton_schulz(g, 30, (15 / 8, -10 / 8, 3 / 8))
    torch.testing.assert_close(polar, u @ vh, rtol=1e-9, atol=1e-10)


def test_newton_schulz_of_zero_is_zero_and_five_steps_come_near_one():
    assert newton_schulz(torch.zeros(3, 4), 5).eq(0).all()
    values = torch.linalg.svdvals(newton_schulz(random(32, 48), 5))
    assert values.min() > 0.6
    assert values.max() < 1.25


@pytest.mark.parametrize("ours", ["original", "match-adamw"])
def test_muon_equals_torch(ours: str):
    """torch's orthogonalises in bf16, ours on the CPU in the gradient's type: so bf16 is the tolerance."""
    theirs = {"original": "original", "match-adamw": "match_rms_adamw"}[ours]
    a = [torch.nn.Parameter(random(*shape, seed=i).float()) for i, shape in enumerate([(8, 24), (24, 8), (8, 8)])]
    b = [torch.nn.Parameter(p.detach().clone()) for p in a]
    start = [p.detach().clone() for p in a]
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    one, two = Muon(a, **settings, factor=ours), torch.optim.Muon(b, **settings, adjust_lr_fn=theirs)
    for step in range(10):
        for i, (p, q) in enumerate(zip(a, b, strict=True)):
            p.grad = random(*p.shape, seed=100 * step + i).float()
            q.grad = p.grad.clone()
        one.step()
        two.step()
    for p, q, first in zip(a, b, start, strict=True):
        assert (p - q).norm() < 0.02 * (q - first).norm()
        torch.testing.assert_close(one.state[p]["momentum_buffer"], two.state[q]["momentum_buffer"])


def test_one_step_by_hand():
    p = torch.nn.Parameter(random(6, 4))
    before, g1, g2 = p.detach().clone(), random(6, 4, seed=1), random(6, 4, seed=2)
    optimizer = Muon([p], lr=0.1, momentum=0.8, weight_decay=0.5, factor="original")
    expected, buffer = before, torch.zeros(6, 4, dtype=torch.float64)
    for g in (g1, g2):
        p.grad = g.clone()
        optimizer.step()
        buffer = 0.8 * buffer + 0.2 * g
        u, s, vh = torch.linalg.svd(0.2 * g + 0.8 * buffer, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * math.sqrt(6 / 4) * (u * s) @ vh
    torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-10)


def test_factors():
    assert FACTORS["original"](4096, 1024) == 2
    assert FACTORS["original"](1024, 4096) == 1
    assert FACTORS["match-adamw"](1024, 4096) == FACTORS["match-adamw"](4096, 1024) == pytest.approx(0.2 * 64)
    # What the second one is for: an update of root mean square 0.2, as AdamW's.
    update = newton_schulz(random(64, 256), 5) * FACTORS["match-adamw"](64, 256)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_groups_of_a_model():
    model = TransformerLM(TINY)
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=1e-3, muon_factor="original").resolve())
    names = {p: name for name, p in model.named_parameters()}
    groups = {group["name"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert groups["decayed"] == {"token_embeddings.weight", "lm_head.weight"}
    assert groups["not decayed"] == {name for name in names.values() if ".ln" in name or name.startswith("ln_")}
    assert groups["hidden matrices"] == set(names.values()) - groups["decayed"] - groups["not decayed"]
    set_learning_rate(optimizer, 5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 5e-4, 5e-4])
    lines = describe_groups(optimizer)
    assert lines[0].startswith("Muon, hidden matrices: 14 tensors, 1,280 parameters, lr 0.01 × original factor")
    assert lines[1] == "AdamW, decayed: 2 tensors, 176 parameters, lr 0.0005, decay 0.1"


def test_match_adamw_takes_the_common_learning_rate():
    assert OptimConfig(name="muon", lr=3e-3).resolve().muon_lr == 3e-3
    assert OptimConfig(name="muon", muon_factor="original").resolve().muon_lr == 0.02
    assert OptimConfig().resolve().muon_lr == 0
    with pytest.raises(UserError, match="muon_momentum"):
        OptimConfig(muon_momentum=1.0).resolve()


@pytest.mark.parametrize(("norms", "embeddings"), [(False, True), (True, True), (False, False), (True, False)])
def test_decay_on_norms_and_embeddings_or_not(norms: bool, embeddings: bool):
    model = TransformerLM(TINY)
    config = OptimConfig(decay_norms=norms, decay_embeddings=embeddings, weight_decay=0.3)
    optimizer = make_optimizer(model, config.resolve())
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        is_embedding = name in ("token_embeddings.weight", "lm_head.weight")
        expected = norms if p.ndim == 1 else embeddings or not is_embedding
        assert decays[p] == (0.3 if expected else 0.0), name


def test_the_others_in_a_muon_are_adamw():
    matrix, vector = torch.nn.Parameter(random(3, 3)), torch.nn.Parameter(random(5))
    other = torch.nn.Parameter(vector.detach().clone())
    one = Muon([{"params": [matrix]}, {"params": [vector], "muon": False, "weight_decay": 0.0}], lr=1e-2)
    two = AdamW([other], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        matrix.grad, vector.grad = random(3, 3, seed=step), random(5, seed=step)
        other.grad = vector.grad.clone()
        one.step()
        two.step()
    assert torch.equal(vector, other)
    assert set(one.state[matrix]) == {"step", "momentum_buffer"}
    assert set(one.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_refuses_vectors_and_senseless_settings():
    with pytest.raises(ValueError, match=r"\(5,\)"):
        Muon([torch.nn.Parameter(random(5))])
    with pytest.raises(ValueError, match="factor"):
        Muon([torch.nn.Parameter(random(5, 5))], factor="none")
