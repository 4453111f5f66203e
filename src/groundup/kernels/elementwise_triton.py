"""SwiGLU and RoPE in Triton; elementwise.py has the formulas."""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(GATE_UP, OUT, width, tiles, BLOCK: tl.constexpr):
    """BLOCK columns of one row; the row's gate stands before its up."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE_UP + row * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + (row * 2 + 1) * width + c, mask=c < width, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + c, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=c < width)


@triton.jit
def swiglu_backward_kernel(D_OUT, GATE_UP, GRAD, width, tiles, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    d_out = tl.load(D_OUT + row * width + c, mask=c < width, other=0.0).to(tl.float32)
    gate = tl.load(GATE_UP + row * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + (row * 2 + 1) * width + c, mask=c < width, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    # silu' = s + gate · s · (1 - s)
    d_gate, d_up = d_out * up * s * (1 + gate * (1 - s)), d_out * gate * s
    tl.store(GRAD + row * 2 * width + c, d_gate.to(GRAD.dtype.element_ty), mask=c < width)
    tl.store(GRAD + (row * 2 + 1) * width + c, d_up.to(GRAD.dtype.element_ty), mask=c < width)


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
    Q, K, OUT_Q, OUT_K, COS, SIN, factor, seq, heads, kv_heads, q_batch, q_head, q_row, k_batch, k_head, k_row,
    oq_batch, oq_head, oq_row, ok_batch, ok_head, ok_row, half,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """ROWS positions of one head; the heads of k follow those of q, which are multiplied by `factor` as well.

    VALUES: as many heads again follow those of k in memory; they are copied as they are.
    """
    tiles = tl.cdiv(seq, ROWS)
    flat = tl.program_id(0) // tiles
    n_heads = heads + kv_heads * (2 if VALUES else 1)
    batch = (flat // n_heads).to(tl.int64)
    head = (flat % n_heads).to(tl.int64)
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (row < seq) & (pair < half)
    turned = head < heads + kv_heads
    cos = tl.load(COS + row * half + pair, mask=inside & turned, other=1.0)
    sin = tl.load(SIN + row * half + pair, mask=inside & turned, other=0.0)
    if BACK:
        sin = -sin
    keep = (row < seq) & (tl.arange(0, 2 * BLOCK)[None, :] < 2 * half)
    # q and k may be of two types, so the branches share no names.
    if head < heads:
        q, out_q = Q + batch * q_batch + head * q_head, OUT_Q + batch * oq_batch + head * oq_head
        turn(q, out_q, row, cos * factor, sin * factor, q_row, oq_row, keep, ROWS, BLOCK)
    else:
        k, out_k = K + batch * k_batch + (head - heads) * k_head, OUT_K + batch * ok_batch + (head - heads) * ok_head
        turn(k, out_k, row, cos, sin, k_row, ok_row, keep, ROWS, BLOCK)
