"""FlashAttention-2 backward in Triton: no atomics, so the same gradients every time.

Two kernels: dQ, one program a tile of queries, which has O and dO and so leaves D = rowsum(O ∘ dO) a row; then dK and
dV, one program a tile of keys. (The Hopper kernel makes both at once and takes D from a kernel of its own.) The split
computes seven matrix products where a fused kernel computes five, but a fused one must add its parts of dQ
through memory in an order nobody fixes. Measured on an H200 the split was the faster of the two in Triton as well.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
# ruff: noqa: SIM108
import triton
import triton.language as tl

from groundup.kernels.flash_triton_tiles import (
    capped,
    edges,
    keys_of,
    load_tile,
    longest_first,
    part_of,
    queries_of,
    store_tile,
    turned_back,
)


@triton.jit(do_not_specialize=["n_q", "n_padded", "n_heads"])
def delta_kernel(
    OUT, D_OUT, LSE, D_LSE, DELTA, LSE2, n_q, n_padded, n_heads, out_batch, out_head, out_row, d_batch, d_head, d_row,
    width, BLOCK: tl.constexpr, WIDTH: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(O ∘ dO) - dL, and LSE2, the logsumexp in base 2.

    Rows of the two are n_padded long; what is past n_q counts as empty. Since dL/dS = P, the logsumexp's own gradient
    enters dS = P ∘ (dP - D) as if D were smaller by it.
    """
    n_tiles = tl.cdiv(n_padded, BLOCK)
    flat = tl.program_id(0) // n_tiles
    batch = (flat // n_heads).to(tl.int64)
    head = (flat % n_heads).to(tl.int64)
    i = tl.program_id(0) % n_tiles * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    keep = (i < n_q)[:, None] & (c < width)[None, :]
    rows = i.to(tl.int64)[:, None]
    out = tl.load(OUT + batch * out_batch + head * out_head + rows * out_row + c[None, :], mask=keep, other=0.0)
    d_out = tl.load(D_OUT + batch * d_batch + head * d_head + rows * d_row + c[None, :], mask=keep, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    at = flat.to(tl.int64) * n_q + i
    if HAS_D_LSE:
        delta -= tl.load(D_LSE + at, mask=i < n_q, other=0.0)
    lse = tl.load(LSE + at, mask=i < n_q, other=float("-inf"))
    to = flat.to(tl.int64) * n_padded + i
    tl.store(DELTA + to, delta, mask=i < n_padded)
    tl.store(LSE2 + to, in_base_2(lse), mask=i < n_padded)


@triton.jit
def in_base_2(lse):
    """A natural logsumexp in base 2; +inf for an empty row, whose P then is 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def scale_kernel(X, OUT, scale, n, BLOCK: tl.constexpr):
    """OUT = X · scale in OUT's type, element by element in memory order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, (tl.load(X + i, mask=i < n, other=0.0) * scale).to(OUT.dtype.element_ty), mask=i < n)


@triton.jit
def keys_step(
    k, v, Q, D_OUT, LSE2, DELTA, at, batch, head, m, d_k, d_v, lo, hi, cap_in, factor, n_q,
    BLOCK_Q: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, MASK: tl.constexpr, TAIL: tl.constexpr,
    UPPER: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries, seen from the keys: scores are transposed so that dK and dV need no transposed P."""
    i = m + tl.arange(0, BLOCK_Q)
    q = load_tile(Q, batch, head, m, BLOCK_Q, D, UPCAST)
    d_out = load_tile(D_OUT, batch, head, m, BLOCK_Q, D_V, UPCAST)
    if TAIL:
        lse = tl.load(LSE2 + at + i, mask=i < n_q, other=float("inf"))
    else:
        lse = tl.load(LSE2 + at + i)
    s = tl.dot(k, q.T, input_precision=PRECISION)
    if SOFTCAP:
        s = capped(s, cap_in, factor)
        p = tl.math.exp2(s - lse[None, :])
    else:
        p = tl.math.exp2(s * factor - lse[None, :])
    if MASK:
        keep = i[None, :] >= lo[:, None]
        if UPPER:
            keep = keep & (i[None, :] < hi[:, None])
        p = tl.where(keep, p, 0.0)
    d_p = tl.dot(v, d_out.T, input_precision=PRECISION)
    d_v = tl.dot(p.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
    if TAIL:
        delta = tl.load(DELTA + at + i, mask=i < n_q, other=0.0)
    else:
        delta = tl.load(DELTA + at + i)
    d_s = p * (d_p - delta[None, :])
    if SOFTCAP:
        # (cap tanh(x / cap))' = 1 - tanh²
        d_s = d_s * (1 - (s / factor) * (s / factor))
    d_k = tl.dot(d_s.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=["n_q", "n_k", "n_kv_heads", "heads_a_group", "window"])
def keys_kernel(
    Q, K, V, D_OUT, D_K, D_V_OUT, LSE2, DELTA, LO, HI, COS, SIN, half, cap_in, factor, scale, n_q, n_k, n_kv_heads,
    heads_a_group, window,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr,
    SQUARE: tl.constexpr, TURN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; the GROUP query heads that share it are summed in registers, in order.

    EVEN: n_q is a multiple of BLOCK_Q. SQUARE: causal alone, n_q = n_k, a multiple of both blocks. LO, HI (batch,
    n_k): the interval of queries that see a key. TURN: K was turned by RoPE, and dK is that of K before.
    """
    tile, flat = longest_first(tl.program_id(0), tl.cdiv(n_k, BLOCK_K), heads_a_group, False)
    batch = flat // n_kv_heads
    kv_head = flat % n_kv_heads
    n = tile * BLOCK_K
    row = batch.to(tl.int64) * n_k
    lo, hi = queries_of(n + tl.arange(0, BLOCK_K), n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    lo_first, hi_first = queries_of(n, n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    lo_last, hi_last = queries_of(n + BLOCK_K - 1, n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    if SQUARE:
        # Said in constants, so that the compiler sees one masked round and gives it no pipeline of its own.
        walk = n, n + BLOCK_K, n_q, n_q
    else:
        walk = edges(lo_first, lo_last, hi_first, hi_last, BLOCK_Q)
    UPPER: tl.constexpr = WINDOW or DOCUMENTS

    k = load_tile(K, batch, kv_head, n, BLOCK_K, D, UPCAST)
    v = load_tile(V, batch, kv_head, n, BLOCK_K, D_V, UPCAST)
    d_k = tl.zeros([BLOCK_K, D], tl.float32)
    d_v = tl.zeros([BLOCK_K, D_V], tl.float32)
    # Without disable_licm the compiler moves index arithmetic out of the loops into registers it then has to spill.
    for g in tl.range(0, GROUP, disable_licm=True):
        head = kv_head * GROUP + g
        at = (batch.to(tl.int64) * n_kv_heads * GROUP + head) * n_q
        for PART in tl.static_range(3):
            if PART == 1 or (CAUSAL or DOCUMENTS if PART == 0 else UPPER or not EVEN):
                first, last = part_of(walk, PART)
                for m in tl.range(first, last, BLOCK_Q, disable_licm=True):
                    d_k, d_v = keys_step(
                        k, v, Q, D_OUT, LSE2, DELTA, at, batch, head, m, d_k, d_v, lo, hi, cap_in, factor, n_q,
                        BLOCK_Q, D, D_V, PART != 1, PART != 1 and not EVEN, UPPER, SOFTCAP, UPCAST, PRECISION,
                    )  # fmt: skip
    store_tile(D_V_OUT, batch, kv_head, n, d_v, BLOCK_K, D_V)
    d_k = d_k * scale
    if TURN:
        d_k = turned_back(d_k, COS, SIN, n, n_k, half, BLOCK_K, D)
    store_tile(D_K, batch, kv_head, n, d_k, BLOCK_K, D)


@triton.jit
def queries_step(
    q, d_out, lse, delta, K, V, batch, head, n, d_q, lo, hi, cap_in, factor,
    BLOCK_K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, MASK: tl.constexpr, LOWER: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys, seen from the queries."""
    k = load_tile(K, batch, head, n, BLOCK_K, D, UPCAST)
    v = load_tile(V, batch, head, n, BLOCK_K, D_V, UPCAST)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    d_p = tl.dot(d_out, v.T, input_precision=PRECISION)
    if SOFTCAP:
        s = capped(s, cap_in, factor)
        p = tl.math.exp2(s - lse[:, None])
    else:
        p = tl.math.exp2(s * factor - lse[:, None])
    if MASK:
        j = n + tl.arange(0, BLOCK_K)
        keep = j[None, :] < hi[:, None]
        if LOWER:
            keep = keep & (j[None, :] >= lo[:, None])
        p = tl.where(keep, p, 0.0)
    d_s = p * (d_p - delta[:, None])
    if SOFTCAP:
        d_s = d_s * (1 - (s / factor) * (s / factor))
    return tl.dot(d_s.to(k.dtype), k, d_q, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_q", "n_k", "n_heads", "heads_a_group", "window"])
def queries_kernel(
    Q, K, V, D_OUT, OUT, D_Q, LSE, D_LSE, LSE2, DELTA, LO, HI, COS, SIN, half, cap_in, factor, scale, n_q, n_k, n_heads,
    heads_a_group, window,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr,
    TURN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """dQ, DELTA and LSE2 (see delta_kernel) of one tile of queries; arguments as in the forward kernel.

    TURN: Q was turned by RoPE, and dQ is that of Q before.
    """
    tile, flat = longest_first(tl.program_id(0), tl.cdiv(n_q, BLOCK_Q), heads_a_group, CAUSAL)
    batch = flat // n_heads
    head = flat % n_heads
    kv_head = head // GROUP
    m = tile * BLOCK_Q
    i = m + tl.arange(0, BLOCK_Q)
    row = batch.to(tl.int64) * n_q
    lo, hi = keys_of(i, n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    lo_first, hi_first = keys_of(m, n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    lo_last, hi_last = keys_of(m + BLOCK_Q - 1, n_q, n_k, window, LO, HI, row, CAUSAL, WINDOW, DOCUMENTS)
    walk = edges(lo_first, lo_last, hi_first, hi_last, BLOCK_K)
    LOWER: tl.constexpr = WINDOW or DOCUMENTS

    q = load_tile(Q, batch, head, m, BLOCK_Q, D, UPCAST)
    d_out = load_tile(D_OUT, batch, head, m, BLOCK_Q, D_V, UPCAST)
    at = flat.to(tl.int64) * n_q
    out = load_tile(OUT, batch, head, m, BLOCK_Q, D_V, False)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if HAS_D_LSE:
        delta -= tl.load(D_LSE + at + i, mask=i < n_q, other=0.0)
    lse = in_base_2(tl.load(LSE + at + i, mask=i < n_q, other=float("-inf")))
    tl.store(DELTA + at + i, delta, mask=i < n_q)
    tl.store(LSE2 + at + i, lse, mask=i < n_q)
    d_q = tl.zeros([BLOCK_Q, D], tl.float32)
    for PART in tl.static_range(3):
        if PART == 1 or (LOWER if PART == 0 else CAUSAL or DOCUMENTS or not EVEN):
            first, last = part_of(walk, PART)
            for n in tl.range(first, last, BLOCK_K):
                d_q = queries_step(
                    q, d_out, lse, delta, K, V, batch, kv_head, n, d_q, lo, hi, cap_in, factor,
                    BLOCK_K, D, D_V, PART != 1, LOWER, SOFTCAP, UPCAST, PRECISION,
                )  # fmt: skip
    d_q = d_q * scale
    if TURN:
        d_q = turned_back(d_q, COS, SIN, m, n_q, half, BLOCK_Q, D)
    store_tile(D_Q, batch, head, m, d_q, BLOCK_Q, D)
