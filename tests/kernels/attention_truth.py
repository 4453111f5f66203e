"""Attention written out, the whole score matrix at once: the truth the kernels' tests compare with."""

from math import sqrt

import torch
from torch import Tensor


def make(batch, heads, kv_heads, n_q, n_k, d, d_v, dtype=torch.float64, seed=0) -> list[Tensor]:
    """Random q, k, v (with gradients) and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, n_q, d), (kv_heads, n_k, d), (kv_heads, n_k, d_v), (heads, n_q, d_v)]
    tensors = [torch.randn(batch, *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [t.requires_grad_() for t in tensors[:3]] + tensors[3:]


def visible(n_q: int, n_k: int, causal: bool, window: int = 0, documents=None) -> Tensor:
    """(n_q, n_k) or (batch, 1, n_q, n_k): which keys a query sees; `documents` is a pair of id tensors (batch, n)."""
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    distance = i + (n_k - n_q) - j
    keep = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        keep &= distance >= 0
    if window:
        keep &= distance < window
    if documents is not None:
        keep = keep & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    return keep


def attention(q, k, v, causal, window=0, softcap=0.0, documents=None, scale=None) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp in the inputs' own precision; a row that sees nothing gives 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (scale or 1 / sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keep = visible(q.shape[2], k.shape[2], causal, window, documents).to(q.device)
    scores = scores.masked_fill(~keep, float("-inf"))
    some = keep.any(-1)
    weights = torch.softmax(scores.masked_fill(~some[..., None], 0.0), -1) * some[..., None].to(scores.dtype)
    lse = torch.logsumexp(scores.masked_fill(~some[..., None], 0.0), -1).masked_fill(~some, float("-inf"))
    return weights @ v, lse
