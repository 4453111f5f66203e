"""Attention behind one function: `attention(q, k, v, backend="auto")`.

| backend | what runs |
|---|---|
| reference | the whole score matrix, in PyTorch: every feature, O(n_q · n_k) memory |
| flash-torch | FlashAttention-2 in PyTorch, tile by tile (flash_torch.py); causal or full |
| flash-triton | FlashAttention-2 in Triton, NVIDIA from Ampere on: every feature, deterministic |
| flash-hopper | the Hopper kernels where they apply, else flash-triton with a warning |
| sdpa | torch's own, as a peer; causal or full |
| auto | by device, type and shape; nothing is measured |

The fast backends are opaque operators with shape rules and gradients, so torch.compile keeps one graph. A gradient of a
gradient is refused by the operator's backward.
"""

from math import sqrt
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from groundup.errors import UserError, nearest_name
from groundup.kernels import flash_hopper, flash_triton
from groundup.kernels.backend import at_least_float32, fit, note_fallback, runs_triton
from groundup.kernels.documents import intervals
from groundup.kernels.flash_torch import flash_attention
from groundup.kernels.flash_triton import Rule, rows_first

Backend = Literal["auto", "reference", "flash-torch", "flash-triton", "flash-hopper", "sdpa"]
BACKENDS = ("auto", "reference", "flash-torch", "flash-triton", "flash-hopper", "sdpa")


def attention(
    q: Float[Tensor, "batch n_heads n_q d"],
    k: Float[Tensor, "batch n_kv_heads n_k d"],
    v: Float[Tensor, "batch n_kv_heads n_k d_v"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    documents: Int[Tensor, "batch_or_1 n"] | tuple[Tensor, Tensor] | None = None,
    backend: Backend | str = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """softmax(scale · q kᵀ) v over the keys each query may see; (batch, n_heads, n_q, d_v) in q's type.

    `causal`: the last query is aligned with the last key. `scale` None: 1 / √d. `window`: keys a query sees counting
    back from its own place, 0 for no limit. `softcap`: scores become softcap · tanh(score / softcap), 0 for none.
    `documents`: ids that do not decrease along the sequence; a query sees its own document only (a pair: those of the
    queries, those of the keys); ids of one sequence, (1, n), hold for the whole batch. `deterministic` False lets the
    Hopper backward add in any order, which is faster. `return_lse`: also the natural logsumexp (batch, n_heads, n_q)
    float32, which has a gradient. A query that sees no key gives 0 and -inf. Under autocast q, k and v go to its type.
    Raises UserError for shapes that do not fit and for a backend that cannot run here.
    """
    q, k, v = autocast(q, k, v)
    check(q, k, v, window, softcap, scale)
    pair = document_pair(documents, q, k)
    rule = Rule(causal, window, softcap, scale or 1 / sqrt(q.shape[-1]))
    bare = not (window or softcap or pair is not None)
    simple = bare and not return_lse and scale is None
    chosen = pick(backend, (q, k, v), causal, bare, simple, deterministic)
    if chosen == "flash-torch":
        return flash_attention(q, k, v, causal)
    if chosen == "sdpa":
        return sdpa(q, k, v, causal)
    if chosen == "reference":
        out, lse = reference(q, k, v, rule, pair)
    else:
        on_q, on_k = (None, None) if pair is None else intervals(*pair, causal, window)
        flags = (rule.causal, rule.window, rule.softcap, rule.scale, chosen == "flash-hopper", deterministic)
        out, lse = forward_op(q, k, v, on_q, on_k, *flags)
    return (out, lse) if return_lse else out


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's type where it is on: a norm before may have returned float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def check(q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float, scale: float | None) -> None:
    """One line for what does not fit."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise UserError(
            f"attention: q, k, v must be (batch, heads, seq, d); they have {q.ndim}, {k.ndim}, {v.ndim} dims"
        )
    same = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    fit(same, "attention", q=q, k=k, v=v)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(f"attention: {k.shape[1]} key heads do not divide {q.shape[1]} query heads")
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must be of one type; cast them")
    if window < 0 or softcap < 0 or (scale is not None and scale <= 0):
        raise UserError(f"attention: window {window}, softcap {softcap}, scale {scale} must not be negative")


def document_pair(
    documents: Tensor | tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The ids of the queries and of the keys, each for every sequence of the batch: the kernels read them all."""
    if documents is None:
        return None
    on_q, on_k = (documents, documents) if isinstance(documents, Tensor) else documents
    batch = q.shape[0]
    ok = all(
        ids.ndim == 2 and ids.shape[0] in (1, batch) and ids.shape[1] == x.shape[2] for ids, x in ((on_q, q), (on_k, k))
    )
    fit(ok, "attention: documents (batch, n)", q=q, k=k, documents_of_q=on_q, documents_of_k=on_k)
    return on_q.expand(batch, -1), on_k.expand(batch, -1)


def pick(backend: str, qkv: tuple[Tensor, ...], causal: bool, bare: bool, simple: bool, deterministic: bool) -> str:
    """The backend that runs. `bare`: no window, softcap or documents; `simple`: nor a scale or a logsumexp."""
    if backend not in BACKENDS:
        raise UserError(f'attention backend "{backend}" does not exist{nearest_name(backend, BACKENDS)}')
    q, k, v = qkv
    fits = max(q.shape[-1], v.shape[-1]) <= 256 and q.dtype != torch.float64
    obstacle = flash_triton.device_obstacle(q.device.index or 0) if q.is_cuda and runs_triton(q) else ""
    if backend == "auto" and not (q.is_cuda and fits and runs_triton(q) and not obstacle):
        return "reference"
    if backend in ("flash-torch", "sdpa") and not simple:
        note_fallback(f"attention backend {backend}", "knows causal and full only; using reference")
        return "reference"
    if backend in ("flash-triton", "flash-hopper"):
        if not runs_triton(q):
            raise UserError(f'attention backend "{backend}" needs a GPU and Triton; q is on {q.device}: use "auto"')
        if obstacle or not fits:
            why = obstacle or f"no kernel for width {q.shape[-1]} {q.dtype}"
            note_fallback(f"attention backend {backend}", f"{why}; using reference")
            return "reference"
    if backend in ("auto", "flash-hopper"):
        obstacle = flash_hopper.obstacle(q, k, v, causal, bare)
        if obstacle and backend == "flash-hopper":
            note_fallback(flash_hopper.ME, f"{obstacle}; using flash-triton")
        elif backend == "flash-hopper":
            flash_hopper.note_plain_passes(q, k, deterministic)
        return "flash-triton" if obstacle else "flash-hopper"
    return backend


def reference(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, documents: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Every feature with the whole score matrix, softmax in float32 at least."""
    n_k, group = k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    scores = at_least_float32((q * rule.scale) @ k.transpose(-1, -2))
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    # Without documents all is one.
    q_ids, k_ids = documents or (torch.zeros(1, x.shape[2], dtype=torch.int64, device=x.device) for x in (q, k))
    (lo, hi), _ = intervals(q_ids, k_ids, rule.causal, rule.window)
    j = torch.arange(n_k, device=q.device)
    hidden = ((j < lo[..., None]) | (j >= hi[..., None]))[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    empty = hidden.all(-1, keepdim=True)
    # softmax of nothing but -inf is NaN, and so is its gradient: an empty row is computed on zeros and set to 0.
    safe = scores.masked_fill(empty, 0.0)
    weights = torch.softmax(safe, -1).masked_fill(empty, 0.0).to(v.dtype)
    lse = torch.logsumexp(safe, -1).masked_fill(empty.squeeze(-1), float("-inf"))
    return weights @ v, lse


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention. Its own `is_causal` aligns the first query with the first key, ours the last with the last."""
    n_q, n_k = q.shape[2], k.shape[2]
    mask = None
    if causal and n_q != n_k:
        mask = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(n_k - n_q)
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal and n_q == n_k, enable_gqa=grouped)


@torch.library.custom_op("groundup::attention_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, on_q: Tensor | None, on_k: Tensor | None,
    causal: bool, window: int, softcap: float, scale: float, hopper: bool, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and logsumexp; on_q and on_k are the document intervals."""
    rule = Rule(causal, window, softcap, scale, None if on_q is None or on_k is None else (on_q, on_k))
    kernels = flash_hopper if hopper and flash_hopper.pays(flash_hopper.FORWARD_FROM, q, k) else flash_triton
    return kernels.attention_forward(q, k, v, rule)


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, n_q, _ = q.shape
    return rows_first(batch, heads, n_q, v.shape[-1], q), q.new_empty(batch, heads, n_q, dtype=torch.float32)


@torch.library.custom_op("groundup::attention_backward", mutates_args=())
def backward_op(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    on_q: Tensor | None, on_k: Tensor | None,
    causal: bool, window: int, softcap: float, scale: float, hopper: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    rule = Rule(causal, window, softcap, scale, None if on_q is None or on_k is None else (on_q, on_k))
    fast = hopper and not deterministic and flash_hopper.pays(flash_hopper.BACKWARD_FROM, q, k)
    kernels = flash_hopper if fast else flash_triton
    return kernels.attention_backward(d_out, d_lse, q, k, v, out, lse, rule)


@backward_op.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(rows_first(*x.shape, like=x) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, on_q, on_k, *ctx.flags = inputs
    ctx.save_for_backward(q, k, v, *output, on_q, on_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, on_q, on_k = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    grads = backward_op(d_out.to(q.dtype), d_lse, q, k, v, out, lse, on_q, on_k, *ctx.flags)
    return *grads, *(None,) * 8


forward_op.register_autograd(_differentiate, setup_context=_save)
