"""Causal multi-head self-attention (Vaswani et al. 2017) with grouped key and value heads (Ainslie et al. 2023).

The plain path holds the whole (queries × keys) score matrix, O(seq²) memory a head. Where ModelConfig.attention says so
the scores are kernels.attention's business, and no mask exists.
"""

from math import sqrt
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from groundup import kernels as fused
from groundup.config import ModelConfig
from groundup.kernels.backend import at_least_float32
from groundup.model.layers import Linear, RMSNorm, joined_product, soft_cap, use_kernel
from groundup.model.rope import Rotation, rotate_both


class Cache(Protocol):
    """What attention needs of a key-value cache; generate/ has the implementations."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (batch, n_kv_heads, seq, d_head) and return all keys and values of the layer that are seen."""
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
    softcap: float = 0.0,
) -> Float[Tensor, "... queries d_v"]:
    """softmax(q kᵀ / sqrt(d_k)) v; where `mask` is False a query does not see a key. `softcap`: of the scores."""
    # Scaling q instead of the scores spares a pass over the larger matrix.
    scores = (q / sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if softcap:
        scores = soft_cap(scores, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores) @ v


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "queries keys"]:
    """True where key j is not after query i; the last query is aligned with the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def plain_attention(attention: str, x: Tensor) -> bool:
    """Whether ModelConfig.attention means the plain path for `x`; kernels know no float64."""
    return attention == "reference" or (attention == "auto" and (not x.is_cuda or x.dtype == torch.float64))


class MultiHeadSelfAttention(nn.Module):
    """Each of n_heads query heads attends over the keys of its group; the heads' outputs are mixed by output_proj.

    `variant`: what ModelConfig says of soft cap, QK-norm (Henry et al. 2020; with gains, as Qwen3) and kernels; None:
    its defaults with the plain path.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int = 0, variant: ModelConfig | None = None):
        super().__init__()
        self.variant = variant = variant or ModelConfig(attention="reference", kernels="reference")
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.d_head = d_model // n_heads
        self.kernel_options: dict[str, Any] = {
            "softcap": variant.attention_softcap,
            "backend": variant.attention,
            "deterministic": variant.attention_deterministic,
        }
        d_keys = self.n_kv_heads * self.d_head
        self.q_proj = Linear(d_model, n_heads * self.d_head, variant.kernels)
        self.k_proj = Linear(d_model, d_keys, variant.kernels)
        self.v_proj = Linear(d_model, d_keys, variant.kernels)
        self.output_proj = Linear(n_heads * self.d_head, d_model, variant.kernels)
        if variant.qk_norm:
            self.q_norm = RMSNorm(self.d_head, variant.norm_eps, variant.kernels)
            self.k_norm = RMSNorm(self.d_head, variant.norm_eps, variant.kernels)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        mask: Bool[Tensor, "... seq keys"] | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
        layer: int = 0,
        residual: Float[Tensor, "batch seq d_model"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """`mask` None: causal, and the kernels of ModelConfig.attention do it; a mask means the plain path.

        `residual` is added to the output.
        """
        # In a frame of its own: what only the heads needed is not held beside the product.
        return self.output_proj(self._heads(x, mask, rotation, cache, layer), residual)

    def _heads(
        self, x: Tensor, mask: Tensor | None, rotation: Rotation | None, cache: Cache | None, layer: int
    ) -> Float[Tensor, "batch seq d_heads"]:
        """What every head read, side by side."""
        if mask is None and cache is None and self._as_one(x, rotation):
            return self._rotary(x, rotation).flatten(-2)
        q, k, v = self._project(x, joined=mask is not None and cache is None)
        if self.variant.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate_both(q, k, rotation, self.variant.kernels)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        heads = self._plain(q, k, v, mask) if mask is not None else fused.attention(q, k, v, **self.kernel_options)
        return heads.transpose(1, 2).flatten(-2)

    def _as_one(self, x: Tensor, rotation: Rotation | None) -> bool:
        """Whether one operator takes the projection, RoPE and attention: nothing lies between them."""
        one_table = rotation is None or rotation[0].ndim == 2
        return not self.variant.qk_norm and one_table and use_kernel(self.variant.kernels, x)

    def _rotary(self, x: Tensor, rotation: Rotation | None) -> Float[Tensor, "batch seq n_heads d_head"]:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        return fused.projected_attention(x, weight, rotation, self.n_heads, self.d_head, **self.kernel_options)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Float[Tensor, "batch n_heads seq d_head"]:
        if self.n_kv_heads < self.n_heads:
            group = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return scaled_dot_product_attention(q, k, v, mask, self.variant.attention_softcap)

    def _project(self, x: Float[Tensor, "batch seq d_model"], joined: bool = True) -> list[Tensor]:
        """q, k and v, each (batch, heads, seq, d_head).

        `joined`: from one matrix product, as the plain path always had it. Apart, the weights are not copied together
        first (a step of generation would do that for every token), and what RoPE has turned can be freed: the three
        would share one piece of memory, which v keeps alive.
        """
        if not joined:
            apart = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            return [t.unflatten(-1, (-1, self.d_head)).transpose(-3, -2) for t in apart]
        heads = (
            joined_product(x, self.q_proj, self.k_proj, self.v_proj).unflatten(-1, (-1, self.d_head)).transpose(-3, -2)
        )
        return list(heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=-3))
