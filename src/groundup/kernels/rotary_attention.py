"""Causal self-attention of one projection: q, k and v side by side, q and k turned by RoPE, then attention.

Why one operator: the gradients of q, k and v belong side by side again, for one matrix product. Here the backward
writes them there, turned back (by the plain kernels as they store them); as operators of their own they would be copied
together first (3 reads and 3 writes a layer), and the compiler's RoPE takes two launches each way. A projection that
the caller gives away (`give`) is turned in place forward: 2 reads and 2 writes. Any other is copied as it is turned, v
moves along, and what is kept is one tensor either way.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.errors import UserError
from groundup.kernels import flash_hopper, flash_triton
from groundup.kernels.attention import attention, autocast, check, pick
from groundup.kernels.backend import fit
from groundup.kernels.elementwise import rope, turn_into
from groundup.kernels.flash_triton import Rule, rows_first
from groundup.kernels.linear import linear, turned_linear


def projected_attention(
    x: Float[Tensor, "batch seq d_in"],
    weight: Float[Tensor, "heads_d d_in"],
    rotation: tuple[Tensor, Tensor] | None,
    n_heads: int,
    d_head: int,
    **options: Any,
) -> Float[Tensor, "batch seq n_heads d"]:
    """rotary_attention of x Wᵀ, RoPE in the product's kernel where there is one; `options` are rotary_attention's."""
    kernels = options.get("backend", "auto") in ("auto", "flash-triton", "flash-hopper")
    if rotation is not None and kernels:
        n_turned = (len(weight) // d_head + n_heads) // 2 * d_head
        qkv = turned_linear(x, weight, rotation, n_turned)
        if qkv is not None:
            return rotary_attention(qkv.unflatten(-1, (-1, d_head)), rotation, n_heads, **options, turned=True)
    qkv = linear(x, weight).unflatten(-1, (-1, d_head))
    return rotary_attention(qkv, rotation, n_heads, **options, give=True)


def rotary_attention(
    qkv: Float[Tensor, "batch seq heads d"],
    rotation: tuple[Tensor, Tensor] | None,
    n_heads: int,
    *,
    softcap: float = 0.0,
    backend: str = "auto",
    deterministic: bool = True,
    give: bool = False,
    turned: bool = False,
) -> Float[Tensor, "batch seq n_heads d"]:
    """Causal attention of n_heads query heads, then the key heads, then as many value heads, in qkv's type.

    `rotation`: cos and sin, each (seq, d / 2) float32; None: no RoPE. `give`: qkv may be overwritten; it must be fresh
    from a product, which keeps its inputs alone (as a checkpointing policy that saves products does not). `turned`: q
    and k come turned (turned_linear), for the kernels alone; the gradient is that of before. The rest is attention()'s.
    Raises UserError when shapes do not fit.
    """
    (qkv,) = autocast(qkv)
    cos, sin = rotation or (None, None)
    table = (qkv.shape[1], qkv.shape[-1] // 2)
    ok = cos is None or sin is None or (cos.shape == sin.shape == table and qkv.shape[-1] % 2 == 0)
    fit(ok, "rotary_attention", qkv=qkv, cos=cos, sin=sin)
    left = qkv.shape[2] - n_heads
    if left <= 0 or left % 2:
        raise UserError(f"rotary_attention: {left} heads behind {n_heads} query heads are not as many keys as values")
    q, k, v = parts(qkv, n_heads)
    check(q, k, v, 0, softcap, None)
    chosen = pick(backend, (q, k, v), True, not softcap, not softcap, deterministic)
    # A head's row must start on 16 bytes, or the gradients could not be written where they belong.
    if chosen in ("flash-triton", "flash-hopper") and q.shape[-1] * q.itemsize % 16 == 0 and qkv.numel():
        if give and cos is not None and qkv.stride(-1) == 1:
            turn_op(qkv.detach(), cos, sin, n_heads)  # autograd's mind is on forward_op alone, which knows of it
            turned = True
        flags = (softcap, chosen == "flash-hopper", deterministic, turned)
        return forward_op(qkv, cos, sin, n_heads, *flags)[0].transpose(1, 2)
    assert not turned, "turned_linear is for devices that have the kernels"
    if cos is not None and sin is not None:
        q, k = rope(q, k, cos, sin)
    return attention(q, k, v, softcap=softcap, backend=backend, deterministic=deterministic).transpose(1, 2)


def parts(qkv: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q (batch, n_heads, seq, d), k and v."""
    kv_heads = (qkv.shape[2] - n_heads) // 2
    q, k, v = qkv.transpose(1, 2).split([n_heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def rule_of(qkv: Tensor, softcap: float) -> Rule:
    return Rule(True, 0, softcap, qkv.shape[-1] ** -0.5)


@torch.library.custom_op("groundup::turn_", mutates_args=("qkv",))
def turn_op(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int) -> None:
    """Turn the q and k of a projection in place."""
    pair = parts(qkv, n_heads)[:2]
    turn_into(pair, pair, cos, sin, back=False)


@torch.library.custom_op("groundup::rotary_attention", mutates_args=())
def forward_op(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, n_heads: int, softcap: float, hopper: bool,
    deterministic: bool, given: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (batch, n_heads, seq, d), logsumexp, and qkv with q and k turned (empty without RoPE).

    `given`: qkv has been turned already. The gradient is that of the projection before it was turned.
    """
    turned = qkv.new_empty(0)
    q, k, v = parts(qkv, n_heads)
    if cos is not None and sin is not None and not given:
        qkv = qkv.contiguous()
        turned = torch.empty_like(qkv)
        before, (q, k, v) = parts(qkv, n_heads), parts(turned, n_heads)
        turn_into(before[:2], (q, k), cos, sin, back=False, values=True)
    kernels = flash_hopper if hopper and flash_hopper.pays(flash_hopper.FORWARD_FROM, q, k) else flash_triton
    return *kernels.attention_forward(q, k, v, rule_of(qkv, softcap)), turned


@forward_op.register_fake
def _(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, n_heads: int, softcap: float, hopper: bool,
    deterministic: bool, given: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, seq, _, d = qkv.shape
    turned = qkv.new_empty(0 if cos is None or given else qkv.shape)
    return rows_first(batch, n_heads, seq, d, qkv), qkv.new_empty(batch, n_heads, seq, dtype=torch.float32), turned


@torch.library.custom_op("groundup::rotary_attention_backward", mutates_args=())
def backward_op(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cos: Tensor | None, sin: Tensor | None, n_heads: int,
    softcap: float, hopper: bool, deterministic: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the projection; `qkv` is what attention saw."""
    grad = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    (q, k, v), (d_q, d_k, d_v) = parts(qkv, n_heads), parts(grad, n_heads)
    rule = rule_of(qkv, softcap)
    rotation = None if cos is None or sin is None else (cos, sin)
    if not hopper or deterministic or not flash_hopper.pays(flash_hopper.BACKWARD_FROM, q, k):
        flash_triton.attention_backward(d_out, None, q, k, v, out, lse, rule, (d_q, d_k, d_v), rotation)
        return grad
    sums = flash_hopper.query_sums(d_out, None, q, k, v, out, lse, rule, (d_k, d_v))
    if rotation is not None:
        turn_into((sums, d_k), (d_q, d_k), *rotation, back=True, factor=rule.scale)
    else:
        torch.mul(sums, rule.scale, out=d_q)
    return grad


@backward_op.register_fake
def _(d_out: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, cos, sin, *ctx.flags, given = inputs
    out, lse, turned = output
    ctx.save_for_backward(qkv if cos is None or given else turned, out, lse, cos, sin)
    ctx.mark_non_differentiable(lse, turned)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    qkv, out, lse, cos, sin = ctx.saved_tensors
    grad = None if d_out is None else backward_op(d_out.to(qkv.dtype), qkv, out, lse, cos, sin, *ctx.flags)
    return grad, *(None,) * 7


forward_op.register_autograd(_differentiate, setup_context=_save)
