"""The weight gradient dYᵀ X in float32: cuBLAS, or on Hopper a kernel that also cuts tiles along K.

cuBLAS deals whole tiles, so 5504 × 1024 keeps 132 multiprocessors busy 88% of the time. Here tiles that do not fill a
wave are cut: each has `parts` blocks of threads of its own, all tiles' at the same steps of K, so that what they read
at one time is shared in L2; the last `left` steps of all tiles go to the blocks that remain. All that is arithmetic on
a block's number, so a launch needs no table. Sums are added in a fixed order: results are bit-equal from run to run.

As flash_hopper.py: Triton 3.6 only, after a small problem on this device came out right; else cuBLAS, and a word of it.
"""

from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from groundup.kernels.backend import n_multiprocessors, note_fallback
from groundup.kernels.flash_hopper import device_obstacle

ME = "weight gradient"
LEAST_K = 8192
"""Tokens below which nothing was measured: cuBLAS."""
LEAST_TFLOPS = 600.0
"""What the costs below must promise, or cuBLAS stays."""


class Tile(NamedTuple):
    """64 · consumers rows and width · pieces columns; `step`: microseconds for 64 of K on a full H200."""

    consumers: int
    width: int
    pieces: int
    stages: int
    registers: int
    producer_registers: int
    step: float

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def columns(self) -> int:
        return self.width * self.pieces


TILES = {
    "192x256": Tile(3, 128, 2, 4, 160, 32, 0.956),
    "128x256": Tile(2, 256, 1, 4, 240, 24, 0.651),
    "192x128": Tile(3, 128, 1, 5, 160, 32, 0.54),
    "128x128": Tile(2, 128, 1, 6, 240, 24, 0.44),
}
"""The first two steps are measured on an H200, the others guessed from their traffic."""
LAUNCH, WRITE, READ, STORE = 4.0, 1.5, 1.8, 6.0
"""Microseconds of a launch, and of 192 × 256 sums to the workspace, from it, and to the result."""


class Candidate(NamedTuple):
    tile: str
    turned: bool = False
    """The tile's rows are columns of the weight."""
    helpers: bool = True
    """Whether blocks that are no tile's own may take steps of others'."""
    parts: int = 0
    """Blocks of its own of a cut tile, 0: as many as fit."""


CHOICE: dict[tuple[int, int], Candidate | None] = {}
"""(M, N) → what was measured to be the fastest, None: cuBLAS. For all others the costs decide."""
CANDIDATES = [Candidate(tile, turned) for tile in TILES for turned in (False, True)]


class Plan(NamedTuple):
    """How the kernel deals tiles to blocks; its arguments of the same names."""

    blocks: int
    steps: int
    """Of 64 along K."""
    waves: int
    """Whole tiles of every block."""
    rest: int
    """Tiles that are cut."""
    parts: int
    """Blocks of its own of a cut tile."""
    left: int
    """Steps of a cut tile that go to helpers, the last ones."""
    share: int
    """Steps of a helper."""
    helpers: int
    """Blocks that help, the first ones."""
    microseconds: float

    @property
    def cut(self) -> tuple[int, ...]:
        """What the kernel's arithmetic takes."""
        return self.waves, self.rest, self.parts, self.left, self.share, self.helpers

    @property
    def slots(self) -> int:
        return self.rest * self.parts + self.helpers if self.parts > 1 or self.helpers else 0


@cache
def plan(candidate: Candidate, m: int, n: int, k: int, blocks: int) -> Plan:
    """The division of OUT (m, n) over K that costs the least."""
    tile = TILES[candidate.tile]
    if candidate.turned:
        m, n = n, m
    tiles, steps = -(-m // tile.rows) * -(-n // tile.columns), -(-k // 64)
    size = tile.rows * tile.columns / (192 * 256)
    write, read, store = WRITE * size, READ * size, STORE * size
    waves, rest = divmod(tiles, blocks)
    whole = LAUNCH + waves * (steps * tile.step + store)
    if not rest:
        return Plan(blocks, steps, waves, 0, 1, 0, 1, 0, whole)
    parts = min(candidate.parts or blocks // rest, steps)
    owner = -(-steps // parts) * tile.step + read * (parts - 1) + store
    found = [Plan(blocks if waves else parts * rest, steps, waves, rest, parts, 0, 1, 0, whole + owner)]
    most = blocks - parts * rest if candidate.helpers else 0
    for left in range(1, steps - parts + 1 if most else 1):
        share = -(-rest * left // most)
        helpers = -(-rest * left // share)
        # A helper's range begins and ends inside of tiles, unless it is a multiple of what they leave.
        aligned = share % left == 0
        of_tile, of_helper = (1, share // left) if aligned else (-(-left // share) + 1, -(-share // left) + 1)
        owner = -(-(steps - left) // parts) * tile.step + read * (parts - 1 + of_tile)
        helper = share * tile.step + write * of_helper + read
        used = blocks if waves else parts * rest + helpers
        found.append(Plan(used, steps, waves, rest, parts, left, share, helpers, whole + max(owner, helper) + store))
    return min(found, key=lambda x: x.microseconds)


@cache
def chosen(m: int, n: int, k: int, blocks: int) -> Candidate | None:
    """What computes dYᵀ X of (K, M) and (K, N); None: cuBLAS."""
    if m % 8 or n % 8 or k % 64 or not LEAST_K <= k < 1 << 28 or m * n == 0 or m * n >= 1 << 31:
        return None
    if (m, n) in CHOICE:
        return CHOICE[m, n]
    best = min(CANDIDATES, key=lambda c: plan(c, m, n, k, blocks).microseconds)
    return best if 2e-6 * m * n * k >= LEAST_TFLOPS * plan(best, m, n, k, blocks).microseconds else None


def weight_gradient(d_y: Float[Tensor, "k m"], x: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """dYᵀ X of half-precision matrices, summed and kept in float32."""
    if d_y.is_cuda and not device_obstacle(d_y.device.index or 0):
        return weight_gradient_op(d_y, x)
    return float32_product(d_y.T, x)


def float32_product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """a b of half-precision matrices, summed and kept in float32. Only GPUs have that as one product."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # a compiler traces a backward under the forward's autocast
        return a.float() @ b.float()


@torch.library.custom_op("groundup::weight_gradient", mutates_args=())
def weight_gradient_op(d_y: Tensor, x: Tensor) -> Tensor:
    """d_yᵀ x in float32 by the kernel, where it is the faster one and right, else by cuBLAS."""
    if d_y.is_cuda and copyable(d_y) and copyable(x) and d_y.dtype == x.dtype:
        candidate = chosen(d_y.shape[1], x.shape[1], x.shape[0], n_multiprocessors(x.device))
        if candidate is not None and proven(candidate, x):
            return by_kernel(d_y, x, candidate)
    return float32_product(d_y.T, x)


@weight_gradient_op.register_fake
def _(d_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(d_y.shape[1], x.shape[1], dtype=torch.float32)


@register_flop_formula(torch.ops.groundup.weight_gradient)
def _(d_y: tuple[int, int], x: tuple[int, int], **_kwargs: Any) -> int:
    return 2 * d_y[0] * d_y[1] * x[1]


def copyable(x: Tensor) -> bool:
    """Whether the copy engine can read rows of x: 16-byte aligned, half precision."""
    rows, columns = x.stride()
    aligned = columns == 1 and rows >= x.shape[1] and rows % 8 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.dtype in (torch.bfloat16, torch.float16)


_proof: dict[tuple[torch.device, torch.dtype, str, bool], bool] = {}


def proven(candidate: Candidate, x: Tensor) -> bool:
    """Whether the kernel is right on this device. A CUDA graph that is captured before the check keeps cuBLAS."""
    key = (x.device, x.dtype, candidate.tile, candidate.turned)
    if key not in _proof:
        if torch.cuda.is_current_stream_capturing():
            note_fallback(ME, "not checked before this CUDA graph, which keeps cuBLAS: run a step before capture")
            return False
        _proof[key] = prove(x.device, x.dtype, Candidate(candidate.tile, candidate.turned))
    return _proof[key]


def prove(device: torch.device, dtype: torch.dtype, candidate: Candidate) -> bool:
    """Compare with cuBLAS: tiles cut in parts, and with helpers or after a wave of whole tiles; twice the same."""
    generator = torch.Generator(device).manual_seed(0)
    try:
        for m, n, k in ((968, 1544, 2048), (1928, 2056, 4096)):
            d_y, x = (torch.randn(k, width, device=device, generator=generator).to(dtype) for width in (m, n))
            ours, again = by_kernel(d_y, x, candidate), by_kernel(d_y, x, candidate)
            theirs = float32_product(d_y.T, x)
            # Written so that NaN fails.
            if not float((ours - theirs).norm() / theirs.norm()) < 1e-4 or not torch.equal(ours, again):
                note_fallback(ME, f"wrong on a small check for tiles of {candidate.tile}; using cuBLAS")
                return False
    except Exception as error:
        note_fallback(ME, f"{type(error).__name__} at its first use: {str(error)[:200]}; using cuBLAS")
        return False
    return True


LINES = 1024
_arena: dict[torch.device, tuple[Tensor, count]] = {}
_line: dict[tuple[torch.device, int], Tensor] = {}


def flags(device: torch.device, consumers: int) -> Tensor:
    """Zeros that a launch leaves zero, for a block and consumer each; the current device is `device`.

    A stream has its own, since its launches follow each other, and so has every launch in a CUDA graph, whose replays
    do. A fresh tensor of zeros instead would cost a launch; so it is only when a thousand launches are in graphs.
    """
    width = 4 * n_multiprocessors(device)
    assert consumers <= 4
    stream = torch.cuda.current_stream(device).cuda_stream
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing and (device, stream) in _line:
        return _line[device, stream]
    if device not in _arena:  # the check at first use comes by here, outside of any graph
        _arena[device] = torch.zeros(LINES, width, dtype=torch.int32, device=device), count()
        torch.cuda.synchronize(device)  # other streams will use other lines
    arena, taken = _arena[device]
    i = next(taken)
    line = arena[i] if i < LINES else torch.zeros(width, dtype=torch.int32, device=device)
    if not capturing:
        _line[device, stream] = line
    return line


@cache
def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def by_kernel(d_y: Tensor, x: Tensor, candidate: Candidate) -> Tensor:
    """d_yᵀ x in float32: d_y (K, M), x (K, N), both copyable."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from groundup.kernels.weight_gradient_hopper import weight_gradient_kernel

    tile, (k, m), n = TILES[candidate.tile], d_y.shape, x.shape[1]
    p = plan(candidate, m, n, k, n_multiprocessors(x.device))
    out = torch.empty(m, n, dtype=torch.float32, device=x.device)
    a, b = (x, d_y) if candidate.turned else (d_y, x)
    work = torch.empty(max(1, p.slots * tile.rows * tile.columns), dtype=torch.float32, device=x.device)
    described = (
        TensorDescriptor(t, list(t.shape), [t.stride(0), 1], [64, width], tile_layout(64, width, t.dtype))
        for t, width in ((a, 64), (b, tile.width))
    )
    with torch.cuda.device(x.device):
        weight_gradient_kernel[(p.blocks,)](
            *described, out, work, flags(x.device, tile.consumers), a.shape[1], b.shape[1] // 8,
            -(-b.shape[1] // tile.columns), p.steps, *p.cut,
            CONSUMERS=tile.consumers, BN=tile.width, PIECES=tile.pieces, STAGES=tile.stages, TURNED=candidate.turned,
            REGISTERS=tile.registers, PRODUCER_REGISTERS=tile.producer_registers, num_warps=4,
        )  # fmt: skip
    return out
