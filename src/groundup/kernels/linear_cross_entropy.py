"""Output head and cross entropy in one operator that never holds all logits.

Tokens are taken in chunks. A chunk's logits X Wᵀ become, in place, their own gradient softmax - onehot, which is used
at once: dX = dlogits · W and dW += dlogitsᵀ · X. So the gradients are made in the forward pass and the backward only
scales them. Cost: 6·N·V·D FLOPs, as without chunks, plus three passes over the logits; memory beyond both gradients:
one chunk of logits, and dW in float32 while it is summed (over chunks a bf16 sum loses what is smaller than 1/256 of
it).

Rejected: recomputing the logits in the backward (8·N·V·D FLOPs), skipping small gradients (Wijmans et al. 2024; faster,
not exact), reading the number of valid tokens on the host (a synchronisation a step).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groundup.kernels.attention import autocast
from groundup.kernels.backend import (
    FLOAT32_PRODUCT,
    at_least_float32,
    choose,
    fit,
    launch,
    refuse_second_derivative,
    wide_type,
)

IGNORE = -100
"""A target with this value counts neither in the loss nor in the number of valid tokens."""
CHUNK_BYTES = 126 << 20
"""Least memory for a chunk's logits; see chunk_rows."""
LOSS_BLOCK, LOSS_WARPS = 16384, 32
"""Columns and warps of a program of the loss kernel: few rows at a time, so that a row's second pass finds it in L2. On
an H200 0.065 ms a thousand rows of 50,304, against 0.079 with 4096 columns by 8 warps."""
ALIGNED = 64
"""A vocabulary that is no multiple of 16 is padded to a multiple of this: rows of logits that do not start on 16 bytes
make the matrix products several times slower (GPT-2's 50,257 tokens: 53 ms of a step that took 64 without)."""


def linear_cross_entropy(
    x: Float[Tensor, "... d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, "..."],
    n_valid: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, ""]:
    """Σ (-log softmax(x Wᵀ)[target] + z_loss · logsumexp²) / n_valid, float32.

    n_valid None: the number of targets that are not -100, at least 1; given, the count over the whole global batch.
    `softcap`: logits become softcap · tanh(logit / softcap), 0 for none. `backend`: auto, triton or torch. All targets
    ignored: loss 0 and zero gradients. Any other target outside [0, vocab): loss and gradients NaN, for to look costs
    a synchronisation. Raises UserError when shapes do not fit.
    """
    ok = x.shape[:-1] == targets.shape and weight.ndim == 2 and weight.shape[1] == x.shape[-1]
    fit(ok, "linear_cross_entropy", x=x, weight=weight, targets=targets)
    (x,) = autocast(x)
    flat, labels = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    count = (labels != IGNORE).sum().clamp(min=1) if n_valid is None else given_count(n_valid, torch.float32, x.device)
    grads = torch.is_grad_enabled()
    flags = (grads and x.requires_grad, grads and weight.requires_grad, choose(backend, x) == "triton")
    return forward_op(flat, weight, labels, count.float(), z_loss, softcap, *flags)[0]


def given_count(n_valid: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`n_valid` as a scalar on `device`; a tensor of another type stays what it is.

    Not a number: by one a GPU divides through a product with its reciprocal, which differs in the last bit. Filled on
    the device: a copy from the host would wait for all that is queued there.
    """
    return n_valid.to(device) if isinstance(n_valid, Tensor) else torch.full((), n_valid, dtype=dtype, device=device)


def chunk_rows(n_tokens: int, vocab: int, width: int, item: int, weight_item: int) -> int:
    """Tokens in a chunk: a multiple of 16 whose logits fit the budget.

    Each chunk reads and writes dW once, so the budget is at least 0.215 of dW in float32. It is a quarter of all logits
    where the weight is float32 (4 bytes an item): dW in float32 then is the gradient, and nothing else is held. With a
    narrower weight it is an eighth from 32,768 tokens on, beside whose activations that is little. At most 1 GiB.
    """
    parts = 4 if weight_item >= 4 else 8 if n_tokens >= 1 << 15 else 0
    share = n_tokens * vocab * item // parts if parts else 0
    budget = max(CHUNK_BYTES, vocab * width * 4 * 55 // 256, min(share, 1 << 30))
    return min(n_tokens, max(128, budget // (vocab * item) // 16 * 16))


def opening_rows(n_tokens: int, columns: int, width: int, item: int, rows: int) -> int:
    """Tokens of `opening`, for chunks of `rows` after it: 0 where it gains nothing.

    Their logits take the memory of dW, but for the last of its pieces, which with dX in float32 takes what later a
    chunk's logits take.
    """
    piece = piece_columns(columns)
    last = (columns - 1) % piece + 1
    most = min(width * 4 // item * last // piece, rows * columns * item // (last * item + width * 4)) // 128 * 128
    return most if most >= 2 * rows and n_tokens >= most and columns > piece else 0


def piece_columns(columns: int) -> int:
    """Columns of a piece of `opening`: all of about the same width, at most LOSS_BLOCK, which starts on 16 columns."""
    n = -(-columns // LOSS_BLOCK)
    return -(-columns // (16 * n)) * 16


def losses_and_gradients(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, "rows"], z_loss: float, softcap: float
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows vocab"]]:
    """Loss of each row, and d loss / d logits, in float32 at least: the plain truth of the Triton kernel."""
    wide = at_least_float32(logits)
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    valid = (targets >= 0) & (targets < wide.shape[1])
    index = targets.masked_fill(~valid, 0).long()[:, None]
    # Neither a token nor IGNORE: no number is right.
    missing = wide.new_zeros(len(targets)).masked_fill(targets != IGNORE, float("nan"))
    lse = torch.logsumexp(wide, -1)
    losses = torch.where(valid, lse - wide.gather(1, index).squeeze(1) + z_loss * lse * lse, missing)
    gradient = torch.softmax(wide, -1) * (1 + 2 * z_loss * lse)[:, None]
    # The 1 is taken off before rounding: in bf16, p - 1 of a p that was rounded first loses small gradients.
    gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=wide.dtype))
    if softcap:
        gradient = gradient * (1 - (wide / softcap).square())
    return losses, torch.where(valid[:, None], gradient, missing[:, None])


def rows_in_place(
    logits: Tensor, targets: Tensor, losses: Tensor, n_valid: Tensor, z_loss: float, softcap: float, grads: bool,
    vocab: int, pieces: tuple[Tensor, int, int] | None = None,
) -> None:  # fmt: skip
    """Write each row's loss into `losses` and, with `grads`, its gradient over `logits`, in one Triton launch.

    `pieces`: the logits are those of `opening`, from its first piece on: (last piece, number of columns, elements
    between the places of two neighbouring columns' pieces). Columns from `vocab` on are padding: they take no
    probability, and their gradient is 0. Gradients come divided by `n_valid` where `divides_early` says so.
    """
    from groundup.kernels.linear_cross_entropy_triton import loss_kernel

    last, columns, apart = pieces or (logits, logits.shape[1], 0)
    block = min(LOSS_BLOCK, max(16, 1 << (columns - 1).bit_length()))
    launch(logits, loss_kernel, len(targets),
        logits, last, targets, losses, n_valid, z_loss, softcap, apart, logits.shape[1] if pieces else block,
        columns, vocab, BLOCK=block, PIECES=pieces is not None, PADDED=vocab < columns, SOFTCAP=softcap > 0,
        GRADS=grads, DIVIDE=divides_early(logits.dtype), num_warps=min(LOSS_WARPS, max(1, block // 256)),
    )  # fmt: skip


def with_padding(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, with rows of zeros behind it where its number of rows needs them (see ALIGNED)."""
    vocab, width = weight.shape
    if vocab % 16 == 0:
        return weight.to(dtype)
    head = weight.new_zeros(-(-vocab // ALIGNED) * ALIGNED, width, dtype=dtype)
    head[:vocab] = weight
    return head


def divides_early(dtype: torch.dtype) -> bool:
    """Whether gradients of this type can be divided by the number of tokens before they are rounded.

    In float16 that would leave the range: there the backward divides, after the loss scale has come in.
    """
    return dtype != torch.float16


def scale_in_place(x: Tensor, factor: Tensor, triton: bool) -> None:
    """x *= factor (a scalar on the device); the kernel spends nothing where it is 1."""
    if not triton:
        # A product with a tensor of no dimension would round the factor to half precision first.
        x.copy_(at_least_float32(x) * factor) if x.dtype != wide_type(x) else x.mul_(factor)
        return
    from groundup.kernels.linear_cross_entropy_triton import scale_in_place_kernel

    launch(x, scale_in_place_kernel, -(-x.numel() // 8192), x, factor, x.numel(), BLOCK=8192, num_warps=8)


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """total ← beta · total + aᵀ b with `total` in float32 at least and a, b as they are; beta 0 does not read it."""
    if total.dtype == a.dtype:
        total.addmm_(a.T, b, beta=beta)
    elif total.is_cuda and FLOAT32_PRODUCT:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total, beta=beta)
    else:
        total.addmm_(a.T.to(total.dtype), b.to(total.dtype), beta=beta)


def places_of_pieces(
    d_weight: Float[Tensor, "columns width"], rows: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[slice]]:
    """Where the logits of `opening` lie, (rows, columns of the piece) each, and their columns.

    A piece lies where the rows of dW after its own will be, so when those are written it is used up already; only the
    last piece needs memory of its own.
    """
    columns, width = len(d_weight), piece_columns(len(d_weight))
    room = d_weight.view(dtype)
    apart, room = room.shape[1], room.flatten()
    parts = [slice(first, first + width) for first in range(0, columns, width)]
    pieces = [room[part.stop * apart :][: rows * width].view(rows, width) for part in parts[:-1]]
    pieces.append(room.new_empty(rows, columns - parts[-1].start))
    return pieces, parts


def opening(
    x: Float[Tensor, "rows width"], head: Float[Tensor, "columns width"], targets: Int[Tensor, "rows"],
    losses: Float[Tensor, "rows"], d_x: Float[Tensor, "rows width"] | None, d_weight: Float[Tensor, "columns width"],
    n_valid: Tensor, z_loss: float, softcap: float, vocab: int,
) -> None:  # fmt: skip
    """The first chunk, several times as long as the others, in the memory where dW will be."""
    rows = len(x)
    pieces, parts = places_of_pieces(d_weight, rows, x.dtype)
    for piece, part in zip(pieces, parts, strict=True):
        torch.mm(x, head[part].T, out=piece)
    described = pieces[-1], len(head), d_weight.view(x.dtype).shape[1]
    rows_in_place(pieces[0], targets, losses, n_valid, z_loss, softcap, True, vocab, described)
    wide = None if d_x is None else d_weight.new_empty(rows, x.shape[1])
    for i, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        if wide is not None:
            add_product(wide, piece.T, head[part], beta=int(i > 0))
        add_product(d_weight[part], piece, x, beta=0)
    if d_x is not None and wide is not None:
        d_x.copy_(wide)


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """`wide` (rows, columns) in a type of half the size, within its own memory: a second buffer would be the peak.

    Blocks of rows are converted in order; the narrow rows are written behind the wide ones still to be read.
    """
    if wide.dtype == dtype or wide.element_size() != 2 * dtype.itemsize or wide.numel() < 1 << 20:
        return wide.to(dtype)
    narrow = wide.view(dtype).flatten()[: wide.numel()].view(wide.shape)
    step = max(1, -(-wide.shape[0] // 16))
    for first in range(0, wide.shape[0], step):
        rows = slice(first, first + step)
        narrow[rows] = wide[rows].to(dtype)
    return narrow


def kept_type(x: Tensor, weight: Tensor) -> torch.dtype:
    """The type of dW until the backward."""
    return weight.dtype if divides_early(x.dtype) else wide_type(x)


@torch.library.custom_op("groundup::linear_cross_entropy", mutates_args=())
def forward_op(
    x: Tensor, weight: Tensor, targets: Tensor, n_valid: Tensor, z_loss: float, softcap: float,
    need_x: bool, need_weight: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, dX, dW): the gradients of Σ losses / n_valid, in the types of x and weight; empty where not needed.

    For x in float16 the gradients are those of Σ losses (see divides_early), and dW stays in float32.
    """
    (n_tokens, width), vocab = x.shape, weight.shape[0]
    head = with_padding(weight, x.dtype) if triton else weight.to(x.dtype)
    losses = x.new_zeros(n_tokens, dtype=wide_type(x))
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    d_weight = losses.new_empty(head.shape if need_weight else 0)
    if n_tokens == 0:
        d_weight.zero_()  # no chunk will write it
    rows = chunk_rows(max(1, n_tokens), vocab, width, x.itemsize, weight.itemsize)
    begun = 0
    if triton and need_weight and d_weight.dtype != x.dtype and FLOAT32_PRODUCT:
        begun = opening_rows(n_tokens, len(head), width, x.itemsize, rows)
    if begun:
        chunk = slice(begun)
        opening(x[chunk], head, targets[chunk], losses[chunk], d_x[chunk] if need_x else None, d_weight, n_valid,
                z_loss, softcap, vocab)  # fmt: skip
    for first in range(begun, n_tokens, rows):
        chunk = slice(first, first + rows)
        logits = x[chunk] @ head.T
        if triton:
            grads = need_x or need_weight
            rows_in_place(logits, targets[chunk], losses[chunk], n_valid, z_loss, softcap, grads, vocab)
        else:
            losses[chunk], gradient = losses_and_gradients(logits, targets[chunk], z_loss, softcap)
            logits = (gradient / n_valid if divides_early(x.dtype) else gradient).to(x.dtype)
        if need_x:
            torch.mm(logits, head, out=d_x[chunk])
        if need_weight:
            add_product(d_weight, logits, x[chunk], beta=int(first > 0))
        del logits
    return losses.sum() / n_valid, d_x, narrowed(d_weight[:vocab], kept_type(x, weight))


@forward_op.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, n_valid: Tensor, z_loss: float, softcap: float,
    need_x: bool, need_weight: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    loss = x.new_empty((), dtype=wide_type(x))
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    d_weight = weight.new_empty(weight.shape if need_weight else 0, dtype=kept_type(x, weight))
    return loss, d_x, d_weight


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_x, d_weight = output
    ctx.save_for_backward(d_x, d_weight, inputs[3])
    ctx.needs, ctx.triton, ctx.weight_type = inputs[6:8], inputs[8], inputs[1].dtype
    ctx.mark_non_differentiable(d_x, d_weight)
    # Else backward would be handed zeros in the place of these two outputs' gradients: as much memory once more.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Scale the saved gradients in place: at the size of a vocabulary a second copy would be the peak of the step.

    Where the graph is kept, copies are scaled: what is handed out must not change at the next backward.
    """
    refuse_second_derivative("linear_cross_entropy", "compute the logits for that")
    d_x, d_weight, n_valid = ctx.saved_tensors
    factor = d_loss if divides_early(d_x.dtype) else d_loss / n_valid
    # Being traced counts as kept: a graph has no in-place steps, and its compiler reuses dead memory by itself.
    if type(d_x) is not Tensor or torch._C._autograd._get_current_graph_task_keep_graph():
        d_x, d_weight = ((at_least_float32(d) * factor).to(d.dtype) for d in (d_x, d_weight))
    else:
        scale_in_place(d_x, factor, ctx.triton)
        scale_in_place(d_weight, factor, ctx.triton)
    return d_x if ctx.needs[0] else None, d_weight.to(ctx.weight_type) if ctx.needs[1] else None, *(None,) * 7


forward_op.register_autograd(_differentiate, setup_context=_save)
