"""RMSNorm with a hand-derived backward, in PyTorch and in Triton.

y = x · r · w with r = 1 / sqrt(mean(x²) + eps) a row (Zhang & Sennrich 2019). With x̂ = x · r and g = dy ∘ w:

    dx = r · (g - x̂ · mean(g ∘ x̂))        dw = Σ over rows of dy ∘ x̂

Both are limited by memory: forward reads x and writes y, backward reads x and dy and writes dx, once each (what one
forward kernel reads twice is in L1 the second time). Only r is saved, one float a row. dw is summed in float32 in a
fixed order: every program keeps the sum of its rows, a second small kernel adds the programs' sums. Rejected: atomics
(another order every time), sums in bf16 (Liger's early mistake).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.kernels.backend import (
    at_least_float32,
    choose,
    fit,
    launch,
    n_multiprocessors,
    note_fallback,
    shared_memory,
)

WIDEST = 65536
"""A row has to fit in the registers of one block of threads."""


def rms_norm(
    x: Float[Tensor, "... width"],
    weight: Float[Tensor, "width"],
    eps: float = 1e-5,
    residual: Float[Tensor, "... width"] | None = None,
    backend: str = "auto",
) -> Any:
    """RMSNorm of `x` over its last dimension, in x's type; with `residual`, (norm of x + residual, x + residual).

    The sum is rounded to x's type before it is normalised, as two separate operations would. `backend`: auto, triton or
    torch. Raises UserError when shapes do not fit.
    """
    ok = weight.shape == x.shape[-1:] and (residual is None or residual.shape == x.shape)
    fit(ok, "rms_norm", x=x, weight=weight, residual=residual)
    chosen = choose(backend, x)
    if chosen == "triton" and x.shape[-1] > WIDEST:
        note_fallback("rms_norm", f"width {x.shape[-1]} is above {WIDEST}; using torch")
        chosen = "torch"
    if chosen == "torch" or x.numel() == 0:
        if residual is None:
            return RMSNorm.apply(x, weight, eps)
        total = (x + residual).to(x.dtype)
        return RMSNorm.apply(total, weight, eps), total
    out, _, total = forward_op(x, residual, weight, eps)
    return out if residual is None else (out, total)


def normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x̂ and r, in float32 at least."""
    wide = at_least_float32(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd


def backward_x(d_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """dx in x's type."""
    x_hat, rstd = normalised(x, eps)
    g = at_least_float32(d_out) * weight
    return (rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))).to(x.dtype)


def backward_weight(d_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """dw in the weight's type."""
    x_hat, _ = normalised(x, eps)
    return (at_least_float32(d_out) * x_hat).flatten(0, -2).sum(0).to(weight.dtype)


class RMSNorm(torch.autograd.Function):
    """`RMSNorm.apply(x, weight, eps=1e-5)`: saves x and weight; the row's factor is cheap to compute again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return (normalised(x, eps)[0] * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (d_out,) = grads
        x, weight = ctx.saved_tensors
        return backward_x(d_out, x, weight, ctx.eps), backward_weight(d_out, x, weight, ctx.eps), None


class RMSNormTriton:
    """`RMSNormTriton.apply(x, weight, eps=1e-5)`: the same with the Triton kernels."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        return rms_norm(x, weight, eps, backend="triton")


def as_rows(x: Tensor) -> Tensor:
    """(rows, width) with neighbouring columns; a view where the strides allow."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@torch.library.custom_op("groundup::rms_norm_forward", mutates_args=())
def forward_op(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(out, r, x + residual); without a residual the third is an empty tensor."""
    from groundup.kernels.rms_norm_triton import block_of, forward_kernel, forward_row_kernel

    rows = as_rows(x)
    n_rows, width = rows.shape
    other = rows if residual is None else as_rows(residual)
    out, rstd, total = outputs(x, residual)
    block, a_program, warps, whole = block_of(width, x.itemsize, weight.itemsize, residual is not None)
    if whole:
        arguments = (rows, weight.contiguous(), out, rstd, eps, rows.stride(0))
        launch(x, forward_row_kernel, n_rows, *arguments, WIDTH=width, num_warps=warps)
        return out, rstd, total
    launch(x, forward_kernel, -(-n_rows // a_program),
        rows, other, weight.contiguous(), out, total, rstd, eps, n_rows, width, rows.stride(0), other.stride(0),
        BLOCK=block, ROWS=a_program, RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return out, rstd, total


@forward_op.register_fake
def outputs(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What forward_op returns, before it is filled."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return out, rstd, out.new_empty(0 if residual is None else out.shape)


@torch.library.custom_op("groundup::rms_norm_backward", mutates_args=())
def backward_op(
    d_out: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dw); `d_total` is what flows into x + residual from elsewhere."""
    from groundup.kernels.rms_norm_triton import backward_block_of, backward_kernel, sum_kernel

    rows, d_rows = as_rows(x), as_rows(d_out)
    extra = d_rows if d_total is None else as_rows(d_total)
    n_rows, width = rows.shape
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    loaded = x.itemsize + d_out.itemsize + (0 if d_total is None else d_total.itemsize)
    plan = backward_block_of(width, loaded, shared_memory(x.device))
    block, a_program, warps, a_multiprocessor, stages = plan
    programs = min(n_multiprocessors(x.device) * a_multiprocessor, -(-n_rows // a_program))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    launch(x, backward_kernel, programs,
        rows, d_rows, extra, weight.contiguous(), rstd, d_x, parts, n_rows, width,
        rows.stride(0), d_rows.stride(0), extra.stride(0),
        BLOCK=block, ROWS=a_program, EXTRA=d_total is not None, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    launch(x, sum_kernel, -(-width // 32), parts, d_weight, programs, width, ROWS=64, COLUMNS=32, num_warps=4)
    return d_x, d_weight


@backward_op.register_fake
def _(d_out: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return d_x, torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _ = inputs
    _, rstd, total = output
    ctx.residual = residual is not None
    ctx.save_for_backward(total if ctx.residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd, *([] if ctx.residual else [total]))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, _: None, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return d_total, d_total, None, None
    d_x, d_weight = backward_op(d_out, d_total, *ctx.saved_tensors)
    return d_x, d_x if ctx.residual else None, d_weight, None


forward_op.register_autograd(_differentiate, setup_context=_save)
