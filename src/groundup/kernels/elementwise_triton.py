"""SwiGLU and RoPE in Triton; elementwise.py has the formulas."""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(GATE, UP, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + i, mask=i < n, other=0.0).to(tl.float32)
    up = tl.load(UP + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(OUT + i, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=i < n)


@triton.jit
def swiglu_backward_kernel(D_OUT, GATE, UP, D_GATE, D_UP, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d_out = tl.load(D_OUT + i, mask=i < n, other=0.0).to(tl.float32)
    gate = tl.load(GATE + i, mask=i < n, other=0.0).to(tl.float32)
    up = tl.load(UP + i, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    # silu' = s + gate · s · (1 - s)
    tl.store(D_GATE + i, (d_out * up * s * (1 + gate * (1 - s))).to(D_GATE.dtype.element_ty), mask=i < n)
    tl.store(D_UP + i, (d_out * gate * s).to(D_UP.dtype.element_ty), mask=i < n)


@triton.jit
def turn(X, OUT, row, cos, sin, x_row, out_row, keep, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of pairs are read as they lie, (even, odd, even, odd, …), so that loads stay wide."""
    c = tl.arange(0, 2 * BLOCK)[None, :]
    both = tl.load(X + row * x_row + c, mask=keep, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, 2 * BLOCK])
    tl.store(OUT + row * out_row + c, out.to(OUT.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seq", "heads", "kv_heads"])
def rope_kernel(
    Q, K, OUT_Q, OUT_K, COS, SIN, seq, heads, kv_heads, q_batch, q_head, q_row, k_batch, k_head, k_row,
    oq_batch, oq_head, oq_row, ok_batch, ok_head, ok_row, half,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """ROWS positions of one head; the heads of k follow those of q."""
    tiles = tl.cdiv(seq, ROWS)
    flat = tl.program_id(0) // tiles
    batch = (flat // (heads + kv_heads)).to(tl.int64)
    head = (flat % (heads + kv_heads)).to(tl.int64)
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (row < seq) & (pair < half)
    cos = tl.load(COS + row * half + pair, mask=inside, other=0.0)
    sin = tl.load(SIN + row * half + pair, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    keep = (row < seq) & (tl.arange(0, 2 * BLOCK)[None, :] < 2 * half)
    if head < heads:
        x = Q + batch * q_batch + head * q_head
        turn(x, OUT_Q + batch * oq_batch + head * oq_head, row, cos, sin, q_row, oq_row, keep, ROWS, BLOCK)
    else:
        x = K + batch * k_batch + (head - heads) * k_head
        out = OUT_K + batch * ok_batch + (head - heads) * ok_head
        turn(x, out, row, cos, sin, k_row, ok_row, keep, ROWS, BLOCK)
