"""The kernel of adamw.py."""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


@triton.jit
def tensor_at(TABLE, at, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Entry `at` of the table as a pointer. Said to be on 16 bytes, it lets the compiler move vectors."""
    pointer = tl.load(TABLE + at).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(POINTER, i, size, WHOLE: tl.constexpr):
    """Elements i in float32. A block that lies whole in its tensor has no mask, and only then are vectors moved."""
    if WHOLE:
        return tl.load(POINTER + i).to(tl.float32)
    return tl.load(POINTER + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def write(POINTER, i, size, x, WHOLE: tl.constexpr):
    """The inverse of `read`, rounded to the pointer's type."""
    if WHOLE:
        tl.store(POINTER + i, x.to(POINTER.dtype.element_ty))
    else:
        tl.store(POINTER + i, x.to(POINTER.dtype.element_ty), mask=i < size)


@triton.jit
def update(
    WEIGHT, GRADIENT, FIRST, SECOND, COPY, i, size, factor, decay, share1, share2, eps, unbias, step_size,
    COPIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 for one block."""
    gradient = read(GRADIENT, i, size, WHOLE) * factor
    first = read(FIRST, i, size, WHOLE)
    second = read(SECOND, i, size, WHOLE)
    first = first + (gradient - first) * share1
    second = second + (gradient * gradient - second) * share2
    weight = read(WEIGHT, i, size, WHOLE) * decay - step_size * first / (tl.sqrt(second) * unbias + eps)
    write(WEIGHT, i, size, weight, WHOLE)
    write(FIRST, i, size, first, WHOLE)
    write(SECOND, i, size, second, WHOLE)
    if COPIES:
        write(COPY, i, size, weight, WHOLE)


@triton.jit(do_not_specialize=["decay", "share1", "share2", "eps", "unbias", "step_size"])
def adamw_kernel(
    TABLE, OF_TENSOR, START, SIZES, SKIP, FACTOR, decay, share1, share2, eps, unbias, step_size,
    BLOCK: tl.constexpr, BF16_GRADIENTS: tl.constexpr, COPIES: tl.constexpr, ALIGNED: tl.constexpr,
    ASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows of TABLE: addresses of weight, gradient, first and second moment, copy. ASKED: nothing moves if SKIP is set.
    SCALED: gradients are multiplied by FACTOR.

    decay = 1 - lr · weight_decay, share1 = 1 - β₁ and share2 = 1 - β₂ (from the host: of a β near 1, float32 keeps too
    few digits for that), unbias = 1 / √(1 - β₂ᵗ), step_size = lr / (1 - β₁ᵗ).
    """
    tensor = tl.load(OF_TENSOR + tl.program_id(0))
    start = tl.multiple_of(tl.load(START + tl.program_id(0)), BLOCK)
    size = tl.load(SIZES + tensor)
    if ASKED:
        size = tl.where(tl.load(SKIP) != 0, 0, size)
    factor = 1.0
    if SCALED:
        factor = tl.load(FACTOR)
    i = start + tl.arange(0, BLOCK)
    row = tensor * 5
    WEIGHT = tensor_at(TABLE, row, tl.float32, ALIGNED)
    GRADIENT = tensor_at(TABLE, row + 1, tl.bfloat16 if BF16_GRADIENTS else tl.float32, ALIGNED)
    FIRST = tensor_at(TABLE, row + 2, tl.float32, ALIGNED)
    SECOND = tensor_at(TABLE, row + 3, tl.float32, ALIGNED)
    COPY = tensor_at(TABLE, row + 4, tl.bfloat16 if COPIES else tl.float32, ALIGNED)
    if start + BLOCK <= size:
        update(
            WEIGHT, GRADIENT, FIRST, SECOND, COPY, i, size, factor, decay, share1, share2, eps, unbias, step_size,
            COPIES, True,
        )  # fmt: skip
    else:
        update(
            WEIGHT, GRADIENT, FIRST, SECOND, COPY, i, size, factor, decay, share1, share2, eps, unbias, step_size,
            COPIES, False,
        )  # fmt: skip
