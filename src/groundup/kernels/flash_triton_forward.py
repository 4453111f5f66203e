"""FlashAttention-2 forward in Triton: one program a tile of queries, the keys walked in order.

Scores are kept in base 2 (scale · log2(e) folded into one factor) because the hardware's exponential is 2^x.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl

from groundup.kernels.flash_triton_tiles import capped, edges, keys_of, load_tile, longest_first, part_of, store_tile


@triton.jit
def forward_step(
    q, K, V, batch, head, n, largest, total, acc, lo, hi, cap_in, factor,
    BLOCK_K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, MASK: tl.constexpr, LOWER: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: `largest` is in base 2, `factor` takes a score there (with a softcap `capped` already did)."""
    k = load_tile(K, batch, head, n, BLOCK_K, D, UPCAST)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if SOFTCAP:
        s = capped(s, cap_in, factor)
        factor = 1.0
    if MASK:
        j = n + tl.arange(0, BLOCK_K)
        keep = j[None, :] < hi[:, None]
        if LOWER:
            keep = keep & (j[None, :] >= lo[:, None])
        s = tl.where(keep, s, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(s, 1) * factor)
    origin = new_largest
    if MASK:
        # A row that has seen nothing yet: measured from 0, exp2(-inf) is 0; from -inf it would be NaN.
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    p = tl.math.exp2(s * factor - origin[:, None])
    rescale = tl.math.exp2(largest - origin)
    total = total * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    v = load_tile(V, batch, head, n, BLOCK_K, D_V, UPCAST)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_largest, total, acc


@triton.jit(do_not_specialize=["n_q", "n_k", "n_heads", "heads_a_group", "window"])
def forward_kernel(
    Q, K, V, OUT, LSE, LO, HI, cap_in, factor, n_q, n_k, n_heads, heads_a_group, window,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q, K, V, OUT: descriptors (batch, head, row, width); LSE (batch, head, n_q) float32; LO, HI (batch, n_q) int32.

    EVEN: n_k is a multiple of BLOCK_K, so that without a mask no tile needs one.
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
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D_V], tl.float32)
    for PART in tl.static_range(3):
        if PART == 1 or (LOWER if PART == 0 else CAUSAL or DOCUMENTS or not EVEN):
            first, last = part_of(walk, PART)
            for n in tl.range(first, last, BLOCK_K):
                largest, total, acc = forward_step(
                    q, K, V, batch, kv_head, n, largest, total, acc, lo, hi, cap_in, factor,
                    BLOCK_K, D, D_V, PART != 1, LOWER, SOFTCAP, UPCAST, PRECISION,
                )  # fmt: skip
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_tile(OUT, batch, head, m, acc, BLOCK_Q, D_V)
    # log2 → natural; an empty row's logsumexp is -inf.
    lse = tl.where(empty, float("-inf"), (largest + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    tl.store(LSE + flat.to(tl.int64) * n_q + i, lse, mask=i < n_q)
