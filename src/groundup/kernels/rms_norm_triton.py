"""RMSNorm in Triton; rms_norm.py has the formulas."""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


def block_of(width: int, x_bytes: int, weight_bytes: int, residual: bool) -> tuple[int, int, int, bool]:
    """(columns, rows a program, warps, whether forward_row_kernel takes it) of the forward, measured on an H200.

    Several rows a program where they are short. forward_row_kernel: 16 elements a thread, half precision alone.
    """
    block = max(16, 1 << (width - 1).bit_length())
    # Two rows of 1024 share one load of the weight in forward_kernel, which pays where that is wide.
    shortest = 1024 if weight_bytes == 2 else 2048
    if not residual and x_bytes == 2 and width == block and shortest <= width <= 8192:
        return block, 1, width // 512, True
    return block, max(1, 2048 // block), min(16, max(4, block // 1024)), False


def backward_block_of(width: int, bytes_a_column: int, shared: int) -> tuple[int, int, int, int, int]:
    """(columns, rows a step, warps, programs a multiprocessor, stages) of the backward, measured on an H200.

    All stages but one hold what a row loads, `bytes_a_column` wide, in the `shared` bytes that a block may use.
    """
    block = max(16, 1 << (width - 1).bit_length())
    rows, warps = max(1, 512 // block), min(32, max(4, block // 512))
    programs = 8 if block <= 1024 else max(1, 16 // warps)
    # Besides them 1 KiB for the sums over a row.
    fitting = 1 + (shared - 1024) // (rows * block * bytes_a_column)
    return block, rows, warps, programs, max(1, min(3 if block <= 16384 else 1, fitting))


@triton.jit
def forward_row_kernel(X, WEIGHT, OUT, RSTD, eps, x_stride, WIDTH: tl.constexpr):
    """A row of WIDTH columns a program, no masks. x does not stay in registers over the sum: it is read again from L1.

    So a thread needs 32 registers and a multiprocessor holds all its 64 warps, not 32 or 48: more rows are on their
    way at once. The weight is asked for after the sum for the same reason. The hints keep x in L1 for its second turn;
    as they differ, the compiler does not make one load of the two. torch.compile's kernel reads x twice as well.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = tl.load(X + row * x_stride + column, eviction_policy="evict_last").to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    x = tl.load(X + row * x_stride + column, eviction_policy="evict_first").to(tl.float32)
    weight = tl.load(WEIGHT + column, eviction_policy="evict_last").to(tl.float32)
    tl.store(OUT + row * WIDTH + column, (x * rstd * weight).to(OUT.dtype.element_ty))
    tl.store(RSTD + row, rstd)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    X, RESIDUAL_X, WEIGHT, OUT, TOTAL, RSTD, eps, n_rows, width, x_stride, residual_stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < n_rows) & (column < width)
    x = tl.load(X + row * x_stride + column, mask=keep, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(RESIDUAL_X + row * residual_stride + column, mask=keep, other=0.0).to(tl.float32)
        rounded = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + row * width + column, rounded, mask=keep)
        x = rounded.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(x * x, 1) / width + eps)
    weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)
    out = x * rstd[:, None] * weight
    tl.store(OUT + row * width + column, out.to(OUT.dtype.element_ty), mask=keep)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(RSTD + at, rstd, mask=at < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    X, D_OUT, EXTRA_GRAD, WEIGHT, RSTD, D_X, PARTS, n_rows, width, x_stride, d_stride, extra_stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EXTRA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps its part of dw in registers."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        at = (first + tl.arange(0, ROWS)).to(tl.int64)
        row = at[:, None]
        keep = (row < n_rows) & inside
        x = tl.load(X + row * x_stride + column, mask=keep, other=0.0).to(tl.float32)
        d_out = tl.load(D_OUT + row * d_stride + column, mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + at, mask=at < n_rows, other=0.0)[:, None]
        x_hat = x * rstd
        g = d_out * weight
        mean = tl.sum(g * x_hat, 1)[:, None] / width
        d_x = (g - x_hat * mean) * rstd
        if EXTRA:
            d_x += tl.load(EXTRA_GRAD + row * extra_stride + column, mask=keep, other=0.0).to(tl.float32)
        tl.store(D_X + row * width + column, d_x.to(D_X.dtype.element_ty), mask=keep)
        d_weight += d_out * x_hat
    part = tl.sum(d_weight, 0)[None, :]
    tl.store(PARTS + tl.program_id(0).to(tl.int64) * width + column, part, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def sum_kernel(PARTS, OUT, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column sums of PARTS (n_rows, width) float32 in an order that depends on the shape alone."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, n_rows, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        keep = (row < n_rows)[:, None] & (column < width)[None, :]
        total += tl.load(PARTS + row[:, None] * width + column[None, :], mask=keep, other=0.0)
    tl.store(OUT + column, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=column < width)
