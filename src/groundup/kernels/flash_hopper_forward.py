"""FlashAttention forward for Hopper in Gluon: asynchronous copies, wgmma, one producer warp and two or three consumers.

A block of threads stays on its multiprocessor and draws tiles of queries from a counter, the longest first. Its
producer warp copies Q, K and V to shared memory; each consumer warpgroup owns 64 rows of queries. Keys are walked
from the last to the first, so the tile on the diagonal comes first, while the pipeline fills. Barriers come in pairs:
`full` (data has arrived) and `free` (everybody has read it).

Two consumers fit in the registers at d = 128; there the scores of the next tile and P V of this one are in flight while
the exponentials of this one run (as FlashAttention-3, Shah et al. 2024). At d = 64 three consumers hide each other's
exponentials and need no pipeline of their own. Tried and dropped: turns between consumers by barriers (within noise),
a static schedule (20% slower at 16k), 128 rows a consumer (spills).
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
# ruff: noqa: B007, RUF059
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def place(t, n_tiles, n_heads, heads_a_group):
    """(tile, batch, head) of draw t: heads in groups that share L2, within one the last tile of queries first."""
    a_group = heads_a_group * n_tiles
    within = t % a_group
    flat = t // a_group * heads_a_group + within % heads_a_group
    return n_tiles - 1 - within // heads_a_group, flat // n_heads, flat % n_heads


@gluon.jit
def n_blocks(end_row, n_q, n_k, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """Tiles of keys that the rows before `end_row` see."""
    keys = n_k
    if CAUSAL:
        keys = gl.minimum(end_row + n_k - n_q, n_k)
    return (keys + BLOCK_K - 1) // BLOCK_K


@gluon.jit
def producer(
    descriptors, buffers, bars, COUNTER, n_q, n_k, n_heads, n_draws, heads_a_group,
    GROUP: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Draw a tile, tell the consumers, copy its queries, then its keys and values, last tile first."""
    Q, K, V = descriptors
    qs, ks, vs, drawn = buffers
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    ROWS: gl.constexpr = 64 * CONSUMERS
    n_tiles = (n_q + ROWS - 1) // ROWS
    at = 0
    round_ = 0
    t = gl.program_id(0)
    while t < n_draws:
        following = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
        slot = round_ & 1
        mbarrier.wait(d_free.index(slot), ((round_ >> 1) & 1) ^ 1)
        drawn.index(slot).store(gl.full([1], following, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(d_full.index(slot), count=1)
        m, batch, head = place(t, n_tiles, n_heads, heads_a_group)
        blocks = n_blocks((m + 1) * ROWS, n_q, n_k, BLOCK_K, CAUSAL)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_free.index(c), (round_ & 1) ^ 1)
            mbarrier.expect(q_full.index(c), 64 * D * 2)
            tma.async_copy_global_to_shared(Q, [batch, head, m * ROWS + c * 64, 0], q_full.index(c), qs.index(c))
        for i in range(blocks):
            stage = at % STAGES
            phase = ((at // STAGES) & 1) ^ 1
            where = (blocks - 1 - i) * BLOCK_K
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BLOCK_K * D * 2)
            tma.async_copy_global_to_shared(K, [batch, head // GROUP, where, 0], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BLOCK_K * D * 2)
            tma.async_copy_global_to_shared(V, [batch, head // GROUP, where, 0], v_full.index(stage), vs.index(stage))
            at += 1
        round_ += 1
        t = following


@gluon.jit
def masked(s, row, column, n_q, n_k, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a key is after its query, or past the last key."""
    j = column + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        return gl.where(j[None, :] <= i[:, None] + (n_k - n_q), s, float("-inf"))
    return gl.where(j[None, :] < n_k, s, float("-inf"))


@gluon.jit
def online_softmax(s, largest, total, factor, MASK: gl.constexpr):
    """(P, largest, total, rescale), in base 2."""
    new_largest = gl.maximum(largest, gl.max(s, 1) * factor)
    origin = new_largest
    if MASK:
        origin = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    p = gl.exp2(s * factor - origin[:, None])
    rescale = gl.exp2(largest - origin)
    return p, new_largest, total * rescale + gl.sum(p, 1), rescale


@gluon.jit
def pipelined_step(
    q, ks, vs, bars, at, p, out, largest, total, factor, row, column, more, n_q, n_k,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """Scores of tile `at` and P V of tile `at` - 1 are issued together; softmax runs while the second is in flight."""
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    stage = at % STAGES
    before = (at - 1) % STAGES
    k = ks.index(stage).reshape([BLOCK_K, q.shape[1]])
    v = vs.index(before).reshape([BLOCK_K, q.shape[1]])
    # Carried in float32 and rounded here: carrying it in bf16 costs a permutation of every register.
    half = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2), assert_trivial=True)
    nothing = gl.zeros([64, BLOCK_K], gl.float32, LAYOUT_S)
    s = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((at - 1) // STAGES) & 1)
    out = warpgroup_mma(half, v, out, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    if MASK:
        s = masked(s, row, column, n_q, n_k, BLOCK_K, CAUSAL, LAYOUT_S)
    p, largest, total, rescale = online_softmax(s, largest, total, factor, MASK)
    # Waiting for the next keys here also ends a basic block: ptxas would otherwise move the wait for P V above the
    # exponentials.
    following = at + 1
    mbarrier.wait(k_full.index(following % STAGES), (following // STAGES) & 1, pred=more)
    out = warpgroup_mma_wait(0, deps=[out])
    mbarrier.arrive(v_free.index(before), count=1)
    out = out * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUT_O), assert_trivial=True)[:, None]
    return p, out, largest, total


@gluon.jit
def pipelined_tile(
    q, ks, vs, bars, at, row, column, blocks, whole, c: gl.constexpr, factor, n_q, n_k,
    D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """(out, largest, total, at) of 64 rows over `blocks` tiles of keys, the `whole` first ones unmasked."""
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    out = gl.zeros([64, D], gl.float32, LAYOUT_O)
    largest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT_S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT_S))
    stage = at % STAGES
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    nothing = gl.zeros([64, BLOCK_K], gl.float32, LAYOUT_S)
    k = ks.index(stage).reshape([BLOCK_K, D])
    s = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    FIRST: gl.constexpr = CAUSAL or not EVEN
    if FIRST:
        s = masked(s, row, column, n_q, n_k, BLOCK_K, CAUSAL, LAYOUT_S)
    p, largest, total, rescale = online_softmax(s, largest, total, factor, FIRST)
    at += 1
    mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1, pred=blocks > 1)
    if CAUSAL:
        for i in range(1, blocks - whole):
            p, out, largest, total = pipelined_step(
                q, ks, vs, bars, at, p, out, largest, total, factor, row, column - i * BLOCK_K, i + 1 < blocks,
                n_q, n_k, BLOCK_K, STAGES, CAUSAL, True, LAYOUT_S, LAYOUT_O,
            )  # fmt: skip
            at += 1
    for i in range(gl.maximum(blocks - whole, 1), blocks):
        p, out, largest, total = pipelined_step(
            q, ks, vs, bars, at, p, out, largest, total, factor, row, 0, i + 1 < blocks,
            n_q, n_k, BLOCK_K, STAGES, CAUSAL, False, LAYOUT_S, LAYOUT_O,
        )  # fmt: skip
        at += 1
    mbarrier.arrive(q_free.index(c), count=1)
    before = (at - 1) % STAGES
    mbarrier.wait(v_full.index(before), ((at - 1) // STAGES) & 1)
    half = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2), assert_trivial=True)
    out = warpgroup_mma(half, vs.index(before).reshape([BLOCK_K, D]), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    mbarrier.arrive(v_free.index(before), count=1)
    return out, largest, total, at


@gluon.jit
def plain_step(
    q, ks, vs, bars, at, out, largest, total, factor, row, column, n_q, n_k,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, P V, one after the other; the other consumers fill the gaps."""
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    stage = at % STAGES
    phase = (at // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    nothing = gl.zeros([64, BLOCK_K], gl.float32, LAYOUT_S)
    k = ks.index(stage).reshape([BLOCK_K, q.shape[1]])
    s = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    if MASK:
        s = masked(s, row, column, n_q, n_k, BLOCK_K, CAUSAL, LAYOUT_S)
    p, largest, total, rescale = online_softmax(s, largest, total, factor, MASK)
    out = out * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUT_O), assert_trivial=True)[:, None]
    half = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2), assert_trivial=True)
    mbarrier.wait(v_full.index(stage), phase)
    out = warpgroup_mma(half, vs.index(stage).reshape([BLOCK_K, q.shape[1]]), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    mbarrier.arrive(v_free.index(stage), count=1)
    return out, largest, total


@gluon.jit
def plain_tile(
    q, ks, vs, bars, at, row, column, blocks, whole, c: gl.constexpr, factor, n_q, n_k,
    D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """As `pipelined_tile`."""
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    out = gl.zeros([64, D], gl.float32, LAYOUT_O)
    largest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT_S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT_S))
    if CAUSAL or not EVEN:
        for i in range(blocks - whole):
            out, largest, total = plain_step(
                q, ks, vs, bars, at, out, largest, total, factor, row, column - i * BLOCK_K, n_q, n_k,
                BLOCK_K, STAGES, CAUSAL, True, LAYOUT_S, LAYOUT_O,
            )  # fmt: skip
            at += 1
    for i in range(blocks - whole, blocks):
        out, largest, total = plain_step(
            q, ks, vs, bars, at, out, largest, total, factor, row, 0, n_q, n_k,
            BLOCK_K, STAGES, CAUSAL, False, LAYOUT_S, LAYOUT_O,
        )  # fmt: skip
        at += 1
    mbarrier.arrive(q_free.index(c), count=1)
    return out, largest, total, at


@gluon.jit
def consumer(
    c: gl.constexpr, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group,
    out_batch, out_head, out_row,
    D: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr, PIPELINED: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile that this block draws."""
    qs, ks, vs, drawn = buffers
    q_full, q_free, k_full, k_free, v_full, v_free, d_full, d_free = bars
    ROWS: gl.constexpr = 64 * CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    n_tiles = (n_q + ROWS - 1) // ROWS
    at = 0
    round_ = 0
    q = qs.index(c).reshape([64, D])
    t = gl.program_id(0)
    while t < n_draws:
        m, batch, head = place(t, n_tiles, n_heads, heads_a_group)
        row = m * ROWS + c * 64
        all_blocks = n_blocks((m + 1) * ROWS, n_q, n_k, BLOCK_K, CAUSAL)
        blocks = gl.minimum(n_blocks(row + 64, n_q, n_k, BLOCK_K, CAUSAL), all_blocks)
        # Tiles that only the consumers below see: taken off the barriers unread.
        for i in range(all_blocks - blocks):
            mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1)
            mbarrier.arrive(k_free.index(at % STAGES), count=1)
            mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
            mbarrier.arrive(v_free.index(at % STAGES), count=1)
            at += 1
        whole = n_k // BLOCK_K
        if CAUSAL:
            whole = gl.minimum((row + 1 + n_k - n_q) // BLOCK_K, blocks)
        mbarrier.wait(q_full.index(c), round_ & 1)
        column = (blocks - 1) * BLOCK_K
        if PIPELINED:
            out, largest, total, at = pipelined_tile(
                q, ks, vs, bars, at, row, column, blocks, whole, c, factor, n_q, n_k,
                D, BLOCK_K, STAGES, CAUSAL, EVEN, LAYOUT_S, LAYOUT_O,
            )  # fmt: skip
        else:
            out, largest, total, at = plain_tile(
                q, ks, vs, bars, at, row, column, blocks, whole, c, factor, n_q, n_k,
                D, BLOCK_K, STAGES, CAUSAL, EVEN, LAYOUT_S, LAYOUT_O,
            )  # fmt: skip
        out = out * gl.convert_layout(1.0 / total, gl.SliceLayout(1, LAYOUT_O), assert_trivial=True)[:, None]
        i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_S))
        lse = (largest + gl.log2(total)) * 0.6931471805599453
        gl.store(LSE + (batch.to(gl.int64) * n_heads + head) * n_q + i, lse, mask=i < n_q)
        i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_O))
        column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT_O))
        base = OUT + batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head
        at_row = i.to(gl.int64)[:, None] * out_row
        gl.store(base + at_row + column[None, :], out.to(q.dtype), mask=(i < n_q)[:, None])
        slot = round_ & 1
        mbarrier.wait(d_full.index(slot), (round_ >> 1) & 1)
        t = gl.max(drawn.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(d_free.index(slot), count=1)
        round_ += 1


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """NUMBER barriers that COUNT arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["n_q", "n_k", "n_heads", "n_draws", "heads_a_group"])
def forward_kernel(
    Q, K, V, OUT, LSE, COUNTER, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch, out_head, out_row,
    GROUP: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, EVEN: gl.constexpr, PIPELINED: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Q, K, V: descriptors (batch, head, row, width) of 64 and BLOCK_K rows; COUNTER: one int32, zero.

    n_q ≤ n_k when causal. EVEN: n_k is a multiple of BLOCK_K.
    """
    qs = gl.allocate_shared_memory(Q.dtype, [CONSUMERS, 1, 1, 64, D], Q.layout)
    ks = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_K, D], K.layout)
    vs = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, BLOCK_K, D], V.layout)
    drawn = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = (
        barriers(CONSUMERS, 1), barriers(CONSUMERS, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), barriers(2, 1), barriers(2, CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    buffers = (qs, ks, vs, drawn)
    # The compiler takes these argument lists only written out: in a variable their constants become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (0, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch,
                        out_head, out_row, D, CONSUMERS, BLOCK_K, STAGES, CAUSAL, EVEN, PIPELINED)),
            (consumer, (1, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch,
                        out_head, out_row, D, CONSUMERS, BLOCK_K, STAGES, CAUSAL, EVEN, PIPELINED)),
            (producer, ((Q, K, V), buffers, bars, COUNTER, n_q, n_k, n_heads, n_draws, heads_a_group, GROUP, D,
                        CONSUMERS, BLOCK_K, STAGES, CAUSAL)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch,
                        out_head, out_row, D, CONSUMERS, BLOCK_K, STAGES, CAUSAL, EVEN, PIPELINED)),
            (consumer, (1, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch,
                        out_head, out_row, D, CONSUMERS, BLOCK_K, STAGES, CAUSAL, EVEN, PIPELINED)),
            (consumer, (2, OUT, LSE, buffers, bars, factor, n_q, n_k, n_heads, n_draws, heads_a_group, out_batch,
                        out_head, out_row, D, CONSUMERS, BLOCK_K, STAGES, CAUSAL, EVEN, PIPELINED)),
            (producer, ((Q, K, V), buffers, bars, COUNTER, n_q, n_k, n_heads, n_draws, heads_a_group, GROUP, D,
                        CONSUMERS, BLOCK_K, STAGES, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
