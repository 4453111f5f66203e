"""FlashAttention backward for Hopper in Gluon: five products in one kernel, dQ added through memory by the copy engine.

A block of threads owns 128 keys, 64 for each of two consumer warpgroups, and walks over the queries that see them.
Scores are transposed (Sᵀ = K Qᵀ), so Pᵀ and dSᵀ feed dV and dK straight from registers. dSᵀ also goes to shared
memory, where both consumers meet: each computes one half of dQ from all 128 keys and has it added to float32 memory
by one bulk reduce. The order of those additions is not fixed, so dQ differs in its last bits from run to run; dK and
dV do not.

d = 128: a stage holds one tile of 64 queries and a consumer takes half of dQ's columns. d = 64: a stage holds two
tiles, worked on back to back, and a consumer takes one tile's dQ.

Registers are what is short, so: dQ is computed before dK and leaves while dK is computed; dP starts from -D, so that D
is not held beside it; the causal mask takes no integer for each element. Without these 48 bytes are spilled at d = 128,
and it is 10 to 13% slower. Tried and dropped: one tile of 128 queries (spills), a single release barrier,
three stages, the next scores fetched ahead, a jump over the mask, blocks that stay and draw their tiles, dK and dV
written by the copy engine (no gain).
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
# ruff: noqa: RUF059
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from groundup.kernels.flash_hopper_forward import barriers


@builtin
def add_through_memory(descriptor, coordinates, source, _semantic=None):
    """memory[coordinates] += source (shared), by the copy engine; Gluon 3.6 has the operation but no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def place(n_k, n_kv_heads, heads_a_group):
    """(tile of 128 keys, batch, kv_head): causal work is longest at the first keys."""
    n_tiles = (n_k + 127) // 128
    a_group = heads_a_group * n_tiles
    within = gl.program_id(0) % a_group
    flat = gl.program_id(0) // a_group * heads_a_group + within % heads_a_group
    return within // heads_a_group, flat // n_kv_heads, flat % n_kv_heads


@gluon.jit
def walk(n, n_q, n_k, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """(first, end) of the walk over tiles of ROWS queries."""
    end = (n_q + ROWS - 1) // ROWS
    first = 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(n * 128 - n_k + n_q, 0) // ROWS, end)
    return first, end


@gluon.jit
def producer(
    descriptors, buffers, bars, n_q, n_k, n_padded, n_kv_heads, heads_a_group,
    GROUP: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Copy the block's keys and values once, then stage by stage queries with logsumexp, and dO with D."""
    Q, K, V, D_OUT, LSE2, DELTA = descriptors
    qs, ks, vs, d_outs, lses, deltas = buffers
    kv_full, q_full, q_free, o_full, o_free = bars
    n, batch, kv_head = place(n_k, n_kv_heads, heads_a_group)
    mbarrier.expect(kv_full.index(0), 2 * 128 * D * 2)
    for c in gl.static_range(2):
        where = n * 128 + c * 64
        tma.async_copy_global_to_shared(K, [batch, kv_head, where, 0], kv_full.index(0), ks.index(c))
        tma.async_copy_global_to_shared(V, [batch, kv_head, where, 0], kv_full.index(0), vs.index(c))
    first, end = walk(n, n_q, n_k, 64 * TILES, CAUSAL)
    at = 0
    for g in range(GROUP):
        head = kv_head * GROUP + g
        row = (batch * n_kv_heads * GROUP + head) * n_padded
        for m in range(first, end):
            stage = at % STAGES
            phase = ((at // STAGES) & 1) ^ 1
            mbarrier.wait(q_free.index(stage), phase)
            mbarrier.expect(q_full.index(stage), TILES * (64 * D * 2 + 64 * 4))
            for h in gl.static_range(TILES):
                i = (m * TILES + h) * 64
                slot = stage * TILES + h
                tma.async_copy_global_to_shared(Q, [batch, head, i, 0], q_full.index(stage), qs.index(slot))
                tma.async_copy_global_to_shared(LSE2, [row + i], q_full.index(stage), lses.index(slot))
            mbarrier.wait(o_free.index(stage), phase)
            mbarrier.expect(o_full.index(stage), TILES * (64 * D * 2 + 64 * 4))
            for h in gl.static_range(TILES):
                i = (m * TILES + h) * 64
                slot = stage * TILES + h
                tma.async_copy_global_to_shared(D_OUT, [batch, head, i, 0], o_full.index(stage), d_outs.index(slot))
                tma.async_copy_global_to_shared(DELTA, [row + i], o_full.index(stage), deltas.index(slot))
            at += 1


def mask_in_ptx() -> tuple[str, str]:
    """PTX and its operands: a thread's 32 elements of a (64 keys, 64 queries) tile, 0 where key - query > 0.

    $0–$31 are the results, $32–$63 the elements, $64–$95 key - query at each; of these only $64 and $66 are read, and
    ptxas drops what computes the others. By wgmma's layout a thread holds of each 8 columns two neighbours in two rows:
    its elements 4 i and 4 i + 1 are columns 8 i and 8 i + 1 after its first one, 4 i + 2 and 4 i + 3 the same in the
    other row. So key - query > 0 there is `> 8 i` or `> 8 i + 1` at the row's first element: a comparison with a
    constant and a move. gl.where computes each difference, in registers that the products need.
    """
    copies = [f"mov.f32 ${e}, ${32 + e};" for e in range(32)]
    zeros = [
        f"setp.gt.s32 hidden, ${64 + e % 4 // 2 * 2}, {e // 4 * 8 + e % 2}; @hidden mov.f32 ${e}, 0f00000000;"
        for e in range(32)
    ]
    operands = ["=f"] * 32 + ["f"] * 32 + ["r"] * 32
    return "{ .reg .pred hidden; " + " ".join(copies + zeros) + " }", ",".join(operands)


MASK, MASK_OPERANDS = (gl.constexpr(text) for text in mask_in_ptx())


@gluon.jit
def probabilities(
    s, lse, i, j, factor, remaining, CAUSAL: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Pᵀ of a (64 keys, 64 queries) tile that starts at query i; query j sees the tile's first key, later ones more."""
    p = gl.exp2(s * factor - lse[None, :])
    keys = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        apart = (keys + (j - i))[:, None] - gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
        p = gl.inline_asm_elementwise(MASK, MASK_OPERANDS, [p, apart], dtype=gl.float32, is_pure=True, pack=32)
    if not EVEN:
        p = gl.where((keys < remaining)[:, None], p, 0.0)
    return p


@gluon.jit
def values_product(v, d_out, deltas, slot, LAYOUT: gl.constexpr):
    """V dOᵀ - D (64 keys, 64 queries), begun: the subtraction is where the product starts from."""
    minus = gl.zeros([64, 64], gl.float32, LAYOUT) - deltas.index(slot).load(gl.SliceLayout(0, LAYOUT))[None, :]
    return warpgroup_mma(v, d_out.permute((1, 0)), minus, is_async=True)


@gluon.jit
def from_registers(x, LAYOUT_O: gl.constexpr):
    """x, a product's result in 16 bits, as another's left operand; its elements are where they have to be."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT_O, 2), assert_trivial=True)


@gluon.jit
def add_queries(D_Q, batch, head, row, column, buffer, d_q):
    """dQ[row :, column :] += d_q (64, 64), on its way when this returns."""
    tma.store_wait(0)
    buffer.reshape([64, 64]).store(d_q)
    fence_async_shared()
    add_through_memory(D_Q, [batch, head, row, column], buffer)


@gluon.jit
def wide_step(
    c: gl.constexpr, D_Q, buffers, bars, d_s, d_qs, d_s_full, at, more, batch, head, m, diagonal, d_k, d_v, factor,
    remaining, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """One tile of 64 queries, d = 128. They have arrived; on return those of the next step have, if there is one."""
    qs, ks, vs, d_outs, lses, deltas = buffers
    kv_full, q_full, q_free, o_full, o_free = bars
    stage = at % STAGES
    both = at & 1
    q = qs.index(stage).reshape([64, D])
    d_out = d_outs.index(stage).reshape([64, D])
    nothing = gl.zeros([64, 64], gl.float32, LAYOUT_S)
    s = warpgroup_mma(ks.index(c).reshape([64, D]), q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(o_full.index(stage), (at // STAGES) & 1)
    d_p = values_product(vs.index(c).reshape([64, D]), d_out, deltas, stage, LAYOUT_S)
    lse = lses.index(stage).load(gl.SliceLayout(0, LAYOUT_S))
    s = warpgroup_mma_wait(1, deps=[s])
    p = probabilities(s, lse, m * 64, diagonal, factor, remaining, CAUSAL, EVEN, LAYOUT_S)
    d_v = warpgroup_mma(from_registers(p.to(q.dtype), LAYOUT_O), d_out, d_v, is_async=True)
    d_p = warpgroup_mma_wait(1, deps=[d_p])
    ds = (p * d_p).to(q.dtype)
    d_s.index(both * 2 + c).store(ds)
    fence_async_shared()
    mbarrier.arrive(d_s_full.index(both), count=1)
    mbarrier.wait(d_s_full.index(both), (at // 2) & 1)
    half_k = ks.index(0).reshape([64, D]).slice(c * 64, 64, dim=1)
    d_q = warpgroup_mma(d_s.index(both * 2).permute((1, 0)), half_k, nothing, use_acc=False, is_async=True)
    half_k = ks.index(1).reshape([64, D]).slice(c * 64, 64, dim=1)
    d_q = warpgroup_mma(d_s.index(both * 2 + 1).permute((1, 0)), half_k, d_q, is_async=True)
    d_k = warpgroup_mma(from_registers(ds, LAYOUT_O), q, d_k, is_async=True)
    d_v, d_q = warpgroup_mma_wait(1, deps=[d_v, d_q])
    mbarrier.arrive(o_free.index(stage), count=1)
    add_queries(D_Q, batch, head, m * 64, c * 64, d_qs.index(c), d_q)
    mbarrier.wait(q_full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1, pred=more)
    d_k = warpgroup_mma_wait(0, deps=[d_k])
    mbarrier.arrive(q_free.index(stage), count=1)
    return d_k, d_v


@gluon.jit
def narrow_step(
    c: gl.constexpr, D_Q, buffers, bars, d_s, d_qs, d_s_full, at, more, batch, head, m, diagonal, d_k, d_v, factor,
    remaining, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """As wide_step, two tiles, d = 64: the second's scores are computed while the first's exponentials run."""
    qs, ks, vs, d_outs, lses, deltas = buffers
    kv_full, q_full, q_free, o_full, o_free = bars
    stage = at % STAGES
    both = at & 1
    q0 = qs.index(stage * 2).reshape([64, D])
    q1 = qs.index(stage * 2 + 1).reshape([64, D])
    o0 = d_outs.index(stage * 2).reshape([64, D])
    o1 = d_outs.index(stage * 2 + 1).reshape([64, D])
    k = ks.index(c).reshape([64, D])
    v = vs.index(c).reshape([64, D])
    nothing = gl.zeros([64, 64], gl.float32, LAYOUT_S)
    s0 = warpgroup_mma(k, q0.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(o_full.index(stage), (at // STAGES) & 1)
    d_p0 = values_product(v, o0, deltas, stage * 2, LAYOUT_S)
    s1 = warpgroup_mma(k, q1.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s0 = warpgroup_mma_wait(2, deps=[s0])
    lse = lses.index(stage * 2).load(gl.SliceLayout(0, LAYOUT_S))
    p0 = probabilities(s0, lse, m * 128, diagonal, factor, remaining, CAUSAL, EVEN, LAYOUT_S)
    d_v = warpgroup_mma(from_registers(p0.to(q0.dtype), LAYOUT_O), o0, d_v, is_async=True)
    d_p1 = values_product(v, o1, deltas, stage * 2 + 1, LAYOUT_S)
    d_p0 = warpgroup_mma_wait(3, deps=[d_p0])
    ds = (p0 * d_p0).to(q0.dtype)
    d_s.index(both * 4 + c).store(ds)
    d_k = warpgroup_mma(from_registers(ds, LAYOUT_O), q0, d_k, is_async=True)
    s1 = warpgroup_mma_wait(3, deps=[s1])
    lse = lses.index(stage * 2 + 1).load(gl.SliceLayout(0, LAYOUT_S))
    p1 = probabilities(s1, lse, m * 128 + 64, diagonal, factor, remaining, CAUSAL, EVEN, LAYOUT_S)
    d_v = warpgroup_mma(from_registers(p1.to(q0.dtype), LAYOUT_O), o1, d_v, is_async=True)
    d_p1 = warpgroup_mma_wait(2, deps=[d_p1])
    ds = (p1 * d_p1).to(q0.dtype)
    d_s.index(both * 4 + 2 + c).store(ds)
    fence_async_shared()
    mbarrier.arrive(d_s_full.index(both), count=1)
    mbarrier.wait(d_s_full.index(both), (at // 2) & 1)
    mine = both * 4 + c * 2
    k0 = ks.index(0).reshape([64, D])
    k1 = ks.index(1).reshape([64, D])
    d_q = warpgroup_mma(d_s.index(mine).permute((1, 0)), k0, nothing, use_acc=False, is_async=True)
    d_q = warpgroup_mma(d_s.index(mine + 1).permute((1, 0)), k1, d_q, is_async=True)
    d_k = warpgroup_mma(from_registers(ds, LAYOUT_O), q1, d_k, is_async=True)
    d_v, d_q = warpgroup_mma_wait(1, deps=[d_v, d_q])
    mbarrier.arrive(o_free.index(stage), count=1)
    add_queries(D_Q, batch, head, m * 128 + c * 64, 0, d_qs.index(c), d_q)
    mbarrier.wait(q_full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1, pred=more)
    d_k = warpgroup_mma_wait(0, deps=[d_k])
    mbarrier.arrive(q_free.index(stage), count=1)
    return d_k, d_v


@gluon.jit
def consumer(
    c: gl.constexpr, D_Q, D_K, D_V, buffers, bars, d_s, d_qs, d_s_full, scale, n_q, n_k, n_kv_heads, heads_a_group,
    kv_batch, kv_head_stride, kv_row,
    GROUP: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half of every dQ."""
    kv_full, q_full, q_free, o_full, o_free = bars
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    n, batch, kv_head = place(n_k, n_kv_heads, heads_a_group)
    first, end = walk(n, n_q, n_k, 64 * TILES, CAUSAL)
    factor = scale * 1.4426950408889634
    j = n * 128 + c * 64
    diagonal = j - n_k + n_q
    remaining = n_k - j
    d_k = gl.zeros([64, D], gl.float32, LAYOUT_O)
    d_v = gl.zeros([64, D], gl.float32, LAYOUT_O)
    at = 0
    steps = GROUP * (end - first)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    step: gl.constexpr = narrow_step if TILES == 2 else wide_step
    for g in range(GROUP):
        head = kv_head * GROUP + g
        for m in range(first, end):
            d_k, d_v = step(
                c, D_Q, buffers, bars, d_s, d_qs, d_s_full, at, at + 1 < steps, batch, head, m, diagonal, d_k, d_v,
                factor, remaining, D, STAGES, CAUSAL, EVEN, LAYOUT_S, LAYOUT_O,
            )  # fmt: skip
            at += 1
    rows = j + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_O))
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT_O))
    base = batch.to(gl.int64) * kv_batch + kv_head.to(gl.int64) * kv_head_stride
    where = rows.to(gl.int64)[:, None] * kv_row + columns[None, :]
    keep = (rows < n_k)[:, None]
    gl.store(D_K + base + where, (d_k * scale).to(D_K.dtype.element_ty), mask=keep)
    gl.store(D_V + base + where, d_v.to(D_V.dtype.element_ty), mask=keep)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_q", "n_k", "n_padded", "n_kv_heads", "heads_a_group"])
def backward_kernel(
    Q, K, V, D_OUT, LSE2, DELTA, D_Q, D_K, D_V, scale, n_q, n_k, n_padded, n_kv_heads, heads_a_group,
    kv_batch, kv_head_stride, kv_row,
    GROUP: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: Q, K, V, D_OUT of 64 rows, D_Q float32 of 64 × 64, LSE2 and DELTA of 64 floats (padded rows).

    D_Q must be zero before. TILES: tiles of 64 queries in a stage, 1 for d = 128, 2 for d = 64. EVEN: 128 divides n_k.
    """
    qs = gl.allocate_shared_memory(Q.dtype, [STAGES * TILES, 1, 1, 64, D], Q.layout)
    d_outs = gl.allocate_shared_memory(Q.dtype, [STAGES * TILES, 1, 1, 64, D], Q.layout)
    ks = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 64, D], K.layout)
    vs = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 64, D], K.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES * TILES, 64], LSE2.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES * TILES, 64], DELTA.layout)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], Q.dtype)
    d_s = gl.allocate_shared_memory(Q.dtype, [4 * TILES, 64, 64], square)
    d_qs = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], D_Q.layout)
    bars = (barriers(1, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    d_s_full = barriers(2, 2)
    fence_async_shared()
    buffers = (qs, ks, vs, d_outs, lses, deltas)
    gl.warp_specialize([
        (consumer, (0, D_Q, D_K, D_V, buffers, bars, d_s, d_qs, d_s_full, scale, n_q, n_k, n_kv_heads, heads_a_group,
                    kv_batch, kv_head_stride, kv_row, GROUP, D, TILES, STAGES, CAUSAL, EVEN)),
        (consumer, (1, D_Q, D_K, D_V, buffers, bars, d_s, d_qs, d_s_full, scale, n_q, n_k, n_kv_heads, heads_a_group,
                    kv_batch, kv_head_stride, kv_row, GROUP, D, TILES, STAGES, CAUSAL, EVEN)),
        (producer, ((Q, K, V, D_OUT, LSE2, DELTA), buffers, bars, n_q, n_k, n_padded, n_kv_heads, heads_a_group,
                    GROUP, D, TILES, STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
