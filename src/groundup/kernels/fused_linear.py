"""Products X Wᵀ of a training step on Hopper, with what follows them done by the same kernel.

A residual added, q and k turned by RoPE, SwiGLU, or SwiGLU's backward: each by itself reads and writes the whole
product once more, which is a quarter of what a layer's four products take forward. As operators without gradients;
linear.py has those. The kernels (linear_hopper.py, swiglu_backward_hopper.py) are Gluon for Triton 3.6 alone: they run
after a small product of their kind came out right on the device, and in their place PyTorch does the same in two steps.
"""

from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.kernels import flash_hopper
from groundup.kernels.backend import agree, launch, n_multiprocessors, proven
from groundup.kernels.elementwise import swiglu, swiglu_backward_op, turned
from groundup.kernels.flash_hopper import describe
from groundup.kernels.flash_triton import addressable

FIXED = {"STAGES": 4, "SLOTS": 2, "GROUP": 8, "LEAD": 2, "REGISTERS": 240, "PRODUCER_REGISTERS": 24}
"""Compile-time arguments, the best of those measured on an H200."""
RESIDUAL, ROPE, SWIGLU = range(3)
LEAST = 132 * 128 * 256
"""Elements of a product that give every multiprocessor of an H200 a tile; cuBLAS cuts smaller ones along K."""
BACKWARD = {"STAGES": 3, "SLOTS": 4, "REGISTERS": 192, "HELPER_REGISTERS": 96, "PRODUCER_REGISTERS": 32}


def takes(x: Float[Tensor, "... d_in"], weight: Float[Tensor, "d_out d_in"]) -> bool:
    """Whether the kernel is for x Wᵀ, with the weight cast to x's type: bf16 on Hopper, whole tiles of rows, enough of
    them."""
    rows, (d_out, d_in) = prod(x.shape[:-1]), weight.shape
    shapes = rows > 0 and rows % 128 == 0 and d_in % 8 == 0 and d_in > 64 * FIXED["STAGES"] and d_out % 16 == 0
    if not x.is_cuda or x.dtype != torch.bfloat16 or not shapes or not LEAST <= rows * d_out < 1 << 31:
        return False
    castable = weight.dtype == torch.float32 and torch.is_autocast_enabled("cuda")  # else two types are an error
    return (weight.dtype == x.dtype or castable) and not flash_hopper.device_obstacle(x.device.index or 0)


@torch.library.custom_op("groundup::residual_linear", mutates_args=())
def residual_op(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """x Wᵀ + residual, all bf16."""
    if not right(x.device, "residual_linear"):
        return residual + x @ weight.T
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    residual = residual.contiguous().view(-1, residual.shape[-1])
    run(x, weight, out.view_as(residual), RESIDUAL, residual=residual)
    return out


@residual_op.register_fake
def _(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


@torch.library.custom_op("groundup::turned_linear", mutates_args=())
def turned_op(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, n_turned: int) -> Tensor:
    """x (batch, seq, d_in) Wᵀ, the pairs of its first `n_turned` columns turned as elementwise.rope does.

    cos, sin: (seq, d / 2) float32 for heads of d = 64 or 128 columns.
    """
    if not right(x.device, "turned_linear", 2 * cos.shape[1]):
        out = x @ weight.T
        heads = out[..., :n_turned].unflatten(-1, (-1, 2 * cos.shape[1])).transpose(-2, -3)
        out[..., :n_turned] = turned(heads, cos, sin).transpose(-2, -3).flatten(-2)
        return out
    out = x.new_empty(*x.shape[:-1], len(weight))
    tables = cos.contiguous(), sin.contiguous()
    run(x, weight, out.view(-1, len(weight)), ROPE, tables=tables, n_turned=n_turned)
    return out


@turned_op.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, n_turned: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("groundup::swiglu_linear", mutates_args=())
def swiglu_op(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(x Wᵀ, silu(gate) ∘ up) of its halves; W (2 d_ff, d_in): the gate's rows, then the up rows."""
    if not right(x.device, "swiglu_linear"):
        gate_up = x @ weight.T
        return gate_up, swiglu(gate_up)
    width = len(weight) // 2
    gate_up, hidden = (x.new_empty(*x.shape[:-1], n) for n in (2 * width, width))
    gate, up = gate_up.view(-1, 2 * width).split(width, dim=1)
    run(x, weight[:width], gate, SWIGLU, weight_up=weight[width:], out_up=up, hidden=hidden.view(-1, width))
    return gate_up, hidden


@swiglu_op.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.shape[:-1]
    return x.new_empty(*shape, len(weight)), x.new_empty(*shape, len(weight) // 2)


@torch.library.custom_op("groundup::swiglu_linear_backward", mutates_args=())
def swiglu_linear_backward_op(d_out: Tensor, weight: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up (..., 2 d_ff) where SwiGLU of it was multiplied by Wᵀ; W (d_model, d_ff)."""
    width, rows = weight.shape[1], prod(d_out.shape[:-1])
    if width % 64 or rows % 64 or not right(d_out.device, "swiglu_linear_backward"):
        return swiglu_backward_op(d_out @ weight, gate_up)
    from groundup.kernels.swiglu_backward_hopper import COLUMNS, ROWS, swiglu_backward_kernel

    gate_up, d_out = gate_up.contiguous(), addressable(d_out.reshape(rows, -1))
    grad, tile_columns = torch.empty_like(gate_up), -(-width // COLUMNS.value)
    tiles = -(-rows // ROWS.value) * tile_columns
    launch(d_out, swiglu_backward_kernel, min(tiles, n_multiprocessors(d_out.device)),
        describe(d_out, [64, 64]), describe(addressable(weight), [64, 128]),
        gate_up.view(torch.int32), grad.view(torch.int32),
        rows, tiles, tile_columns, -(-d_out.shape[1] // 64), F=width, **BACKWARD, num_warps=4,
    )  # fmt: skip
    return grad


@swiglu_linear_backward_op.register_fake
def _(d_out: Tensor, weight: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def run(
    x: Tensor, weight: Tensor, out: Tensor, epilogue: int, residual: Tensor | None = None,
    tables: tuple[Tensor, Tensor] | None = None, n_turned: int = 0, weight_up: Tensor | None = None,
    out_up: Tensor | None = None, hidden: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel; outputs and the residual are (rows, columns)."""
    from groundup.kernels.linear_hopper import BN, linear_kernel

    x = addressable(x.reshape(-1, x.shape[-1]))
    (rows, d_in), columns = x.shape, out.shape[1]
    m_tiles, n_tiles = -(-rows // 128), -(-columns // (BN.value // 2 if hidden is not None else BN.value))
    # What an epilogue does not use is not looked at.
    multiplied, stored, (cos, sin) = describe(addressable(weight), [128, 64]), describe(out, [64, 64]), tables or (x, x)
    launch(x, linear_kernel, min(m_tiles * n_tiles, n_multiprocessors(x.device)),
        describe(x, [64, 64]), multiplied,
        multiplied if weight_up is None else describe(addressable(weight_up), [128, 64]),
        stored if residual is None else describe(addressable(residual), [64, 64]), stored,
        stored if out_up is None else describe(out_up, [64, 64]),
        stored if hidden is None else describe(hidden, [64, 64]),
        cos, sin, m_tiles, n_tiles, -(-d_in // 64), 1 if tables is None else len(cos), n_turned,
        EPILOGUE=epilogue, HEAD=64 if tables is None else 2 * cos.shape[1], **FIXED, num_warps=4,
    )  # fmt: skip


def right(device: torch.device, what: str, head: int = 64) -> bool:
    """Whether an operator's kernel came out right on this device; else PyTorch does the same in two steps."""
    return proven(_proof, (device, what, head), what, "two steps", lambda: prove(device, what, head))


_proof: dict[tuple[torch.device, str, int], bool] = {}


def prove(device: torch.device, what: str, head: int) -> bool:
    """Compare an operator with float32 on 256 rows of 328, tails of columns included."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    x, weight, residual = normal(2, 128, 328), normal(5 * head, 328) * 328**-0.5, normal(2, 128, 5 * head)
    angle = torch.randn(128, head // 2, device=device, generator=generator)
    cos, sin, wide = angle.cos(), angle.sin(), x.float() @ weight.float().T
    if what == "residual_linear":
        pairs = [(residual_op(x, weight, residual), wide + residual)]
    elif what == "turned_linear":
        q = turned(wide[..., : 2 * head].unflatten(-1, (2, head)).transpose(1, 2), cos, sin)
        expected = torch.cat([q.transpose(1, 2).flatten(-2), wide[..., 2 * head :]], -1)
        pairs = [(turned_op(x, weight, cos, sin, 2 * head), expected)]
    elif what == "swiglu_linear_backward":
        d_out, weight, gate_up = normal(256, 328), normal(328, 320) * 328**-0.5, normal(256, 640)
        expected = swiglu_backward_op(d_out @ weight, gate_up)
        pairs = [(swiglu_linear_backward_op(d_out, weight, gate_up), expected)]
    else:
        pairs = [*zip(swiglu_op(x, weight), (wide, swiglu(wide, "torch")), strict=True)]
    return all(agree(a, b) for a, b in pairs)
