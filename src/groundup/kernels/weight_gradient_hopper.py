"""Weight gradient on Hopper in Gluon: OUT (M, N) float32 = Aᵀ B, A (K, M) and B (K, N) row-major, 16-bit.

One block of threads a multiprocessor. Its producer warp copies tiles of 64 rows of A and B to shared memory through a
ring of STAGES; each consumer warpgroup owns 64 rows of OUT and PIECES · BN columns. What a block does, `segment` says:
tiles of OUT, whole or a range of their K. The sums of a range go to a slot of the workspace and raise a flag; the block
of the tile's last range waits for the flags, lowers them for the next launch, adds the slots in their order to its own
sums and stores. So the sums do not depend on timing, and a block waits only for blocks of lower number.

Three consumers of 64 × 256 need two products of 128 columns each: ptxas takes none of 256 in a kernel of 512 threads.
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


@gluon.jit
def n_segments(block, cut):
    """Segments of a block; `cut` is what weight_gradient.Plan has of these names."""
    waves, rest, parts, left, share, helpers = cut
    n = waves
    if block < helpers:
        end = min((block + 1) * share, rest * left)
        if block * share < end:
            n += (end - 1) // left - block * share // left + 1
    elif block - helpers < parts * rest:
        n += 1
    return n


@gluon.jit
def segment(block, i, blocks, steps, cut):
    """Segment i of a block: its tile, its first step of K and its end, and the slot of its sums, -1: it stores."""
    waves, rest, parts, left, share, helpers = cut
    tile = block + i * blocks
    start = 0
    end = steps
    slot = -1
    if i >= waves:
        if block < helpers:
            tile = block * share // left + i - waves
            start = max(block * share - tile * left, 0) + steps - left
            end = min((block + 1) * share - tile * left, left) + steps - left
            slot = tile + block
        else:
            tile = (block - helpers) % rest
            part = (block - helpers) // rest
            start = part * (steps - left) // parts
            end = (part + 1) * (steps - left) // parts
            if part < parts - 1:
                slot = rest + helpers + tile * (parts - 1) + part
        tile += waves * blocks
    return tile, start, end, slot


@gluon.jit
def slots_of(tile, cut):
    """Slots of a cut tile, counted from the first of those: the first of its own blocks', the first of its helpers'
    and the number of the latter. Without helpers left is 0 and share 1."""
    _, rest, parts, left, share, helpers = cut
    helper = tile * left // share
    return rest + helpers + tile * (parts - 1), tile + helper, ((tile + 1) * left - 1) // share - helper + 1


@gluon.jit
def producer(
    A, B, a_tiles, b_tiles, full, free, tile_columns, steps, cut,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all segments, one after the other; what lies outside A and B is zero and not read."""
    block = gl.program_id(0)
    stage = 0
    phase = 1
    for s in range(n_segments(block, cut)):
        tile, start, end, _ = segment(block, s, gl.num_programs(0), steps, cut)
        m0 = tile // tile_columns * (64 * CONSUMERS)
        n0 = tile % tile_columns * (BN * PIECES)
        for k in range(start * 64, end * 64, 64):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, (64 * CONSUMERS + BN * PIECES) * 64 * 2)
            for c in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(A, [k, m0 + c * 64], bar, a_tiles.index(stage * CONSUMERS + c))
            for p in gl.static_range(PIECES):
                tma.async_copy_global_to_shared(B, [k, n0 + p * BN], bar, b_tiles.index(stage * PIECES + p))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def store(OUT, sums, rows, columns, m, eighths, TURNED: gl.constexpr):
    """The result is m × 8 · eighths; TURNED: in memory its columns are the rows."""
    where = rows[:, None] + columns[None, :] * m if TURNED else rows[:, None] * (eighths * 8) + columns[None, :]
    gl.store(OUT + where, sums, mask=(rows < m)[:, None] & (columns < eighths * 8)[None, :])


@gluon.jit
def consumer(
    c: gl.constexpr, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free,
    m, eighths, tile_columns, steps, cut,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of this block. Rows past the end of OUT are taken off the barriers unread."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    block = gl.program_id(0)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    # Eight rows and columns are 256 bytes of a slot: what a warp writes at once.
    within = ((row // 8) * (BN // 8 * 64) + row % 8 * 8)[:, None] + (column // 8 * 64 + column % 8)[None, :]
    waves, _, parts, _, _, _ = cut
    stage = 0
    phase = 0
    for s in range(n_segments(block, cut)):
        tile, start, end, slot = segment(block, s, gl.num_programs(0), steps, cut)
        m0 = (tile // tile_columns * CONSUMERS + c) * 64
        n0 = tile % tile_columns * (BN * PIECES)
        to_multiply = gl.where(m0 < m, end - start, 0)
        sums = gl.zeros([64, BN], gl.float32, LAYOUT)
        more = gl.zeros([64, BN], gl.float32, LAYOUT)
        before = 0
        for i in range(to_multiply):
            mbarrier.wait(full.index(stage), phase)
            a = a_tiles.index(stage * CONSUMERS + c).permute((1, 0))
            sums = warpgroup_mma(a, b_tiles.index(stage * PIECES), sums, is_async=True)
            if PIECES == 2:
                more = warpgroup_mma(a, b_tiles.index(stage * 2 + 1), more, is_async=True)
                sums, more = warpgroup_mma_wait(2, deps=[sums, more])
            else:
                sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(free.index(before), count=1, pred=i > 0)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if PIECES == 2:
            sums, more = warpgroup_mma_wait(0, deps=[sums, more])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index(before), count=1, pred=to_multiply > 0)
        for _ in range(end - start - to_multiply):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(free.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if m0 < m:
            if slot >= 0:
                place = WORK + (slot * CONSUMERS + c) * (64 * BN * PIECES)
                gl.store(place + within, sums)
                if PIECES == 2:
                    gl.store(place + 64 * BN + within, more)
                gl.thread_barrier()
                gl.atomic_xchg(FLAGS + slot * CONSUMERS + c, 1, sem="release")
            else:
                if s == waves:
                    own, helped, n_helped = slots_of(tile - waves * gl.num_programs(0), cut)
                    for j in range(parts - 1 + n_helped):
                        other = gl.where(j < parts - 1, own + j, helped + j - (parts - 1)) * CONSUMERS + c
                        while gl.atomic_cas(FLAGS + other, 1, 0, sem="acquire") == 0:
                            pass
                        gl.thread_barrier()
                        place = WORK + other * (64 * BN * PIECES)
                        sums += gl.load(place + within, cache_modifier=".cg")
                        if PIECES == 2:
                            more += gl.load(place + 64 * BN + within, cache_modifier=".cg")
                store(OUT, sums, m0 + row, n0 + column, m, eighths, TURNED)
                if PIECES == 2:
                    store(OUT, more, m0 + row, n0 + BN + column, m, eighths, TURNED)


INTEGERS = ["m", "eighths", "tile_columns", "steps", "waves", "rest", "parts", "left", "share", "helpers"]


@gluon.jit(do_not_specialize=INTEGERS)
def weight_gradient_kernel(
    A, B, OUT, WORK, FLAGS, m, eighths, tile_columns, steps, waves, rest, parts, left, share, helpers,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: A of 64 × 64, B of 64 × BN; a tile is 64 · CONSUMERS × BN · PIECES.

    m and eighths: columns of A and columns of B / 8, so that vectors may be stored. TURNED: OUT is (N, M) in memory.
    FLAGS: one a slot and consumer, zero before and after.
    """
    a_tiles = gl.allocate_shared_memory(A.dtype, [STAGES * CONSUMERS, 64, 64], A.layout)
    b_tiles = gl.allocate_shared_memory(B.dtype, [STAGES * PIECES, 64, BN], B.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    cut = (waves, rest, parts, left, share, helpers)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (0, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free, m, eighths, tile_columns, steps, cut,
                        CONSUMERS, BN, PIECES, STAGES, TURNED)),
            (consumer, (1, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free, m, eighths, tile_columns, steps, cut,
                        CONSUMERS, BN, PIECES, STAGES, TURNED)),
            (producer, (A, B, a_tiles, b_tiles, full, free, tile_columns, steps, cut, CONSUMERS, BN, PIECES, STAGES)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free, m, eighths, tile_columns, steps, cut,
                        CONSUMERS, BN, PIECES, STAGES, TURNED)),
            (consumer, (1, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free, m, eighths, tile_columns, steps, cut,
                        CONSUMERS, BN, PIECES, STAGES, TURNED)),
            (consumer, (2, OUT, WORK, FLAGS, a_tiles, b_tiles, full, free, m, eighths, tile_columns, steps, cut,
                        CONSUMERS, BN, PIECES, STAGES, TURNED)),
            (producer, (A, B, a_tiles, b_tiles, full, free, tile_columns, steps, cut, CONSUMERS, BN, PIECES, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
