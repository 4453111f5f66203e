"""x Wᵀ in half precision, with the weight's gradient in float32 straight from its product, and what may follow it.

Autocast casts the weight to half precision and, in the backward, a half-precision gradient back to float32: rounded
once more than it need be, and 10 bytes a parameter moved for 4. cuBLAS can write float32 itself. On an H200 that is
2.3 of 82 ms a step at 350M.

A residual sum, RoPE or SwiGLU behind the product is done by its kernel where fused_linear.py has one; else apart, so
that a compiler may join it with its neighbours.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.kernels import fused_linear
from groundup.kernels.backend import FLOAT32_PRODUCT, refuse_second_derivative
from groundup.kernels.elementwise import swiglu

SECOND = "linear under autocast", "compute the product in float32 for that"
"""Of which no second derivative, and what to do instead."""


def linear(
    x: Float[Tensor, "... d_in"],
    weight: Float[Tensor, "d_out d_in"],
    residual: Float[Tensor, "... d_out"] | None = None,
) -> Float[Tensor, "... d_out"]:
    """x Wᵀ, plus `residual`, in autocast's type where that is on. A float32 weight gets a gradient that was never in
    half precision."""
    x, mixed = autocast_for(x, weight)
    if residual is not None and residual.dtype == x.dtype and fused_linear.takes(x, weight):
        return _ResidualLinear.apply(x, weight, residual)
    out = _Linear.apply(x, weight) if mixed else x @ weight.T
    return out if residual is None else residual + out


def swiglu_feed_forward(
    x: Float[Tensor, "... d_model"],
    widen: Float[Tensor, "two_d_ff d_model"],
    narrow: Float[Tensor, "d_model d_ff"],
    residual: Float[Tensor, "... d_model"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "... d_model"]:
    """(silu(gate) ∘ up) narrowᵀ, plus `residual`, where gate and up are the halves of x widenᵀ.

    One operator, because SwiGLU's backward ends the product that narrow's gives it. `backend`: swiglu's, where it is
    apart.
    """
    half, _ = autocast_for(x, widen)
    fits = residual is not None and residual.dtype == half.dtype
    if fits and fused_linear.takes(half, widen) and fused_linear.takes(half, narrow):
        return _SwiGLUFeedForward.apply(half, widen, narrow, residual)
    return linear(swiglu(linear(x, widen), backend), narrow, residual)


def turned_linear(
    x: Float[Tensor, "batch seq d_in"], weight: Float[Tensor, "d_out d_in"],
    rotation: tuple[Float[Tensor, "seq half_d"], Float[Tensor, "seq half_d"]], n_turned: int,
) -> Float[Tensor, "batch seq d_out"] | None:  # fmt: skip
    """x Wᵀ with RoPE on heads of 64 or 128 in its first `n_turned` columns; None where no kernel does both.

    Its gradient must be handed in as that of x Wᵀ, turned back already (as rotary_attention makes it).
    """
    x, _ = autocast_for(x, weight)
    if 2 * rotation[0].shape[1] not in (64, 128) or not fused_linear.takes(x, weight):
        return None
    return _TurnedLinear.apply(x, weight, *rotation, n_turned)


def autocast_for(x: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    """x in autocast's type where that is on for a float32 weight, and whether it is."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or weight.dtype != torch.float32 or x.dtype == torch.float64:
        return x, False
    return x.to(torch.get_autocast_dtype(kind)), True


def float32_product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """a b of half-precision matrices, summed and kept in float32 where that can be had."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32) if FLOAT32_PRODUCT else (a @ b).float()
    with torch.autocast(a.device.type, enabled=False):  # a compiler traces a backward under the forward's autocast
        return a.float() @ b.float()


def save(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Keep what `gradients` needs; the weight in x's type."""
    half, ctx.weight_dtype = weight.to(x.dtype), weight.dtype
    ctx.save_for_backward(x, half)
    return half


def gradients(ctx: Any, d_out: Tensor, x: Tensor, half: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of the weight, from that of x Wᵀ."""
    refuse_second_derivative(*SECOND)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    d_weight = weight_gradient(d_out, x, ctx.weight_dtype) if needs_weight else None
    return d_out @ half if needs_x else None, d_weight


def weight_gradient(d_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """d_outᵀ x over all rows, summed in float32; `dtype`: float32 or theirs."""
    rows, columns = d_out.reshape(-1, d_out.shape[-1]), x.reshape(-1, x.shape[-1])
    return rows.T @ columns if dtype == x.dtype else float32_product(rows.T, columns)


class _Linear(torch.autograd.Function):
    """x (..., d_in) in half precision, weight (d_out, d_in) in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ save(ctx, x, weight).T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        return gradients(ctx, grads[0], *ctx.saved_tensors)


class _ResidualLinear(torch.autograd.Function):
    """x Wᵀ + residual; the weight in float32 or in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return fused_linear.residual_op(x, save(ctx, x, weight), residual)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *gradients(ctx, grads[0], *ctx.saved_tensors), grads[0]


class _TurnedLinear(torch.autograd.Function):
    """See turned_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, n_turned: int) -> Tensor:
        return fused_linear.turned_op(x, save(ctx, x, weight), cos, sin, n_turned)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *gradients(ctx, grads[0], *ctx.saved_tensors), None, None, None


class _SwiGLUFeedForward(torch.autograd.Function):
    """See swiglu_feed_forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widen: Tensor, narrow: Tensor, residual: Tensor) -> Tensor:
        ctx.dtypes, widen, narrow = (widen.dtype, narrow.dtype), widen.to(x.dtype), narrow.to(x.dtype)
        gate_up, hidden = fused_linear.swiglu_op(x, widen)
        ctx.save_for_backward(x, widen, narrow, gate_up, hidden)
        return fused_linear.residual_op(hidden, narrow, residual)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*SECOND)
        (d_out,), (x, widen, narrow, gate_up, hidden) = grads, ctx.saved_tensors
        needs_x, needs_widen, needs_narrow, _ = ctx.needs_input_grad
        d_narrow = weight_gradient(d_out, hidden, ctx.dtypes[1]) if needs_narrow else None
        d_gate_up = fused_linear.swiglu_linear_backward_op(d_out, narrow, gate_up)
        d_widen = weight_gradient(d_gate_up, x, ctx.dtypes[0]) if needs_widen else None
        return d_gate_up @ widen if needs_x else None, d_widen, d_narrow, d_out
