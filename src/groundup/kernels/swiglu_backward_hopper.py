"""SwiGLU's backward at the end of the product before it, on Hopper in Gluon.

That product is dH = dY W, which is never written; what is are the gradients of gate and up. A block of threads stays on
its multiprocessor. Its producer warp copies tiles of dY and W to shared memory through a ring of STAGES; two consumer
warpgroups multiply, 64 rows and two accumulators of 128 columns each, and put dH, rounded, into a ring of SLOTS pieces
of 64 × 128 in shared memory. From there a third warpgroup, the helper, takes it: it reads gate and up 16 bytes a
thread, half a piece (64 × 64) ahead, and writes both gradients, all during the next tile's products.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
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

ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(256)
"""Of a tile."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""16 rows of half a piece, as pairs of neighbours in 32 bits: carried as bfloat16 each element would take a register. A
thread has one vector of 4 pairs; 8 threads read a line of memory."""


@gluon.jit
def piece_of(tile, c, j, tile_columns):
    """(row, column) of piece j of consumer c in a tile."""
    return tile // tile_columns * ROWS + c * 64, tile % tile_columns * COLUMNS + j * 128


@gluon.jit
def producer(D_Y, W, a_tiles, b_tiles, full, free, tiles, tile_columns, steps, STAGES: gl.constexpr):
    """Copy the tiles of all products of this block, one after the other; what lies outside is zero and not read."""
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // tile_columns * ROWS
        column = tile % tile_columns * COLUMNS
        for k in range(0, steps * 64, 64):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, (ROWS + COLUMNS) * 64 * 2)
            for i in gl.static_range(2):
                tma.async_copy_global_to_shared(D_Y, [row + i * 64, k], bar, a_tiles.index(stage * 2 + i))
                tma.async_copy_global_to_shared(W, [k, column + i * 128], bar, b_tiles.index(stage * 2 + i))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def places(X, row, column, F: gl.constexpr):
    """Pointers to 16 rows of 32 pairs of X (M, 2 F bfloat16) at a row and column; F pairs further is the next row."""
    rows = gl.arange(0, 16, gl.SliceLayout(1, PAIRS))
    columns = gl.arange(0, 32, gl.SliceLayout(0, PAIRS))
    return X + gl.cast(row, gl.int64) * F + column // 2 + (rows[:, None] * F + columns[None, :])


@gluon.jit
def fetch(GATE_UP, row, column, m, F: gl.constexpr):
    """Gate and up of half a piece: four stripes of 16 rows each. Where there is no such place, nothing is read."""
    place = places(GATE_UP, row, column, F)
    exists = (row < m) & (column < F)
    gate = (
        gl.load(place, mask=exists),
        gl.load(place + 16 * F, mask=exists),
        gl.load(place + 32 * F, mask=exists),
        gl.load(place + 48 * F, mask=exists),
    )
    up = (
        gl.load(place + F // 2, mask=exists),
        gl.load(place + 16 * F + F // 2, mask=exists),
        gl.load(place + 32 * F + F // 2, mask=exists),
        gl.load(place + 48 * F + F // 2, mask=exists),
    )
    return gate, up


@gluon.jit
def swiglu_gradients(d_h, gate, up):
    """d_gate and d_up in float32, as elementwise_triton has them."""
    s = 1 / (1 + gl.exp(-gate))
    return d_h * up * s * (1 + gate * (1 - s)), d_h * gate * s


@gluon.jit
def low(pairs):
    """The first of each pair of bfloat16, in float32."""
    return (pairs << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high(pairs):
    return (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def paired(low, high):
    """Both rounded to bfloat16, in pairs."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def write(GRAD, d_h, gate, up, row, column, m, F: gl.constexpr):
    """The gradients of half a piece; d_h: 64 × 32 pairs in shared memory."""
    place = places(GRAD, row, column, F)
    exists = (row < m) & (column < F)
    for i in gl.static_range(4):
        d = d_h.slice(i * 16, 16, dim=0).load(PAIRS)
        d_gate_low, d_up_low = swiglu_gradients(low(d), low(gate[i]), low(up[i]))
        d_gate_high, d_up_high = swiglu_gradients(high(d), high(gate[i]), high(up[i]))
        gl.store(place + i * 16 * F, paired(d_gate_low, d_gate_high), mask=exists)
        gl.store(place + i * 16 * F + F // 2, paired(d_up_low, d_up_high), mask=exists)


@gluon.jit
def helper(GATE_UP, GRAD, d_hs, h_full, h_free, m, tiles, tile_columns, SLOTS: gl.constexpr, F: gl.constexpr):
    """The gradients of what the consumers put into d_hs: the first pieces of both, then the second ones, tile by tile.
    Gate and up of a piece's left half are asked for before the piece before it is written."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.int32)
    n = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    row, column = piece_of(gl.program_id(0), 0, 0, tile_columns)
    gate, up = fetch(GATE_UP, row, column, m, F)
    for i in range(4 * n):
        following = i + 1
        tile = gl.program_id(0) + following // 4 * gl.num_programs(0)
        next_row, next_column = piece_of(tile, following % 2, following // 2 % 2, tile_columns)
        slot = i % SLOTS
        mbarrier.wait(h_full.index(slot), i // SLOTS & 1)
        d_h = d_hs.index(slot)._reinterpret(gl.int32, [64, 64], LAYOUT)
        right_gate, right_up = fetch(GATE_UP, row, column + 64, m, F)
        write(GRAD, d_h.slice(0, 32, dim=1), gate, up, row, column, m, F)
        gate, up = fetch(GATE_UP, next_row, next_column, m, F)
        write(GRAD, d_h.slice(32, 32, dim=1), right_gate, right_up, row, column + 64, m, F)
        mbarrier.arrive(h_free.index(slot), count=1)
        row = next_row
        column = next_column


@gluon.jit
def consumer(
    c: gl.constexpr, a_tiles, b_tiles, d_hs, full, free, h_full, h_free, tiles, steps,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of this block."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    n = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    stage = 0
    phase = 0
    for i in range(n):
        # Not `stage`: of two variables that begin as one value Triton takes the second for a constant of the loop.
        before = 0
        left = gl.zeros([64, 128], gl.float32, LAYOUT)
        right = gl.zeros([64, 128], gl.float32, LAYOUT)
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_tiles.index(stage * 2 + c)
            left = warpgroup_mma(a, b_tiles.index(stage * 2), left, is_async=True)
            right = warpgroup_mma(a, b_tiles.index(stage * 2 + 1), right, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=[left, right])
            mbarrier.arrive(free.index(before), count=1, pred=k > 0)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(free.index(before), count=1)
        for j in gl.static_range(2):
            turn = i * 4 + j * 2 + c
            slot = turn % SLOTS
            mbarrier.wait(h_free.index(slot), turn // SLOTS & 1 ^ 1)
            d_hs.index(slot).store((left if j == 0 else right).to(d_hs.dtype))
            mbarrier.arrive(h_full.index(slot), count=1)


@gluon.jit(do_not_specialize=["m", "tiles", "tile_columns", "steps"])
def swiglu_backward_kernel(
    D_Y, W, GATE_UP, GRAD, m, tiles, tile_columns, steps,
    F: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
    HELPER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: D_Y (M, K) of 64 × 64, W (K, F) of 64 × 128. GATE_UP, GRAD: (M, 2 F) bfloat16 as pairs in int32.

    64 divides M and F. F is a constant so that addresses are: the helper has no registers for them.
    """
    a_tiles = gl.allocate_shared_memory(D_Y.dtype, [STAGES * 2, 64, 64], D_Y.layout)
    b_tiles = gl.allocate_shared_memory(W.dtype, [STAGES * 2, 64, 128], W.layout)
    d_hs = gl.allocate_shared_memory(
        D_Y.dtype, [SLOTS, 64, 128], gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    )
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    h_full = barriers(SLOTS, 1)
    h_free = barriers(SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, a_tiles, b_tiles, d_hs, full, free, h_full, h_free, tiles, steps, STAGES, SLOTS)),
        (consumer, (1, a_tiles, b_tiles, d_hs, full, free, h_full, h_free, tiles, steps, STAGES, SLOTS)),
        (helper, (GATE_UP, GRAD, d_hs, h_full, h_free, m, tiles, tile_columns, SLOTS, F)),
        (producer, (D_Y, W, a_tiles, b_tiles, full, free, tiles, tile_columns, steps, STAGES)),
    ], [4, 4, 1], [REGISTERS, HELPER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
