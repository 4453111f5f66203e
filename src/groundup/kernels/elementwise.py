"""SwiGLU and RoPE: one launch each, forward and backward, limited by memory alone.

SwiGLU saves its two inputs and computes the sigmoid again: 2 reads and 1 write forward, 3 reads and 2 writes backward
(eager autograd keeps four tensors of this size). RoPE turns q and k in one launch; its backward is the same kernel with
the angle's sign changed, and saves nothing but the table of angles.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.errors import UserError
from groundup.kernels.backend import choose, launch, on_device_of
from groundup.kernels.flash_torch import at_least_float32
from groundup.kernels.flash_triton import rows_first


def swiglu(gate: Float[Tensor, "..."], up: Float[Tensor, "..."], backend: str = "auto") -> Float[Tensor, "..."]:
    """silu(gate) ∘ up (Shazeer 2020) in gate's type, computed in float32 at least. UserError for unequal shapes."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UserError(f"swiglu: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ")
    if choose(backend, gate) == "triton" and gate.numel():
        return swiglu_op(gate, up)
    wide = at_least_float32(gate)
    return (wide * torch.sigmoid(wide) * up).to(gate.dtype)


@torch.library.custom_op("groundup::swiglu", mutates_args=())
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ∘ up."""
    from groundup.kernels.elementwise_triton import swiglu_kernel

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    with on_device_of(gate):
        launch(swiglu_kernel, -(-gate.numel() // 2048), gate, up, out, gate.numel(), BLOCK=2048)
    return out


@swiglu_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("groundup::swiglu_backward", mutates_args=())
def swiglu_backward_op(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up)."""
    from groundup.kernels.elementwise_triton import swiglu_backward_kernel

    d_out, gate, up = d_out.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    with on_device_of(gate):
        blocks = -(-gate.numel() // 2048)
        launch(swiglu_backward_kernel, blocks, d_out, gate, up, d_gate, d_up, gate.numel(), BLOCK=2048)
    return d_gate, d_up


@swiglu_backward_op.register_fake
def _(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    plain = torch.contiguous_format
    return torch.empty_like(gate, memory_format=plain), torch.empty_like(up, memory_format=plain)


def _swiglu_save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
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
    if k.shape[2:] != q.shape[2:] or cos.shape != (seq, d // 2) or sin.shape != cos.shape or d % 2:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise UserError(f"rope: {shapes} do not fit together")
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
    from groundup.kernels.elementwise_triton import rope_kernel

    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out_q, out_k = rows_first(*q.shape, like=q), rows_first(*k.shape, like=k)
    (batch, heads, seq, d), kv_heads = q.shape, k.shape[1]
    block = 1 << (d // 2 - 1).bit_length()
    rows = max(1, 1024 // block)
    tiles = -(-seq // rows)
    with on_device_of(q):
        launch(
            rope_kernel, tiles * batch * (heads + kv_heads), q, k, out_q, out_k, cos.contiguous(), sin.contiguous(),
            seq, heads, kv_heads, *q.stride()[:3], *k.stride()[:3], *out_q.stride()[:3], *out_k.stride()[:3], d // 2,
            ROWS=rows, BLOCK=block, BACK=back,
        )  # fmt: skip
    return out_q, out_k


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
