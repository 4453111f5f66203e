"""The Hopper path: when it applies, the proof at first use, and the launches of its two kernels.

bf16 and fp16, d 64 or 128, causal or full, any lengths, grouped heads. The kernels are written in Gluon against private
parts of Triton 3.6, so they run with that version only, and only after a small problem on this device came out right;
for all else attention.py takes the plain Triton path and says so.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from groundup.kernels.backend import agree, decided_once, launch, n_multiprocessors, note_fallback, proven
from groundup.kernels.flash_triton import (
    L2_BYTES_BACKWARD,
    L2_BYTES_FORWARD,
    LOG2E,
    Rule,
    addressable,
    heads_a_group,
    row_statistics,
    rows_first,
)

TRITON = "3.6."
ME = "attention backend flash-hopper"
FORWARD = {
    64: {"CONSUMERS": 3, "BLOCK_K": 128, "STAGES": 3, "PIPELINED": False, "REGISTERS": 160, "PRODUCER_REGISTERS": 32},
    128: {"CONSUMERS": 2, "BLOCK_K": 128, "STAGES": 2, "PIPELINED": True, "REGISTERS": 240, "PRODUCER_REGISTERS": 24},
}
BACKWARD = {
    64: {"TILES": 2, "STAGES": 2, "REGISTERS": 240, "PRODUCER_REGISTERS": 24},
    128: {"TILES": 1, "STAGES": 2, "REGISTERS": 240, "PRODUCER_REGISTERS": 24},
}
"""d → compile-time arguments, the best of those measured on an H200."""
FORWARD_FROM = {64: 2048, 128: 0}
BACKWARD_FROM = {64: 2048, 128: 2048}
"""d → keys from which these kernels are faster than the plain ones. At 1,024 keys, TFLOP/s on an H200: forward d 64 261
against 297, d 128 390 against 298; backward d 64 241 against 273, d 128 278 against 307."""


@decided_once
def device_obstacle(index: int) -> str:
    """Why GPU `index` or the installed Triton cannot run these kernels; empty: they can. Reading a package's version
    takes half a millisecond."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    if not installed.startswith(TRITON):
        return f"it is written for Triton {TRITON}x and {installed} is installed"
    if torch.cuda.get_device_capability(index)[0] != 9:
        return "the GPU is not of the Hopper generation"
    return ""


def obstacle(q: Tensor, k: Tensor, v: Tensor, causal: bool, plain: bool) -> str:
    """Why the Hopper path cannot take this call; empty: it can. `plain`: no window, softcap or documents."""
    d = q.shape[-1]
    if not q.is_cuda:
        return f"q is on {q.device}"
    if not plain:
        return "window, softcap and documents are the plain path's"
    if q.numel() == 0 or k.numel() == 0:
        return "nothing to attend to"
    if q.dtype not in (torch.bfloat16, torch.float16) or d != v.shape[-1] or d not in FORWARD:
        return f"d {d}, d_v {v.shape[-1]}, {q.dtype} is not bf16 or fp16 with d = d_v = 64 or 128"
    if q.shape[2] < 64 or (causal and q.shape[2] > k.shape[2]):
        return f"{q.shape[2]} queries over {k.shape[2]} keys"
    if q.shape[0] * q.shape[1] * (q.shape[2] + 128) >= 1 << 31:
        return "more than 2**31 rows: coordinates of the copy engine are 32-bit"
    return device_obstacle(q.device.index or 0)


def note_plain_passes(q: Tensor, k: Tensor, deterministic: bool) -> None:
    """Say, where these kernels were asked for by name, which pass of a call they can take is flash-triton's."""
    d, n_k = q.shape[-1], k.shape[2]
    if n_k < FORWARD_FROM[d]:
        note_fallback(
            ME, f"the forward of fewer than {FORWARD_FROM[d]} keys of d {d} is flash-triton's, which is faster"
        )
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
        return
    if deterministic:
        note_fallback(ME, "a deterministic backward is flash-triton's; deterministic=False takes the Hopper one")
    elif n_k < BACKWARD_FROM[d]:
        note_fallback(
            ME, f"the backward of fewer than {BACKWARD_FROM[d]} keys of d {d} is flash-triton's, which is faster"
        )


def pays(keys_from: dict[int, int], q: Tensor, k: Tensor) -> bool:
    """Whether the forward (FORWARD_FROM) or backward (BACKWARD_FROM) here is the faster one, and right on this device.

    The check for q's type and width runs at first use. A CUDA graph that is captured before keeps the plain path.
    """
    if k.shape[2] < keys_from[q.shape[-1]]:
        return False
    key = (q.device, q.dtype, q.shape[-1])
    return proven(_proof, key, f"{ME} for d {q.shape[-1]}", "flash-triton", lambda: prove(*key))


_proof: dict[tuple[torch.device, torch.dtype, int], bool] = {}


def prove(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Compare forward and backward with the plain path on (1, 2 over 1 heads, 300 and 320 rows)."""
    from groundup.kernels import flash_triton

    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, 2, 300, d), (1, 1, 320, d), (1, 1, 320, d), (1, 2, 300, d)]
    q, k, v, d_out = (torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes)
    for causal in (True, False):
        rule = Rule(causal, 0, 0.0, d**-0.5)
        out, lse = attention_forward(q, k, v, rule)
        ours = [out, lse, *attention_backward(d_out, None, q, k, v, out, lse, rule)]
        out, lse = flash_triton.attention_forward(q, k, v, rule)
        theirs = [out, lse, *flash_triton.attention_backward(d_out, None, q, k, v, out, lse, rule)]
        if not all(map(agree, ours, theirs)):
            return False
    return True


def describe(x: Tensor, block: list[int]) -> Any:
    """A descriptor of tiles `block`; a dimension of size 1 gets a stride the hardware accepts."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [s if n > 1 else 16 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, shared_layout(x.dtype, *block))


@cache
def shared_layout(dtype: torch.dtype, *block: int) -> Any:
    """How a tile lies in shared memory; what has one dimension is float32."""
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp, as flash_triton.attention_forward."""
    from groundup.kernels.flash_hopper_forward import forward_kernel

    (batch, heads, n_q, d), n_k, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    q, k, v = addressable(q), addressable(k), addressable(v)
    out, lse = rows_first(batch, heads, n_q, d, q), q.new_empty(batch, heads, n_q, dtype=torch.float32)
    fixed = FORWARD[d]
    block_k = fixed["BLOCK_K"]
    n_draws = -(-n_q // (64 * fixed["CONSUMERS"])) * batch * heads
    bytes_a_head = n_k * 2 * d * q.itemsize // group
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch(q, forward_kernel, min(n_draws, n_multiprocessors(q.device)),
        describe(q, [1, 1, 64, d]), describe(k, [1, 1, block_k, d]), describe(v, [1, 1, block_k, d]),
        out, lse, counter, rule.scale * LOG2E, n_q, n_k, heads, n_draws,
        heads_a_group(batch * heads, bytes_a_head, L2_BYTES_FORWARD), *out.stride()[:3],
        GROUP=group, D=d, CAUSAL=rule.causal, EVEN=n_k % block_k == 0, **fixed, num_warps=4,
    )  # fmt: skip
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; dQ is summed in an order that is not fixed."""
    d_k, d_v = rows_first(*k.shape, like=k), rows_first(*v.shape, like=v)
    d_q = query_sums(d_out, d_lse, q, k, v, out, lse, rule, (d_k, d_v))
    return scaled(d_q, rule.scale, q.dtype), d_k, d_v


def query_sums(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule,
    into: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """dQ / scale in float32, in memory (batch, n_q, n_heads, d); dK and dV are written `into` tensors of one layout."""
    from groundup.kernels.flash_hopper_backward import backward_kernel

    (batch, kv_heads, n_k, d), (heads, n_q) = k.shape, q.shape[1:3]
    # Padded to whole tiles with +inf and 0: a query past the end then has no probability anywhere.
    n_padded = -(-n_q // 128) * 128
    delta, lse2 = row_statistics(out, d_out, lse, d_lse, n_padded)
    q, k, v, d_out = (addressable(x) for x in (q, k, v, d_out))
    d_q = rows_first(batch, heads, n_q, d, lse).zero_()
    d_k, d_v = into
    bytes_a_head = n_q * 2 * d * q.itemsize * (heads // kv_heads)
    launch(q, backward_kernel, -(-n_k // 128) * batch * kv_heads,
        *(describe(x, [1, 1, 64, d]) for x in (q, k, v, d_out)),
        describe(lse2.view(-1), [64]), describe(delta.view(-1), [64]), describe(d_q, [1, 1, 64, 64]),
        d_k, d_v, rule.scale, n_q, n_k, n_padded, kv_heads,
        heads_a_group(batch * kv_heads, bytes_a_head, L2_BYTES_BACKWARD), *d_k.stride()[:3],
        GROUP=heads // kv_heads, D=d, CAUSAL=rule.causal, EVEN=n_k % 128 == 0, **BACKWARD[d], num_warps=4,
    )  # fmt: skip
    return d_q


def scaled(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x · scale in `dtype`, in one pass; strides are kept."""
    from groundup.kernels.flash_triton_backward import scale_kernel

    out = torch.empty_like(x, dtype=dtype)
    launch(x, scale_kernel, -(-x.numel() // 4096), x, out, scale, x.numel(), BLOCK=4096)
    return out
