"""Layers against torch's own functions and hand-made formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groundup.model import (
    IGNORE,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    cross_entropy,
    rotate,
    scaled_dot_product_attention,
    silu,
    softmax,
)
from groundup.model.attention import causal_mask
from groundup.model.layers import truncated_normal_


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_linear_and_embedding_equal_torch():
    linear, table = Linear(7, 5).double(), Embedding(11, 6).double()
    linear.init_weights()
    table.init_weights()
    x, ids = rand(3, 4, 7), torch.tensor([[0, 10, 3], [3, 3, 1]])
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight))
    torch.testing.assert_close(table(ids), F.embedding(ids, table.weight))


def test_rms_norm_equals_torch_and_computes_in_float32():
    norm = RMSNorm(50, eps=1e-5).double()
    norm.weight.data = rand(50, seed=1)
    x = rand(2, 3, 50)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (50,), norm.weight, 1e-5))
    # In bf16 the square of 300 alone would lose the sum; the result is the float32 one, rounded once.
    half = RMSNorm(1024)
    wide = rand(4, 1024, seed=2, dtype=torch.bfloat16) * 300
    exact = F.rms_norm(wide.double(), (1024,), eps=1e-5)
    assert half(wide).dtype == torch.bfloat16
    torch.testing.assert_close(half(wide), exact.to(torch.bfloat16), rtol=0, atol=2**-7)


def test_silu_and_swiglu_equal_torch():
    x = rand(2, 5, 8)
    torch.testing.assert_close(silu(x), F.silu(x))
    ffn = SwiGLU(8, 24).double()
    for p in ffn.parameters():
        p.data = rand(*p.shape, seed=p.shape[0])
    expected = F.linear(F.silu(F.linear(x, ffn.w1.weight)) * F.linear(x, ffn.w3.weight), ffn.w2.weight)
    torch.testing.assert_close(ffn(x), expected)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax_equals_torch_and_survives_large_values(dim: int):
    x = rand(4, 6) * 50
    torch.testing.assert_close(softmax(x, dim), torch.softmax(x, dim))
    torch.testing.assert_close(softmax(x + 1e4, dim), torch.softmax(x, dim), rtol=1e-8, atol=1e-10)


def test_softmax_of_an_empty_row_is_zero_with_finite_gradient():
    x = rand(3, 4)
    x[1] = float("-inf")
    x.requires_grad_()
    out = softmax(x)
    assert out[1].eq(0).all()
    (out * rand(3, 4, seed=5)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_softmax_gradient():
    assert torch.autograd.gradcheck(softmax, rand(3, 5).requires_grad_())


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (1, 5)])
def test_attention_equals_torch_sdpa(queries: int, keys: int):
    q, k, v = rand(2, 3, queries, 4), rand(2, 3, keys, 4, seed=1), rand(2, 3, keys, 7, seed=2)
    mask = causal_mask(queries, keys)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    )
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_causal_mask_aligns_the_last_query_with_the_last_key():
    expected = [[j <= i + 2 for j in range(5)] for i in range(3)]
    assert causal_mask(3, 5).tolist() == expected


def test_rope_is_a_complex_rotation_of_neighbouring_pairs():
    rope = RotaryEmbedding(8, 32, theta=10000.0)
    x = rand(2, 3, 32, 8)
    angle = torch.arange(32, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(0, 8, 2, dtype=torch.float64) / 8
    )
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(rotate(x, rope(slice(0, 32))), expected, rtol=1e-5, atol=2e-6)
    positions = torch.tensor([[3, 0, 31]])
    at = rotate(x[:, :, :3], rope(positions))
    torch.testing.assert_close(at[:, :, 2], rotate(x[:, :, 2:3], rope(slice(31, 32)))[:, :, 0])


def test_rope_scores_depend_on_distance_alone():
    rope = RotaryEmbedding(16, 64)
    q, k = rand(1, 16), rand(1, 16, seed=1)

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(q, rope(slice(i, i + 1))) * rotate(k, rope(slice(j, j + 1)))).sum()

    torch.testing.assert_close(score(5, 2), score(40, 37), rtol=1e-5, atol=1e-6)


def test_rope_angles_stay_float32_when_the_model_is_cast():
    module = nn.ModuleList([RotaryEmbedding(8, 2048)]).to(torch.bfloat16)
    rope = module[0]
    assert rope.cos.dtype == torch.float32
    torch.testing.assert_close(rope.cos, RotaryEmbedding(8, 2048).cos)
    assert not module.state_dict()


def test_cross_entropy_equals_torch_with_ignored_targets_and_global_count():
    logits, targets = rand(3, 4, 9) * 30, torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(0))
    targets[0, :3] = IGNORE
    flat = logits.flatten(0, 1)
    torch.testing.assert_close(cross_entropy(logits, targets), F.cross_entropy(flat, targets.flatten()))
    summed = F.cross_entropy(flat, targets.flatten(), reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, targets, 40.0), summed / 40)
    assert cross_entropy(logits, torch.full_like(targets, IGNORE)) == 0
    assert cross_entropy(logits * 1000, targets).isfinite()


def test_cross_entropy_gradient_equals_torch():
    logits, targets = rand(5, 9).requires_grad_(), torch.tensor([0, 8, IGNORE, 3, 3])
    (ours,) = torch.autograd.grad(cross_entropy(logits, targets), logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(logits, targets), logits)
    torch.testing.assert_close(ours, theirs)


def test_truncated_normal_has_the_moments_of_the_cut_normal():
    weight = torch.empty(400_000)
    truncated_normal_(weight, 0.02, torch.Generator().manual_seed(0))
    assert weight.abs().max() <= 3 * 0.02
    assert abs(weight.mean()) < 2e-4
    # Variance of a standard normal cut at ±3: 1 - 2·3·φ(3) / (2Φ(3) - 1) = 0.97333.
    assert abs(weight.var().item() / 0.02**2 - 0.97333) < 0.01
