"""The row kernel of linear_cross_entropy.py: loss of a row, and its gradient written over the logits."""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


@triton.jit
def capped_row(x, softcap, SOFTCAP: tl.constexpr):
    """softcap · tanh(x / softcap), as 1 - 2 / (1 + exp(2x)), which neither overflows nor needs a library."""
    if SOFTCAP:
        x = softcap * (1 - 2 / (1 + tl.exp(2 * x / softcap)))
    return x


@triton.jit
def loss_kernel(
    LOGITS, TARGETS, LOSSES, N_VALID, z_loss, softcap, vocab,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, GRADS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """One program a row: an online logsumexp over the vocabulary, then a second pass for the gradient.

    DIVIDE: gradients are divided by the scalar at N_VALID. The cap is applied before columns past the vocabulary are
    set to -inf; the other way round they would become -cap and take probability.
    """
    row = LOGITS + tl.program_id(0).to(tl.int64) * vocab
    target = tl.load(TARGETS + tl.program_id(0))
    valid = target != -100
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK):
        keep = first + column < vocab
        x = capped_row(tl.load(row + first + column, mask=keep, other=0.0).to(tl.float32), softcap, SOFTCAP)
        x = tl.where(keep, x, float("-inf"))
        # Each lane keeps its own maximum and sum: one reduction a row instead of one a step.
        new_largest = tl.maximum(largest, x)
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - origin) + tl.exp(x - origin)
        largest = new_largest
    top = tl.max(largest, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    lse = origin + tl.log(tl.sum(total * tl.exp(largest - origin), 0))
    at_target = tl.load(row + target, mask=valid, other=0.0).to(tl.float32)
    loss = lse - capped_row(at_target, softcap, SOFTCAP) + z_loss * lse * lse
    tl.store(LOSSES + tl.program_id(0), tl.where(valid, loss, 0.0))
    if GRADS:
        # at_target has to be read before any of the row is overwritten.
        tl.debug_barrier()
        factor = 1 + 2 * z_loss * lse
        share = 1.0
        if DIVIDE:
            share = 1.0 / tl.load(N_VALID)
        for first in tl.range(0, vocab, BLOCK):
            keep = first + column < vocab
            x = capped_row(tl.load(row + first + column, mask=keep, other=0.0).to(tl.float32), softcap, SOFTCAP)
            d = tl.exp(x - lse) * factor - tl.where(first + column == target, 1.0, 0.0)
            if SOFTCAP:
                d = d * (1 - (x / softcap) * (x / softcap))
            d = tl.where(valid, d * share, 0.0)
            tl.store(row + first + column, d.to(LOGITS.dtype.element_ty), mask=keep)


@triton.jit
def scale_in_place_kernel(X, FACTOR, n, BLOCK: tl.constexpr):
    """X *= FACTOR, element by element. A factor of 1, which is what a training step brings, moves no memory."""
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(X + i, (x * factor).to(X.dtype.element_ty), mask=i < n)
