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
def row_from(LOGITS, LAST, first, apart, piece, columns, PIECES: tl.constexpr):
    """Where this program's row goes on with column `first`; see loss_kernel on PIECES."""
    if PIECES:
        begin = LAST if first + piece >= columns else LOGITS + first * (tl.full([], 0, tl.int64) + apart)
        width = tl.minimum(piece, columns - first)
        return tl.multiple_of(begin + tl.program_id(0).to(tl.int64) * width, 16)
    return LOGITS + tl.program_id(0).to(tl.int64) * columns + first


@triton.jit
def inside(column, first, piece, columns, PIECES: tl.constexpr):
    """Whether a column, counted from `first`, is one of the piece. Only `columns` and `piece` are known to be even
    enough for wide loads."""
    there = first + column < columns
    if PIECES:
        there = there & (column < piece)
    return there


@triton.jit
def load_row(ROW, column, there, first, vocab, softcap, PADDED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits from `first` on, in float32, capped; -inf where nothing is there and past the vocabulary."""
    x = tl.load(ROW + column, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        # The cap comes before -inf: the other way round, columns past the end would be -cap and take probability.
        x = tl.where(there & (first + column < vocab), capped_row(x, softcap, SOFTCAP), float("-inf"))
    elif PADDED:
        x = tl.where(first + column < vocab, x, float("-inf"))
    return x


@triton.jit
def loss_kernel(
    LOGITS, LAST, TARGETS, LOSSES, N_VALID, z_loss, softcap, apart, piece, columns, vocab,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, PADDED: tl.constexpr, SOFTCAP: tl.constexpr, GRADS: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """One program a row: an online logsumexp over the vocabulary, then a second pass for the gradient.

    The work of an element counts as much as its bytes: eight neighbours share a running maximum, so an exponential a
    pass is all an element costs, in base 2, where scale and shift are one multiply-add; and the target's -1 is put in
    at the end. DIVIDE: gradients are divided by the scalar at N_VALID. `piece` columns are looked at together, at
    most BLOCK. PIECES: each piece is a matrix by itself, from LOGITS + its first column · apart on, but the last one at
    LAST; else all are one matrix (rows, columns).
    """
    target = tl.load(TARGETS + tl.program_id(0))
    valid = (target >= 0) & (target < vocab)
    # Neither a token nor -100: no number is right.
    missing = tl.where(target == -100, 0.0, float("nan"))
    begin = 0
    if PIECES:
        begin = tl.where(valid, target // piece * piece, 0)
    AT_TARGET = row_from(LOGITS, LAST, begin, apart, piece, columns, PIECES) + target - begin
    at_target = tl.load(AT_TARGET, mask=valid, other=0.0).to(tl.float32)
    column = tl.arange(0, BLOCK)
    LOG2E: tl.constexpr = 1.4426950408889634
    largest = tl.full([BLOCK // 8], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // 8], tl.float32)
    for first in tl.range(0, columns, piece):
        row = row_from(LOGITS, LAST, first, apart, piece, columns, PIECES)
        there = inside(column, first, piece, columns, PIECES)
        x = load_row(row, column, there, first, vocab, softcap, PADDED, SOFTCAP) * LOG2E
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
        for first in tl.range(0, columns, piece):
            row = row_from(LOGITS, LAST, first, apart, piece, columns, PIECES)
            there = inside(column, first, piece, columns, PIECES)
            x = load_row(row, column, there, first, vocab, softcap, PADDED, SOFTCAP)
            d = tl.exp2(x * LOG2E - lse2) * factor
            if SOFTCAP:
                d = tl.where(first + column < vocab, d * (1 - (x / softcap) * (x / softcap)), 0.0)
            tl.store(row + column, d.to(LOGITS.dtype.element_ty), mask=there)
        # The target's column once more, whole: p - 1 of a p that was rounded first loses small gradients.
        d = tl.exp2(capped * LOG2E - lse2) * factor - share
        if SOFTCAP:
            d = d * (1 - (capped / softcap) * (capped / softcap))
        tl.debug_barrier()
        tl.store(AT_TARGET, d.to(LOGITS.dtype.element_ty), mask=valid)


@triton.jit
def scale_in_place_kernel(X, FACTOR, n, BLOCK: tl.constexpr):
    """X *= FACTOR, element by element. A factor of 1, which is what a training step brings, moves no memory."""
    factor = tl.load(FACTOR).to(tl.float32)
    if factor != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(X + i, (x * factor).to(X.dtype.element_ty), mask=i < n)
