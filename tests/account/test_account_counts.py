"""Parameters and FLOPs: held to the real model, to torch's counter, and to figures worked by hand."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from groundup.account import Setting, matrix_products, parameter_shapes, parameters, trace
from groundup.account.flops import flops
from groundup.account.params import ungated
from groundup.config import SIZES, ModelConfig, size
from groundup.errors import UserError
from groundup.model import TransformerLM, count_parameters

TINY: dict[str, Any] = {
    "vocab_size": 37,
    "context_length": 12,
    "d_model": 16,
    "n_layers": 3,
    "n_heads": 4,
    "d_ff": 24,
}
SHAPES = [
    {},
    {"n_kv_heads": 2},
    {"n_kv_heads": 1},
    {"tie_embeddings": True},
    {"n_heads": 1},
    {"d_ff": 0, "n_layers": 1},
]
VARIANTS = [
    {"norm": "post"},
    {"norm": "none"},
    {"position": "nope"},
    {"position": "nope", "n_kv_heads": 2, "qk_norm": True},
    {"ffn": "silu"},
    {"ffn": "relu2"},
    {"qk_norm": True},
    {"attention_softcap": 5.0, "logit_softcap": 5.0},
    {"norm": "post", "ffn": "relu2", "qk_norm": True, "logit_softcap": 5.0, "tie_embeddings": True, "n_kv_heads": 1},
]


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**(TINY | changes)).resolve()


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameters_of_every_variant_are_the_models(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    model = TransformerLM(config)
    table = parameters(config)
    assert table["total"] == count_parameters(model)
    assert list(parameter_shapes(config).items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert table["layer"] == count_parameters(model.layers[0])


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_every_named_size_are_the_models(name: str) -> None:
    config = size(name).resolve()
    with torch.device("meta"):
        model = TransformerLM(config)
    assert parameters(config)["total"] == count_parameters(model)
    assert parameter_shapes(config) == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_parameters_by_hand() -> None:
    """vocabulary 10, d 4, 2 layers, 2 heads of 2, 1 key-value head, d_ff 6."""
    config = ModelConfig(10, 8, 4, 2, 2, 1, 6).resolve()
    expected = {
        "embeddings": 40,
        "attention.q": 2 * 16,
        "attention.k": 2 * 8,
        "attention.v": 2 * 8,
        "attention.output": 2 * 16,
        "ffn": 2 * 3 * 24,
        "norms": 2 * 2 * 4 + 4,
        "head": 40,
        "layer": 16 + 8 + 8 + 16 + 72 + 8,
        "tied": 0,
        "non_embedding": 260,
        "matrix": 240 + 40,
        "total": 340,
    }
    assert parameters(config) == expected
    tied = parameters(replace(config, tie_embeddings=True))
    assert (tied["total"], tied["tied"], tied["head"], tied["matrix"]) == (300, 40, 0, 280)
    assert parameters(ungated(config))["total"] == 340 - 2 * 24


def test_the_two_figures_that_circulate_for_gpt2_xl() -> None:
    """The course's GPT-2 XL: d_ff 6400, untied, vocabulary 50,257, context 1024; gated and ungated."""
    config = replace(size("gpt2-1.5b"), d_ff=6400, tie_embeddings=False).resolve()
    assert round(parameters(config)["total"] / 1e9, 2) == 2.13
    assert round(parameters(ungated(config))["total"] / 1e9, 2) == 1.64
    table = flops(config, 1, 1024)
    assert round(table["forward"] / 1e12, 2) == 4.51
    assert round(table["ungated.forward"] / 1e12, 2) == 3.51


@pytest.mark.parametrize("changes", SHAPES + VARIANTS)
def test_flops_equal_torchs_counter(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    ids = torch.zeros(3, 10, dtype=torch.int64)
    model = TransformerLM(config)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, ids)
        forward = counter.get_total_flops()
        loss.backward()
    table = flops(config, 3, 10)
    assert table["forward"] == forward
    assert table["forward"] + table["backward"] == counter.get_total_flops() == table["total"]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_flops_equal_torchs_counter(every: int, precision: str) -> None:
    config = tiny()
    ids = torch.zeros(2, 12, dtype=torch.int64)
    model = TransformerLM(replace(config, checkpoint_activations=every))
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
    with FlopCounterMode(display=False) as counter:
        with autocast:
            loss = model(ids, ids)
        loss.backward()
    assert flops(config, 2, 12, checkpoint_every=every)["total"] == counter.get_total_flops()
    step = trace(config, Setting(2, 12, "forward-backward", precision, checkpoint_every=every))
    assert sum(k.flops for k in step.kernels) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("attention", "kernels"),
    [("reference", "reference"), ("flash", "triton"), ("flash", "loss"), ("reference", "triton")],
)
@pytest.mark.parametrize("changes", SHAPES + VARIANTS)
def test_listed_products_are_the_traced_kernels(changes: dict[str, Any], attention: str, kernels: str) -> None:
    config = tiny(**changes)
    step = trace(config, Setting(3, 10, "forward-backward", attention=attention, kernels=kernels))
    products = matrix_products(config, 3, 10, attention, kernels=kernels)
    for phase, listed in (("forward", "forward_flops"), ("backward", "backward_flops")):
        traced = sum(k.flops for k in step.kernels if k.phase == phase)
        assert traced == sum(getattr(p, listed) for p in products)


def test_convention_is_what_the_reference_executes() -> None:
    """6·N + 12·L·d·T a token counts full scores and no recompute: exactly the reference kernel's work."""
    config = tiny()
    table, flash = flops(config, 3, 12), flops(config, 3, 12, attention="flash")
    assert table["convention"] == table["total"] == flash["convention"]
    scores = table["scores"]
    assert flash["forward"] == table["forward"] - scores / 2
    assert flash["backward"] == table["backward"] - 2 * scores + 1.25 * scores
    shares = [table[f"share.{part}"] for part in ("projections", "scores", "ffn", "head")]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "at least 1"),
        ({"context": 13}, "12"),
        ({"checkpoint_every": 4}, "3 layers"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Setting(**changes).checked(tiny())
