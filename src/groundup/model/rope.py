"""Rotary position embedding (Su et al. 2021, RoFormer, equation 34).

Each pair of neighbouring elements (2i, 2i + 1) of a query or key is turned by the angle position · theta^(-2i/d): the
score of a query and a key then depends on their distance alone.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from groundup import kernels as fused
from groundup.kernels.backend import at_least_float32
from groundup.model.layers import use_kernel

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles, each (..., seq, d_head / 2), float32."""


class RotaryEmbedding(nn.Module):
    """The table of angles for positions 0 … context_length - 1; buffers are not saved in checkpoints.

    Angles stay in float32 even when the model is cast to half precision: in bf16, positions above 256 would fall
    together.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, d_head: int, context_length: int, theta: float = 10000.0):
        super().__init__()
        self.d_head, self.context_length, self.theta = d_head, context_length, theta
        self.reset()

    def reset(self, device: torch.device | None = None) -> None:
        """Compute the table anew on `device`."""
        exponent = torch.arange(0, self.d_head, 2, device=device, dtype=torch.float32) / self.d_head
        position = torch.arange(self.context_length, device=device, dtype=torch.float32)
        angle = torch.outer(position, self.theta**-exponent)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.reset(self.cos.device)
        return self

    def forward(self, positions: Int[Tensor, "... seq"] | slice) -> Rotation:
        """cos and sin for the given positions (a slice costs no copy)."""
        return self.cos[positions], self.sin[positions]


def rotate(x: Float[Tensor, "... seq d_head"], rotation: Rotation) -> Float[Tensor, "... seq d_head"]:
    """Turn each interleaved pair of `x` by its angle, in float32 at least."""
    cos, sin = rotation
    even, odd = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_both(
    q: Float[Tensor, "batch n_heads seq d_head"],
    k: Float[Tensor, "batch n_kv_heads seq d_head"],
    rotation: Rotation,
    kernels: str = "reference",
) -> tuple[Tensor, Tensor]:
    """`rotate` of queries and keys; by one kernel where the rows of a batch share their positions."""
    if use_kernel(kernels, q, fuses=True) and rotation[0].ndim == 2:
        return fused.rope(q, k, *rotation, backend=kernels)
    return rotate(q, rotation), rotate(k, rotation)
