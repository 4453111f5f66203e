"""OUT += Aᵀ B on Hopper in Gluon, OUT in float32: what a chunk of tokens adds to the output head's gradient.

cuBLAS reads OUT, adds and writes it after each tile's product, while nothing is multiplied; with the few rows of a
chunk that is a third of the time. Here the copy engine adds what the consumers leave in shared memory, during the next
tile's product. Each element is added to once, so the sum does not depend on timing. The pipeline is linear_hopper.py's.
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

from groundup.kernels.flash_hopper_backward import add_through_memory
from groundup.kernels.flash_hopper_forward import barriers
from groundup.kernels.linear_hopper import BN, pieces


@gluon.jit
def producer(A, B, a_tiles, b_tiles, full, free, tiles, n_tiles, steps, STAGES: gl.constexpr):
    """Copy 64 rows of A's 128 and B's 256 columns a step; what lies outside is zero and not read."""
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m = t // n_tiles * 128
        n = t % n_tiles * BN
        for k in range(0, steps * 64, 64):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, (128 + BN) * 64 * 2)
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(A, [k, m + c * 64], bar, a_tiles.index(stage * 2 + c))
            tma.async_copy_global_to_shared(B, [k, n], bar, b_tiles.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def consumer(
    c: gl.constexpr, OUT, a_tiles, b_tiles, staging, full, free, ahead, tiles, n_tiles, steps,
    STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of this block; the second consumer begins LEAD steps after the first."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage = 0
    phase = 0
    parity = 0
    buffer = staging.index(c)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = t // n_tiles * 128 + c * 64
        column = t % n_tiles * BN
        sums = gl.zeros([64, BN], gl.float32, LAYOUT)
        before = 0
        if c == 1:
            mbarrier.wait(ahead.index(0), parity)
            parity ^= 1
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_tiles.index(stage * 2 + c).permute((1, 0))
            sums = warpgroup_mma(a, b_tiles.index(stage), sums, is_async=True)
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
        parts = pieces(sums)
        for p in gl.static_range(4):
            tma.store_wait(0)
            buffer.store(parts[p])
            fence_async_shared()
            add_through_memory(OUT, [row, column + p * 64], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "n_tiles", "steps"])
def product_sum_kernel(
    A, B, OUT, tiles, n_tiles, steps,
    STAGES: gl.constexpr, LEAD: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: A (K, M) of 64 × 64, B (K, N) of 64 × 256, OUT (M, N) float32 of 64 × 64. LEAD < STAGES < steps."""
    a_tiles = gl.allocate_shared_memory(A.dtype, [STAGES * 2, 64, 64], A.layout)
    b_tiles = gl.allocate_shared_memory(B.dtype, [STAGES, 64, BN], B.layout)
    staging = gl.allocate_shared_memory(gl.float32, [2, 64, 64], OUT.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    ahead = barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, OUT, a_tiles, b_tiles, staging, full, free, ahead, tiles, n_tiles, steps, STAGES, LEAD)),
        (consumer, (1, OUT, a_tiles, b_tiles, staging, full, free, ahead, tiles, n_tiles, steps, STAGES, LEAD)),
        (producer, (A, B, a_tiles, b_tiles, full, free, tiles, n_tiles, steps, STAGES)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
