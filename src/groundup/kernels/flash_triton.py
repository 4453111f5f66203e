"""Launching the attention kernels in Triton: descriptors, tile sizes, empty inputs.

Works on NVIDIA's GPUs from Ampere on, and on the CPU under Triton's interpreter. q is (batch, n_heads, n_q, d), k and v
are (batch, n_kv_heads, n_k, d) and (…, d_v), with any strides; what a tensor-memory descriptor cannot address (a last
stride other than 1, rows not on 16 bytes, expanded dimensions) is copied first.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from groundup.kernels.backend import (
    INTERPRETING,
    decided_once,
    has_wgmma,
    launch,
    refuse_second_derivative,
    shared_memory,
)

LOG2E = log2(e)
L2_BYTES_FORWARD, L2_BYTES_BACKWARD = 32 << 20, 8 << 20
"""Keys and values (backward: also queries and output gradients) of the heads that run side by side; measured on
H200."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees and how scores are shaped, as the kernels need it."""

    causal: bool
    window: int
    """Keys a query sees counting back from its own place; 0: no limit."""
    softcap: float
    """Scores become softcap · tanh(score / softcap); 0: they stay."""
    scale: float
    intervals: tuple[Tensor, Tensor] | None = None
    """Documents: int32 (2, batch, n_q), the keys that each query sees, and (2, batch, n_k), the queries that see each
    key; causal and window are already in them."""


class Tile(NamedTuple):
    """A line of flash_tiles.json."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Compiler options for the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@decided_once
def device_obstacle(index: int) -> str:
    """Why GPU `index` cannot run these kernels, whose products in TF32 it has to know; empty: it can."""
    if torch.version.hip is not None:
        return "the GPU is not NVIDIA's"
    return "the GPU is older than Ampere" if torch.cuda.get_device_capability(index)[0] < 8 else ""


@cache
def tile_table() -> dict[str, dict[str, dict[str, list[Tile]]]]:
    """kernel → bits of an element → widest head → tiles, the best one first (flash_tiles.json)."""
    table = json.loads(files("groundup.kernels").joinpath("flash_tiles.json").read_text())
    return {
        kernel: {bits: {d: [Tile(*t) for t in tiles] for d, tiles in row.items()} for bits, row in rows.items()}
        for kernel, rows in table.items()
    }


def shared_bytes(kernel: str, tile: Tile, width: int, item: int) -> int:
    """Shared memory a tile needs: what stays for the whole program and what is loaded ahead, num_stages deep.

    float32 before Hopper: what stays is held a second time, or what is loaded where that is more.
    """
    staying, moving = (tile.block_k, tile.block_q) if kernel == "keys" else (tile.block_q, tile.block_k)
    kept = staying * width * item * (1 if kernel == "forward" else 2)
    return kept + max(2 * tile.num_stages * moving * width * item, kept if item == 4 else 0) + 4096


@cache
def pick_tile(kernel: str, dtype: torch.dtype, width: int, device: torch.device) -> Tile:
    """The best tile of the table that fits this device's shared memory; the interpreter takes small ones."""
    if device.type == "cpu":
        return Tile(16, 32, 4, 1) if kernel != "keys" else Tile(16, 16, 4, 1)
    rows = tile_table()[kernel][str(dtype.itemsize * 8)]
    tiles = next(tiles for d, tiles in rows.items() if width <= int(d))
    fitting = (t for t in tiles if shared_bytes(kernel, t, width, dtype.itemsize) <= shared_memory(device))
    # Without Hopper's wgmma, dQ of more than 16 rows a warp spills kilobytes.
    crowded = kernel == "queries" and not has_wgmma(device)
    return next((t for t in fitting if not crowded or t.block_q <= 16 * t.num_warps), tiles[-1])


def block_width(d: int) -> int:
    """Width of a tile: the power of two that holds d, at least the 16 of a matrix product."""
    return max(16, 1 << (d - 1).bit_length())


def addressable(x: Tensor) -> Tensor:
    """`x` (batch, heads, rows, width) as a descriptor can read it; the width is padded with zeros to 16 bytes."""
    missing = -x.shape[-1] % (16 // x.itemsize)
    if missing:
        return pad(x, (0, missing))
    outer = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    fine = x.stride(-1) == 1 and all(s > 0 and s * x.itemsize % 16 == 0 for s in outer)
    return x if fine and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def describe(x: Tensor, rows: int, width: int) -> Any:
    """A descriptor that moves tiles of (rows, width). A dimension of size 1 gets a stride the hardware accepts."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [s if n > 1 else 16 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


@cache
def heads_a_group(n_flat: int, bytes_a_head: int, l2_bytes: int) -> int:
    """The largest divisor of `n_flat` (batch × heads) whose keys and values fit in `l2_bytes`."""
    most = max(1, min(n_flat, l2_bytes // max(1, bytes_a_head)))
    return next(n for n in range(most, 0, -1) if n_flat % n == 0)


def rows_first(batch: int, heads: int, rows: int, width: int, like: Tensor) -> Tensor:
    """An empty (batch, heads, rows, width) that lies in memory as (batch, rows, heads, width): merging the heads of an
    output, or the gradients of a fused projection, then costs no copy."""
    return like.new_empty(batch, rows, heads, width).transpose(1, 2)


def score_factors(rule: Rule) -> tuple[float, float]:
    """(cap_in, factor): a score s goes to base 2 as s · factor, or as capped(s, cap_in, factor) with a softcap."""
    if rule.softcap:
        return 2 * LOG2E * rule.scale / rule.softcap, rule.softcap * LOG2E
    return 0.0, rule.scale * LOG2E


def constants(rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The arguments that all three kernels share."""
    upcast = INTERPRETING and q.dtype == torch.bfloat16
    return {
        # What reaches past both ends is no limit; larger numbers would leave 32 bits when added to an index.
        "window": min(rule.window, q.shape[2] + k.shape[2]),
        "GROUP": q.shape[1] // k.shape[1],
        "D": block_width(q.shape[-1]),
        "D_V": block_width(v.shape[-1]),
        "CAUSAL": rule.causal,
        "WINDOW": rule.window > 0,
        "DOCUMENTS": rule.intervals is not None,
        "SOFTCAP": rule.softcap > 0,
        "UPCAST": upcast,
        # Triton's default for float32 is tf32: three digits. Three products of tf32 halves keep seven.
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def attention_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Output (batch, n_heads, n_q, d_v) in q's type and natural logsumexp (batch, n_heads, n_q) in float32."""
    from groundup.kernels.flash_triton_forward import forward_kernel

    (batch, heads, n_q, _), n_k, d_v = q.shape, k.shape[2], v.shape[-1]
    lse = q.new_empty(batch, heads, n_q, dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return rows_first(batch, heads, n_q, d_v, q).zero_(), lse.fill_(float("-inf"))
    q, k, v = addressable(q), addressable(k), addressable(v)
    out = rows_first(batch, heads, n_q, v.shape[-1], q)
    fixed = constants(rule, q, k, v)
    tile = pick_tile("forward", q.dtype, max(fixed["D"], fixed["D_V"]), q.device)
    bytes_a_head = n_k * (q.shape[-1] + v.shape[-1]) * q.itemsize // fixed["GROUP"]
    lo, hi = (lse, lse) if rule.intervals is None else rule.intervals[0].unbind()
    launch(q, forward_kernel, -(-n_q // tile.block_q) * batch * heads,
        describe(q, tile.block_q, fixed["D"]),
        describe(k, tile.block_k, fixed["D"]),
        describe(v, tile.block_k, fixed["D_V"]),
        describe(out, tile.block_q, fixed["D_V"]),
        lse, lo, hi, *score_factors(rule), n_q, n_k, heads,
        heads_a_group(batch * heads, bytes_a_head, L2_BYTES_FORWARD),
        **fixed, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, EVEN=n_k % tile.block_k == 0, **tile.options(),
    )  # fmt: skip
    return trimmed(out, d_v), lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule,
    into: tuple[Tensor, Tensor, Tensor] | None = None, rotation: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, the same bits every time. `d_lse` None: the logsumexp was not used.

    `into`: where they are written, of any strides that a descriptor addresses (see `addressable`). `rotation`: cos and
    sin (n, d / 2) by which RoPE has turned q and k; the gradients are those of what it turned.
    """
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        d_q, d_k, d_v = (rows_first(*x.shape, like=x).zero_() for x in (q, k, v))
        return d_q, d_k, d_v
    d, d_v = q.shape[-1], v.shape[-1]
    q, k, v, d_out, out = (addressable(x) for x in (q, k, v, d_out, out))
    d_q, d_k, d_value = into or (rows_first(*x.shape, like=x) for x in (q, k, v))
    fixed = constants(rule, q, k, v)
    fixed["TURN"] = rotation is not None
    cos, sin = rotation or (lse, lse)  # without RoPE something to point at
    tables = cos.contiguous(), sin.contiguous(), d // 2
    rows = launch_queries((q, k, v, d_out), out, (lse, d_lse), d_q, rule, tables, fixed)
    launch_keys((q, k, v, d_out), (d_k, d_value), rows, rule, tables, fixed)
    return trimmed(d_q, d), trimmed(d_k, d), trimmed(d_value, d_v)


def trimmed(x: Tensor, width: int) -> Tensor:
    """`x`, rows first, without the columns that `addressable` added."""
    part = x[..., :width]
    return x if part.shape == x.shape else rows_first(*part.shape, like=x).copy_(part)


def row_statistics(
    out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None, n_padded: int
) -> tuple[Tensor, Tensor]:
    """(rowsum(O ∘ dO) - dL, logsumexp in base 2), each (batch, n_heads, n_padded) float32, for the Hopper backward."""
    from groundup.kernels.flash_triton_backward import delta_kernel

    batch, heads, n_q, d_v = out.shape
    out, d_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, d_out))
    delta, lse2 = (lse.new_empty(batch, heads, n_padded) for _ in range(2))
    block = 16 if out.device.type == "cpu" else 64
    launch(out, delta_kernel, -(-n_padded // block) * batch * heads,
        out, d_out, lse, lse if d_lse is None else d_lse.contiguous(), delta, lse2, n_q, n_padded, heads,
        *out.stride()[:3], *d_out.stride()[:3], d_v,
        BLOCK=block, WIDTH=block_width(d_v), HAS_D_LSE=d_lse is not None,
    )  # fmt: skip
    return delta, lse2


def launch_keys(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], rule: Rule,
    tables: tuple[Tensor, Tensor, int], fixed: dict,
) -> None:  # fmt: skip
    """dK and dV into `outputs`."""
    from groundup.kernels.flash_triton_backward import keys_kernel

    (q, k, v, d_out), (d_k, d_v) = inputs, outputs
    (batch, heads, n_k, d), n_q = k.shape, q.shape[2]
    tile = pick_tile("keys", q.dtype, max(fixed["D"], fixed["D_V"]), q.device)
    even = n_q % tile.block_q == 0
    square = rule.causal and not rule.window and rule.intervals is None
    square = square and n_q == n_k and n_q % tile.block_k == 0 and tile.block_k % tile.block_q == 0
    bytes_a_head = n_q * (d + v.shape[-1]) * q.itemsize * fixed["GROUP"]
    lo, hi = (rows[0], rows[0]) if rule.intervals is None else rule.intervals[1].unbind()
    launch(q, keys_kernel, -(-n_k // tile.block_k) * batch * heads,
        describe(q, tile.block_q, fixed["D"]),
        describe(k, tile.block_k, fixed["D"]),
        describe(v, tile.block_k, fixed["D_V"]),
        describe(d_out, tile.block_q, fixed["D_V"]),
        describe(d_k, tile.block_k, fixed["D"]),
        describe(d_v, tile.block_k, fixed["D_V"]),
        *rows, lo, hi, *tables, *score_factors(rule), rule.scale, n_q, n_k, heads,
        heads_a_group(batch * heads, bytes_a_head, L2_BYTES_BACKWARD),
        **fixed, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, EVEN=even, SQUARE=square and even,
        **tile.options(),
    )  # fmt: skip


def launch_queries(
    inputs: tuple[Tensor, ...], out: Tensor, lses: tuple[Tensor, Tensor | None], d_q: Tensor, rule: Rule,
    tables: tuple[Tensor, Tensor, int], fixed: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dQ into `d_q`; `lses` are the logsumexp and its gradient. Returns what launch_keys needs of each row."""
    from groundup.kernels.flash_triton_backward import queries_kernel

    q, k, v, d_out = inputs
    (batch, heads, n_q, d), n_k = q.shape, k.shape[2]
    tile = pick_tile("queries", q.dtype, max(fixed["D"], fixed["D_V"]), q.device)
    bytes_a_head = n_k * (d + v.shape[-1]) * q.itemsize // fixed["GROUP"]
    lse, d_lse = lses
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    lo, hi = (lse, lse) if rule.intervals is None else rule.intervals[0].unbind()
    launch(q, queries_kernel, -(-n_q // tile.block_q) * batch * heads,
        describe(q, tile.block_q, fixed["D"]),
        describe(k, tile.block_k, fixed["D"]),
        describe(v, tile.block_k, fixed["D_V"]),
        describe(d_out, tile.block_q, fixed["D_V"]),
        describe(out, tile.block_q, fixed["D_V"]),
        describe(d_q, tile.block_q, fixed["D"]),
        lse, lse if d_lse is None else d_lse.contiguous(), lse2, delta, lo, hi,
        *tables, *score_factors(rule), rule.scale, n_q, n_k, heads,
        heads_a_group(batch * heads, bytes_a_head, L2_BYTES_BACKWARD),
        **fixed, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, EVEN=n_k % tile.block_k == 0, HAS_D_LSE=d_lse is not None,
        **tile.options(),
    )  # fmt: skip
    return lse2, delta


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False)` on (batch, n, d): the course's form of the operator.

    Saves q, k, v, the output and the natural logsumexp (batch, n_q).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        ctx.rule = Rule(is_causal, 0, 0.0, q.shape[-1] ** -0.5)
        out, lse = attention_forward(q[:, None], k[:, None], v[:, None], ctx.rule)
        ctx.save_for_backward(q, k, v, out[:, 0], lse[:, 0])
        return out[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("FlashAttention", "use eager attention for a gradient of gradients")
        (d_out,) = grads
        q, k, v, out, lse = (x[:, None] for x in ctx.saved_tensors)
        return *(g[:, 0] for g in attention_backward(d_out[:, None], None, q, k, v, out, lse, ctx.rule)), None
