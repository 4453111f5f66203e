"""The whole model: against an independent functional forward pass, and its promises on names, ties and caches."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.model import MultiHeadSelfAttention, TransformerLM, count_parameters
from groundup.model.attention import causal_mask

SMALL = ModelConfig(vocab_size=61, context_length=24, d_model=32, n_layers=3, n_heads=4)


def turn(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE written as multiplication of complex numbers: x (..., seq, d)."""
    seq, d = x.shape[-2:]
    angle = torch.arange(seq, dtype=x.dtype)[:, None] * theta ** -(torch.arange(0, d, 2, dtype=x.dtype) / d)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def functional_logits(state: dict[str, torch.Tensor], config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """The same model from torch.nn.functional's parts and a dictionary of weights."""

    def heads(x: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
        return F.linear(x, weight).unflatten(-1, (n, -1)).transpose(1, 2)

    x = F.embedding(ids, state["token_embeddings.weight"])
    for i in range(config.n_layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in state.items() if k.startswith(f"layers.{i}.")}
        h = F.rms_norm(x, (config.d_model,), w["ln1.weight"], config.norm_eps)
        q = turn(heads(h, w["attn.q_proj.weight"], config.n_heads), config.rope_theta)
        k = turn(heads(h, w["attn.k_proj.weight"], config.n_kv_heads), config.rope_theta)
        v = heads(h, w["attn.v_proj.weight"], config.n_kv_heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).flatten(2), w["attn.output_proj.weight"])
        h = F.rms_norm(x, (config.d_model,), w["ln2.weight"], config.norm_eps)
        x = x + F.linear(F.silu(F.linear(h, w["ffn.w1.weight"])) * F.linear(h, w["ffn.w3.weight"]), w["ffn.w2.weight"])
    x = F.rms_norm(x, (config.d_model,), state["ln_final.weight"], config.norm_eps)
    return F.linear(x, state.get("lm_head.weight", state["token_embeddings.weight"]))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_an_independent_forward(ids: torch.Tensor, kv_heads: int, tied: bool):
    model = TransformerLM(replace(SMALL, n_kv_heads=kv_heads, tie_embeddings=tied)).double()
    for p in model.parameters():  # gains of exactly 1 would hide a missing one
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    state = {k: v.detach().clone().requires_grad_() for k, v in model.state_dict().items()}
    expected = functional_logits(state, model.config, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-5)  # the angles are float32

    targets = ids.roll(-1, 1)
    model(ids, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, state[name].grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_position_sees_nothing_after_it(ids: torch.Tensor):
    model = TransformerLM(SMALL).double()
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 61
    torch.testing.assert_close(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(ids)[:, 9], model(changed)[:, 9])


def test_one_product_for_q_k_v_equals_three():
    attention = MultiHeadSelfAttention(32, 4, 2).double()
    for p in attention.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.shape[0]), dtype=torch.float64)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    q, k, v = attention._project(x)
    for joint, proj, n in ((q, attention.q_proj, 4), (k, attention.k_proj, 2), (v, attention.v_proj, 2)):
        torch.testing.assert_close(joint, proj(x).unflatten(-1, (n, 8)).transpose(1, 2))
    alone = attention(x[:1], causal_mask(5, 5))
    torch.testing.assert_close(alone, attention(x, causal_mask(5, 5))[:1])


def test_state_dict_names_are_the_standard_ones():
    names = set(TransformerLM(replace(SMALL, n_layers=1)).state_dict())
    assert names == {
        "token_embeddings.weight",
        *(f"layers.0.attn.{p}_proj.weight" for p in ("q", "k", "v", "output")),
        *(f"layers.0.ffn.{w}.weight" for w in ("w1", "w2", "w3")),
        "layers.0.ln1.weight",
        "layers.0.ln2.weight",
        "ln_final.weight",
        "lm_head.weight",
    }


def test_tied_embeddings_are_one_parameter_and_start_at_unit_logits():
    tied, untied = TransformerLM(replace(SMALL, tie_embeddings=True)), TransformerLM(SMALL)
    assert "lm_head.weight" not in tied.state_dict()
    assert count_parameters(untied) - count_parameters(tied) == 61 * 32
    ids = torch.arange(20)[None]
    loss = tied(ids, ids.roll(-1, 1)).item()
    assert abs(loss - torch.log(torch.tensor(61.0)).item()) < 1.5


def test_initial_weights_depend_on_the_seed_alone():
    a, b = TransformerLM(SMALL), TransformerLM(SMALL)
    torch.manual_seed(99)
    b.init_weights(seed=0)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    b.init_weights(seed=1)
    assert not torch.equal(a.lm_head.weight, b.lm_head.weight)
    std = a.layers[0].ffn.w1.weight.std().item()
    assert abs(std / (2 / (32 + a.config.d_ff)) ** 0.5 - 1) < 0.05


def test_meta_then_materialised_model_equals_a_direct_one(ids: torch.Tensor):
    with torch.device("meta"):
        model = TransformerLM(SMALL)
    model.to_empty(device="cpu").init_weights(seed=0)
    torch.testing.assert_close(model(ids), TransformerLM(SMALL)(ids))


def test_too_long_a_sequence_is_refused_with_both_lengths():
    with pytest.raises(UserError, match=r"25 tokens.*context_length 24"):
        TransformerLM(SMALL)(torch.zeros(1, 25, dtype=torch.int64))


def test_bf16_autocast_stays_close_to_float32(ids: torch.Tensor):
    model = TransformerLM(SMALL)
    exact = model(ids, ids.roll(-1, 1)).item()
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids, ids.roll(-1, 1))
    assert half.dtype == torch.float32
    assert abs(half.item() - exact) < 0.05


@pytest.mark.parametrize(("kind", "residual"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_the_residual_stream_under_autocast(kind: torch.dtype, residual: torch.dtype):
    """bf16 throughout; float16's range does not hold the sums, so it stays float32 there."""
    model = TransformerLM(replace(SMALL, attention="reference"))
    seen = []
    for block in model.layers:
        block.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    with torch.autocast("cpu", kind):
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert set(seen) == {residual}
