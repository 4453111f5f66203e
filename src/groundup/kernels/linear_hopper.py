"""A layer's product on Hopper in Gluon, OUT = X Wᵀ, with what follows it done before the sums leave the registers.

One block of threads a multiprocessor. Its producer warp copies tiles of X and W to shared memory through a ring of
STAGES; each of two consumer warpgroups owns 64 rows and all 256 columns of every tile. Consumers wait for stages and
release them each on its own, and the second begins a tile LEAD steps of K after the first one: so one multiplies while
the other one is at its epilogue. Sums leave in pieces of 64 × 64 through SLOTS buffers a consumer; a copy out of one is
waited for only when the buffer is needed again.

Epilogues: RESIDUAL adds R, which comes through the ring as two more steps; ROPE turns the pairs of the first columns;
SWIGLU takes half of a tile's columns from the gate's rows of W and half from the up rows, stores both and silu(gate) ·
up. wgmma leaves neighbouring columns 2 i and 2 i + 1, and columns 64 apart, in one thread, so all of this is arithmetic
in registers.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
# ruff: noqa: RET505, RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from groundup.kernels.flash_hopper_forward import barriers

RESIDUAL, ROPE, SWIGLU = (gl.constexpr(i) for i in range(3))
BN = gl.constexpr(256)
"""Columns of a tile; it has 2 · 64 rows."""
PIECE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
"""Of a PIECE of 64 × 64, where the pairs of neighbouring columns are."""

ROUND = gl.constexpr(
    "{ .reg .b32 two; cvt.rn.bf16x2.f32 two, $3, $2; shl.b32 $0, two, 16; and.b32 $1, two, 0xffff0000; }"
)
"""Two floats rounded to bf16, as floats."""
SIGMOID = gl.constexpr(
    "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "
    "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }"
)
"""1 / (1 + 2^(-x log2 e)). The compiler would round one float at a time, on the unit of the exponentials, and mind
denormal numbers in exponential and division: together twice the time."""


@gluon.jit
def place(t, m_tiles, n_tiles, GROUP: gl.constexpr):
    """(row, column) of tile t: GROUP rows of tiles, column by column, share what they read in L2."""
    a_group = GROUP * n_tiles
    first = t // a_group * GROUP
    rows = gl.minimum(m_tiles - first, GROUP)
    return first + t % a_group % rows, t % a_group // rows


@gluon.jit
def producer(
    X, W, W_UP, R, a_tiles, b_tiles, full, free, m_tiles, n_tiles, steps,
    EPILOGUE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all steps of K, one after the other; what lies outside of X and W is zero and not read.

    A residual follows as two more steps, each half of the tile's columns, which lie where W's tile does.
    """
    HALF: gl.constexpr = BN // 2
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = place(t, m_tiles, n_tiles, GROUP)
        m0 = m * 128
        n0 = n * (HALF if EPILOGUE == SWIGLU else BN)
        for k in range(0, steps * 64, 64):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, (128 + BN) * 64 * 2)
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(X, [m0 + c * 64, k], bar, a_tiles.index(stage * 2 + c))
            b = b_tiles.index(stage)
            tma.async_copy_global_to_shared(W, [n0, k], bar, b.slice(0, HALF, dim=0))
            second = n0 if EPILOGUE == SWIGLU else n0 + HALF
            tma.async_copy_global_to_shared(W_UP, [second, k], bar, b.slice(HALF, HALF, dim=0))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if EPILOGUE == RESIDUAL:
            for h in gl.static_range(2):
                bar = full.index(stage)
                mbarrier.wait(free.index(stage), phase)
                mbarrier.expect(bar, 128 * HALF * 2)
                for c in gl.static_range(2):
                    for j in gl.static_range(2):
                        to = b_tiles.index(stage).slice((c * 2 + j) * 64, 64, dim=0)
                        tma.async_copy_global_to_shared(R, [m0 + c * 64, n0 + (h * 2 + j) * 64], bar, to)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left, right = x.reshape([64, 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def pieces(x):
    """x (64, 128 or 256) as a tuple of 64 × 64."""
    left, right = halves(x)
    if x.shape[1] == 128:
        return left, right
    else:
        a, b = halves(left)
        c, d = halves(right)
        return a, b, c, d


@gluon.jit
def pairs_of(x):
    """The even and the odd columns of a piece."""
    even, odd = x.reshape([64, 32, 2]).split()
    return gl.convert_layout(even, PAIRS, assert_trivial=True), gl.convert_layout(odd, PAIRS, assert_trivial=True)


@gluon.jit
def of_pairs(even, odd):
    return gl.convert_layout(gl.join(even, odd).reshape([64, 64]), PIECE, assert_trivial=True)


@gluon.jit
def put(OUT, piece, buffer, row, column, SLOTS: gl.constexpr):
    """OUT[row :, column :] = piece (64, 64), on its way when this returns; `buffer` is the one of SLOTS puts ago."""
    tma.store_wait(SLOTS - 1)
    buffer.store(piece.to(OUT.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(OUT, [row, column], buffer)


@gluon.jit
def angle_pieces(TABLE, row, seq, wanted, HEAD: gl.constexpr):
    """A table's (64, 32) for the rows from `row` on; for heads of 128 two of them."""
    rows = (row + gl.arange(0, 64, gl.SliceLayout(1, PAIRS))) % seq
    columns = gl.arange(0, 32, gl.SliceLayout(0, PAIRS))
    found = ()
    for p in gl.static_range(HEAD // 64):
        where = rows[:, None] * (HEAD // 2) + p * 32 + columns[None, :]
        found = found + (gl.load(TABLE + where, mask=gl.full([64, 32], 1, gl.int1, PAIRS) & wanted, other=0.0),)
    return found


@gluon.jit
def finish(
    OUT, OUT_UP, HIDDEN, sums, cos, sin, staging, c: gl.constexpr, row, column, turned,
    EPILOGUE: gl.constexpr, HEAD: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Store sums (64, BN), turned, or of SWIGLU gate and up side by side with silu(gate) · up."""
    if EPILOGUE == SWIGLU:
        gate, up = halves(sums)
        gates = pieces(gate)
        ups = pieces(up)
        for p in gl.static_range(2):
            # Of the rounded values, so that the backward, which has only these, sees the same.
            gate = gl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [gates[p]], dtype=gl.float32, is_pure=True, pack=2)
            up = gl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [ups[p]], dtype=gl.float32, is_pure=True, pack=2)
            put(OUT, gate, staging.index(c * SLOTS + (3 * p) % SLOTS), row, column + p * 64, SLOTS)
            put(OUT_UP, up, staging.index(c * SLOTS + (3 * p + 1) % SLOTS), row, column + p * 64, SLOTS)
            sigmoid = gl.inline_asm_elementwise(SIGMOID, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
            hidden = gate * sigmoid * up
            put(HIDDEN, hidden, staging.index(c * SLOTS + (3 * p + 2) % SLOTS), row, column + p * 64, SLOTS)
    else:
        parts = pieces(sums)
        for p in gl.static_range(4):
            piece = parts[p]
            if column + p * 64 < turned:
                even, odd = pairs_of(piece)
                i: gl.constexpr = p % (HEAD // 64)
                piece = of_pairs(even * cos[i] - odd * sin[i], even * sin[i] + odd * cos[i])
            put(OUT, piece, staging.index(c * SLOTS + p % SLOTS), row, column + p * 64, SLOTS)


@gluon.jit
def add_residual(
    OUT, sums, b_tiles, staging, full, free, stage, phase, c: gl.constexpr, row, column,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Store sums (64, BN) + R, which the next two stages bring; returns the stage and phase after them."""
    parts = pieces(sums)
    for h in gl.static_range(2):
        mbarrier.wait(full.index(stage), phase)
        b = b_tiles.index(stage)
        left = parts[2 * h] + b.slice(c * 128, 64, dim=0).load(PIECE).to(gl.float32)
        right = parts[2 * h + 1] + b.slice(c * 128 + 64, 64, dim=0).load(PIECE).to(gl.float32)
        mbarrier.arrive(free.index(stage), count=1)
        put(OUT, left, staging.index(c * SLOTS), row, column + h * 128, SLOTS)
        put(OUT, right, staging.index(c * SLOTS + 1 % SLOTS), row, column + h * 128 + 64, SLOTS)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def consumer(
    c: gl.constexpr, OUT, OUT_UP, HIDDEN, COS, SIN, a_tiles, b_tiles, staging, full, free, ahead,
    m_tiles, n_tiles, steps, seq, turned,
    EPILOGUE: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of this block."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage = 0
    phase = 0
    parity = 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        tile_row, tile_column = place(t, m_tiles, n_tiles, GROUP)
        row = tile_row * 128 + c * 64
        column = tile_column * (BN // 2 if EPILOGUE == SWIGLU else BN)
        cos = ()
        sin = ()
        if EPILOGUE == ROPE:  # asked for before the products
            cos = angle_pieces(COS, row, seq, column < turned, HEAD)
            sin = angle_pieces(SIN, row, seq, column < turned, HEAD)
        sums = gl.zeros([64, BN], gl.float32, LAYOUT)
        before = 0
        if c == 1:
            mbarrier.wait(ahead.index(0), parity)
            parity ^= 1
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_tiles.index(stage * 2 + c)
            sums = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(free.index(before), count=1, pred=i > 0)
            if c == 0:
                mbarrier.arrive(ahead.index(0), count=1, pred=i == LEAD)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index(before), count=1)
        if EPILOGUE == RESIDUAL:
            stage, phase = add_residual(
                OUT, sums, b_tiles, staging, full, free, stage, phase, c, row, column, STAGES, SLOTS
            )  # fmt: skip
        else:
            finish(OUT, OUT_UP, HIDDEN, sums, cos, sin, staging, c, row, column, turned, EPILOGUE, HEAD, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m_tiles", "n_tiles", "steps", "seq", "turned"])
def linear_kernel(
    X, W, W_UP, R, OUT, OUT_UP, HIDDEN, COS, SIN, m_tiles, n_tiles, steps, seq, turned,
    EPILOGUE: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    LEAD: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: W and W_UP of 128 × 64 (one W, but of SWIGLU gate and up), the others of 64 × 64.

    COS, SIN: (seq, HEAD / 2). What an epilogue does not use is not looked at. 0 < LEAD < STAGES < steps.
    """
    a_tiles = gl.allocate_shared_memory(X.dtype, [STAGES * 2, 64, 64], X.layout)
    b_tiles = gl.allocate_shared_memory(X.dtype, [STAGES, BN, 64], W.layout)
    staging = gl.allocate_shared_memory(OUT.dtype, [2 * SLOTS, 64, 64], OUT.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    ahead = barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, OUT, OUT_UP, HIDDEN, COS, SIN, a_tiles, b_tiles, staging, full, free, ahead, m_tiles, n_tiles,
                    steps, seq, turned, EPILOGUE, HEAD, STAGES, SLOTS, GROUP, LEAD)),
        (consumer, (1, OUT, OUT_UP, HIDDEN, COS, SIN, a_tiles, b_tiles, staging, full, free, ahead, m_tiles, n_tiles,
                    steps, seq, turned, EPILOGUE, HEAD, STAGES, SLOTS, GROUP, LEAD)),
        (producer, (X, W, W_UP, R, a_tiles, b_tiles, full, free, m_tiles, n_tiles, steps, EPILOGUE, STAGES, GROUP)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
