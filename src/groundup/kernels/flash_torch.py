"""FlashAttention-2 in plain PyTorch, to read before the Triton file and to hold it to.

Attention O = softmax(Q Kᵀ / √d) V without the (queries × keys) matrix (Dao 2023, Algorithm 1). A tile of queries walks
over the tiles of keys and keeps three things a row: the largest score seen, the sum of exponentials measured from it,
and the output so far, rescaled whenever the largest score grows. What is kept for the backward is one number a row,
the logsumexp L of its scores: the probabilities are exp(S - L), recomputed tile by tile.

Cost: 4·n_q·n_k·d FLOPs forward and 10·n_q·n_k·d backward (five products, one of them the recomputation), half when
causal; memory O(n·d). Tiles are upcast to float32, so the result is as exact as eager attention in float32.
Rejected: keeping the probabilities in the working type (a GPU needs that for speed, an oracle does not); compiling the
whole loop (it unrolls, and compile time grows with the square of the length). What is compiled, on a GPU, is one tile.
"""

from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.kernels.backend import at_least_float32, refuse_second_derivative, wide_type

TILE_Q, TILE_K = 64, 64
"""Rows of queries and of keys in a tile. On a GPU a tile is what fits in shared memory; here any size is right."""


def last_key(query: int, n_q: int, n_k: int, causal: bool) -> int:
    """One past the last key that `query` may see; causal aligns the last query with the last key."""
    return max(0, min(n_k, query + 1 + n_k - n_q)) if causal else n_k


def hide_future(scores: Tensor, query: int, key: int, offset: int) -> Tensor:
    """-inf where a key is after its query; `query` and `key` are the tile's first row and column."""
    rows = torch.arange(query, query + scores.shape[-2], device=scores.device)
    columns = torch.arange(key, key + scores.shape[-1], device=scores.device)
    return scores.masked_fill(columns > rows[:, None] + offset, float("-inf"))


def forward_tile(
    q: Float[Tensor, "... rows d"],
    k: Float[Tensor, "... columns d"],
    v: Float[Tensor, "... columns d_v"],
    state: tuple[Tensor, Tensor, Tensor],
    diagonal: tuple[int, int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the online softmax (Algorithm 1, lines 8–10): `state` is (largest, total, out) of the rows.

    `diagonal`: (first query, first key, offset) where the tile crosses the causal diagonal, None where all is visible.
    """
    largest, total, out = state
    scores = q @ at_least_float32(k).transpose(-1, -2)
    if diagonal is not None:
        scores = hide_future(scores, *diagonal)
    new_largest = torch.maximum(largest, scores.amax(-1))
    # A row that has seen nothing keeps -inf; measuring from 0 instead avoids -inf - -inf.
    origin = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
    p = torch.exp(scores - origin[..., None])
    rescale = torch.exp(largest - origin)
    return new_largest, rescale * total + p.sum(-1), rescale[..., None] * out + p @ at_least_float32(v)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (..., n_q, d_v) in q's type and natural logsumexp (..., n_q), float32 at least; an empty row: 0, -inf."""
    n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
    step = compiled(forward_tile) if q.is_cuda else forward_tile
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide_type(q))
    for m in range(0, n_q, TILE_Q):
        rows = slice(m, min(m + TILE_Q, n_q))
        q_tile = at_least_float32(q[..., rows, :]) / sqrt(d)
        empty = q_tile.new_zeros(q_tile.shape[:-1])
        state = (empty - float("inf"), empty, empty[..., None].expand(*empty.shape, v.shape[-1]))
        for n in range(0, last_key(rows.stop - 1, n_q, n_k, causal), TILE_K):
            columns = slice(n, min(n + TILE_K, n_k))
            crosses = columns.stop > last_key(m, n_q, n_k, causal)
            diagonal = (m, n, n_k - n_q) if crosses else None
            state = step(q_tile, k[..., columns, :], v[..., columns, :], state, diagonal)
        largest, total, weighted = state
        out[..., rows, :] = (weighted / total.masked_fill(total == 0, 1.0)[..., None]).to(q.dtype)
        lse[..., rows] = largest + torch.log(total)
    return out, lse


def backward_tile(
    q: Float[Tensor, "... rows d"],
    k: Float[Tensor, "... columns d"],
    v: Float[Tensor, "... columns d_v"],
    d_out: Float[Tensor, "... rows d_v"],
    row: tuple[Tensor, Tensor],
    diagonal: tuple[int, int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile adds to dQ, dK and dV (Algorithm 2, lines 11–16); q is scaled, `row` is (L, D) of its rows."""
    lse, delta = row
    k, v = at_least_float32(k), at_least_float32(v)
    scores = q @ k.transpose(-1, -2)
    if diagonal is not None:
        scores = hide_future(scores, *diagonal)
    p = torch.exp(scores - lse[..., None])
    d_p = d_out @ v.transpose(-1, -2)
    # The softmax's derivative needs rowsum(P ∘ dP), which equals rowsum(O ∘ dO) = D: no second pass over the row.
    d_s = p * (d_p - delta[..., None])
    return d_s @ k, d_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_out


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their types, summed in float32 at least; `d_lse` None: the logsumexp was not used."""
    n_q, n_k, scale = q.shape[-2], k.shape[-2], 1 / sqrt(q.shape[-1])
    step = compiled(backward_tile) if q.is_cuda else backward_tile
    d_out = at_least_float32(d_out)
    delta = (at_least_float32(out) * d_out).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    # An empty row: exp(S - inf) = 0 whatever S is.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide_type(x)) for x in (q, k, v))
    for n in range(0, n_k, TILE_K):
        columns = slice(n, min(n + TILE_K, n_k))
        first = max(0, n - (n_k - n_q)) if causal else 0
        for m in range(first // TILE_Q * TILE_Q, n_q, TILE_Q):
            rows = slice(m, min(m + TILE_Q, n_q))
            crosses = columns.stop > last_key(m, n_q, n_k, causal)
            diagonal = (m, n, n_k - n_q) if crosses else None
            q_tile = at_least_float32(q[..., rows, :]) * scale
            row = (lse[..., rows], delta[..., rows])
            parts = step(q_tile, k[..., columns, :], v[..., columns, :], d_out[..., rows, :], row, diagonal)
            d_q[..., rows, :] += parts[0] * scale
            d_k[..., columns, :] += parts[1]
            d_v[..., columns, :] += parts[2]
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal=False)`.

    q (..., n_q, d), k (..., n_k, d), v (..., n_k, d_v) → (..., n_q, d_v). Saves the logsumexp (natural, of the scaled
    scores), q, k, v and the output. Leading dimensions must be equal. A second derivative is refused.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        out, lse = attention_forward(q, k, v, is_causal)
        ctx.save_for_backward(lse, q, k, v, out)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("FlashAttention", "use eager attention for a gradient of gradients")
        (d_out,) = grads
        lse, q, k, v, out = ctx.saved_tensors
        return *attention_backward(q, k, v, out, lse, d_out, None, ctx.is_causal), None


def flash_attention(
    q: Float[Tensor, "batch n_heads n_q d"],
    k: Float[Tensor, "batch n_kv_heads n_k d"],
    v: Float[Tensor, "batch n_kv_heads n_k d_v"],
    causal: bool = True,
) -> Float[Tensor, "batch n_heads n_q d_v"]:
    """FlashAttention over heads; grouped key and value heads are broadcast as views, never copied."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        # Views, for torch.compile loses gradients where one tensor is two arguments of a Function.
        return FlashAttention.apply(q, k.view_as(k), v.view_as(v), causal)
    grouped = q.unflatten(1, (-1, group))
    k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1) for x in (k, v))
    return FlashAttention.apply(grouped, k, v, causal).flatten(1, 2)


@cache
def compiled(function: Callable) -> Callable:
    """`function` under torch.compile, once a process; shapes are dynamic because the last tile may be smaller."""
    return torch.compile(function, dynamic=True)
