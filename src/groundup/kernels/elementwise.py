"""SwiGLU and RoPE: one launch each, forward and backward, limited by memory alone.

SwiGLU takes gate and up as the halves of one product, saves them and computes the sigmoid again: 2 reads and 1 write
forward, 3 reads and 2 writes backward (eager autograd keeps four tensors of this size). RoPE turns q and k in one
launch; its backward is the same kernel with the angle's sign changed, and saves nothing but the table of angles.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.errors import UserError
from groundup.kernels.backend import at_least_float32, choose, fit, launch
from groundup.kernels.flash_triton import rows_first


def swiglu(gate_up: Float[Tensor, "... two_d_ff"], backend: str = "auto") -> Float[Tensor, "... d_ff"]:
    """silu(gate) ∘ up (Shazeer 2020) of the two halves of the last dimension, computed in float32 at least.

    Both halves come from one matrix product, and their gradient is one tensor again. UserError for an odd width.
    """
    if gate_up.shape[-1] % 2:
        raise UserError(f"swiglu: the last dimension {gate_up.shape[-1]} has no two halves")
    if choose(backend, gate_up) == "triton" and gate_up.numel():
        return swiglu_op(gate_up)
    gate, up = gate_up.chunk(2, -1)
    wide = at_least_float32(gate)
    return (wide * torch.sigmoid(wide) * up).to(gate.dtype)


SWIGLU_BLOCK = 1024


@torch.library.custom_op("groundup::swiglu", mutates_args=())
def swiglu_op(gate_up: Tensor) -> Tensor:
    """silu(gate) ∘ up."""
    from groundup.kernels.elementwise_triton import swiglu_kernel

    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    tiles = -(-width // SWIGLU_BLOCK)
    launch(gate_up, swiglu_kernel, out.numel() // width * tiles, gate_up, out, width, tiles, BLOCK=SWIGLU_BLOCK)
    return out


@swiglu_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("groundup::swiglu_backward", mutates_args=())
def swiglu_backward_op(d_out: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up."""
    from groundup.kernels.elementwise_triton import swiglu_backward_kernel

    d_out, gate_up = d_out.contiguous(), gate_up.contiguous()
    width = d_out.shape[-1]
    grad = torch.empty_like(gate_up)
    tiles = -(-width // SWIGLU_BLOCK)
    programs = d_out.numel() // width * tiles
    launch(gate_up, swiglu_backward_kernel, programs, d_out, gate_up, grad, width, tiles, BLOCK=SWIGLU_BLOCK)
    return grad


@swiglu_backward_op.register_fake
def _(d_out: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _swiglu_save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_differentiate(ctx: Any, d_out: Tensor) -> Tensor:
    return swiglu_backward_op(d_out, *ctx.saved_tensors)


swiglu_op.register_autograd(_swiglu_differentiate, setup_context=_swiglu_save)


def rope(
    q: Float[Tensor, "batch n_heads seq d"],
    k: Float[Tensor, "batch n_kv_heads seq d"],
    cos: Float[Tensor, "seq half_d"],
    sin: Float[Tensor, "seq half_d"],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """q and k with each interleaved pair (2i, 2i + 1) turned by its angle (Su et al. 2021), in their types.

    The Triton outputs lie in memory as (batch, seq, heads, d). Raises UserError when shapes do not fit.
    """
    seq, d = q.shape[2:]
    ok = k.shape[2:] == q.shape[2:] and cos.shape == sin.shape == (seq, d // 2) and d % 2 == 0
    fit(ok, "rope", q=q, k=k, cos=cos, sin=sin)
    if choose(backend, q) == "triton" and q.numel():
        return rope_op(q, k, cos, sin, False)
    return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain rotation, in float32 at least."""
    even, odd = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


@torch.library.custom_op("groundup::rope", mutates_args=())
def rope_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """q and k turned, or with `back` turned the other way."""
    out = rows_first(*q.shape, like=q), rows_first(*k.shape, like=k)
    turn_into((q, k), out, cos, sin, back)
    return out


def turn_into(
    pair: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, back: bool,
    factor: float = 1.0, values: bool = False,
) -> None:  # fmt: skip
    """Write q · factor and k, turned, into `out`, which may be the same tensors; last strides of `out` must be 1.

    `values`: behind the heads of k lie as many of v, there as here, which are copied.
    """
    from groundup.kernels.elementwise_triton import rope_kernel

    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in pair)
    (batch, heads, seq, d), kv_heads = q.shape, k.shape[1]
    block = 1 << (d // 2 - 1).bit_length()
    rows = max(1, 1024 // block)
    tiles = -(-seq // rows)
    strides = (s for x in (q, k, *out) for s in x.stride()[:3])
    n_heads = heads + kv_heads * (2 if values else 1)
    launch(q, rope_kernel, tiles * batch * n_heads,
        q, k, *out, cos.contiguous(), sin.contiguous(), factor,
        seq, heads, kv_heads, *strides, d // 2, ROWS=rows, BLOCK=block, BACK=back, VALUES=values,
    )  # fmt: skip


@rope_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return rows_first(*q.shape, like=q), rows_first(*k.shape, like=k)


def _rope_save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.back = inputs[4]


def _rope_differentiate(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
    # A rotation's transpose is the rotation back; being linear in q and k, it may be differentiated again.
    return *rope_op(d_q, d_k, *ctx.saved_tensors, not ctx.back), None, None, None


rope_op.register_autograd(_rope_differentiate, setup_context=_rope_save)
