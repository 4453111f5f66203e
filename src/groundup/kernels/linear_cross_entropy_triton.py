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
def load_row(ROW, column, columns, vocab, softcap, PADDED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits in float32, capped; -inf past the vocabulary. Only `columns` is known to be even enough for wide loads."""
    x = tl.load(ROW + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        # The cap comes before -inf: the other way round, columns past the end would be -cap and take probability.
        x = tl.where(column < vocab, capped_row(x, softcap, SOFTCAP), float("-inf"))
    elif PADDED:
        x = tl.where(column < vocab, x, float("-inf"))
    return x


@triton.jit
def loss_kernel(
    LOGITS, TARGETS, LOSSES, N_VALID, z_loss, softcap, columns, vocab,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, SOFTCAP: tl.constexpr, GRADS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """One program a row: an online logsumexp over the vocabulary, then a second pass for the gradient.

    The work of an element counts as much as its bytes: eight neighbours share a running maximum, so an exponential a
    pass is all an element costs, in base 2, where scale and shift are one multiply-add; and the target's -1 is put in
    at the end. DIVIDE: gradients are divided by the scalar at N_VALID.
    """
    row = LOGITS + tl.program_id(0).to(tl.int64) * columns
    target = tl.load(TARGETS + tl.program_id(0))
    valid = (target >= 0) & (target < vocab)
    # Neither a token nor -100: no number is right.
    missing = tl.where(target == -100, 0.0, float("nan"))
    at_target = tl.load(row + target, mask=valid, other=0.0).to(tl.float32)
    column = tl.arange(0, BLOCK)
    LOG2E: tl.constexpr = 1.4426950408889634
    largest = tl.full([BLOCK // 8], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // 8], tl.float32)
    for first in tl.range(0, columns, BLOCK):
        x = load_row(row, first + column, columns, vocab, softcap, PADDED, SOFTCAP) * LOG2E
        x = tl.reshape(x, [BLOCK // 8, 8])
        new_largest = tl.maximum(largest, tl.max(x, 1))
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - origin) + tl.sum(tl.exp2(x - origin[:, None]), 1)
        largest = new_largest
    top = tl.max(largest, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    lse2 = origin + tl.log2(tl.sum(total * tl.exp2(largest - origin), 0))
    lse = lse2 / LOG2E
    capped = capped_row(at_target, softcap, SOFTCAP)
    tl.store(LOSSES + tl.program_id(0), tl.where(valid, lse - capped + z_loss * lse * lse, missing))
    if GRADS:
        # at_target has to be read before any of the row is overwritten.
        tl.debug_barrier()
        share = 1.0
        if DIVIDE:
            share = 1.0 / tl.load(N_VALID)
        share = tl.where(valid, share, missing)
        factor = (1 + 2 * z_loss * lse) * share
        for first in tl.range(0, columns, BLOCK):
            x = load_row(row, first + column, columns, vocab, softcap, PADDED, SOFTCAP)
            d = tl.exp2(x * LOG2E - lse2) * factor
            if SOFTCAP:
                d = tl.where(first + column < vocab, d * (1 - (x / softcap) * (x / softcap)), 0.0)
            tl.store(row + first + column, d.to(LOGITS.dtype.element_ty), mask=first + column < columns)
        # The target's column once more, whole: p - 1 of a p that was rounded first loses small gradients.
        d = tl.exp2(capped * LOG2E - lse2) * factor - share
        if SOFTCAP:
            d = d * (1 - (capped / softcap) * (capped / softcap))
        tl.debug_barrier()
        tl.store(row + target, d.to(LOGITS.dtype.element_ty), mask=valid)


@triton.jit
def scale_in_place_kernel(X, FACTOR, n, BLOCK: tl.constexpr):
    """X *= FACTOR, element by element. A factor of 1, which is what a training step brings, moves no memory."""
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(X + i, (x * factor).to(X.dtype.element_ty), mask=i < n)
