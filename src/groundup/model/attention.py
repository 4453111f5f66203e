"""Causal multi-head self-attention (Vaswani et al. 2017) with grouped key and value heads (Ainslie et al. 2023).

The plain path: it holds the whole (queries × keys) score matrix, O(seq²) memory a head.
"""

from math import sqrt
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from groundup.model.layers import Linear, at_least_float32
from groundup.model.rope import Rotation, rotate


class Cache(Protocol):
    """What attention needs of a key-value cache; generate/ owns the one implementation."""

    length: int
    """Tokens held before this forward pass."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (batch, n_kv_heads, seq, d_head) after the tokens held; return all keys and values of the layer."""
        ...


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along `dim`, in float32 at least; the maximum is taken out first, so nothing overflows.

    A row of nothing but -inf gives zeros, not NaN: a query that may see no key reads nothing.
    """
    wide = at_least_float32(x)
    top = wide.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(wide.dtype).min)
    weight = torch.exp(wide - top)
    # The largest term is exp(0) = 1, so the sum is at least 1 unless the row is empty.
    return (weight / weight.sum(dim, keepdim=True).clamp(min=1)).to(x.dtype)


def scaled_dot_product_attention(
    q: Float[Tensor, "... queries d_k"],
    k: Float[Tensor, "... keys d_k"],
    v: Float[Tensor, "... keys d_v"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "... queries d_v"]:
    """softmax(q kᵀ / sqrt(d_k)) v; where `mask` is False a query does not see a key."""
    # Scaling q instead of the scores spares a pass over the larger matrix.
    scores = (q / sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores) @ v


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "queries keys"]:
    """True where key j is not after query i; the last query is aligned with the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class MultiHeadSelfAttention(nn.Module):
    """Each of n_heads query heads attends over the keys of its group; the heads' outputs are mixed by output_proj."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int = 0):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.d_head = d_model // n_heads
        self.q_proj = Linear(d_model, n_heads * self.d_head)
        self.k_proj = Linear(d_model, self.n_kv_heads * self.d_head)
        self.v_proj = Linear(d_model, self.n_kv_heads * self.d_head)
        self.output_proj = Linear(n_heads * self.d_head, d_model)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        mask: Bool[Tensor, "seq keys"],
        rotation: Rotation | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "batch seq d_model"]:
        q, k, v = self._project(x)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        if self.n_kv_heads < self.n_heads:
            group = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        heads = scaled_dot_product_attention(q, k, v, mask)
        return self.output_proj(heads.transpose(1, 2).flatten(-2))

    def _project(self, x: Float[Tensor, "batch seq d_model"]) -> list[Float[Tensor, "batch heads seq d_head"]]:
        """q, k and v from one matrix product: one large product keeps a GPU busier than three small ones."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = (x @ weight.T).unflatten(-1, (-1, self.d_head)).transpose(-3, -2)
        return list(heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=-3))
