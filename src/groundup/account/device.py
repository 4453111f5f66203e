"""Time of one kernel on the device, from its shape: tiles of a matrix product in waves, passes over memory.

A matrix product is cut into tiles of 128 × 128 results; the device's multiprocessors take one each, so the last wave
runs as long as a full one and a ragged edge costs a whole tile ("tile and wave quantisation" in NVIDIA's matrix
multiplication guide). Where the waves are few, cuBLAS also cuts the k dimension and adds the parts up (split-k); the
cheapest cut counts here. No product is faster than its traffic. Everything else is a pass over memory at a share of the
copy rate, and every kernel takes a fixed time: start, drain, and the gap to the next one.

The constants come from benchmarks on an H200; docs/bench.md has the fit and its errors. Left out: small tensors that
stay in L2 (faster), fused attention kernels (taken at the peak rate: a floor), more than one stream.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil

from groundup.account.hardware import Gpu
from groundup.account.tape import Kernel

TILE = 128
"""Rows and columns of results that one multiprocessor computes at a time."""
SPLITS = (1, 2, 4, 8)
"""Pieces that the k dimension may be cut into, each of SHORTEST_K at least."""
SHORTEST_K = 256
EVEN, FOREACH, UNEVEN = 1.0, 0.86, 0.55
"""Shares of the copy rate: one shape throughout; lists of tensors; broadcasts, reductions, gathers."""


@dataclass(frozen=True)
class Costs:
    """What the device's peak rates do not tell, in microseconds.

    Measured on an H200 in a virtual machine that names its processor only "Intel(R) Xeon(R) Processor", Python 3.12,
    torch 2.11. A host's speed is its own: `launch_us` of another one may be half of it, and on the same one it varied
    by a fifth from process to process.
    """

    launch_us: float = 28.0
    """The host's time for one operation of eager mode, from Python through autograd to the launch."""
    kernel_us: float = 4.5
    """The device's fixed time for one kernel."""


EAGER = Costs()


def kernel_ms(kernel: Kernel, gpu: Gpu, precision: str, kernel_us: float) -> float:
    """Milliseconds of one kernel, from the end of the one before it when nothing has to be waited for."""
    return kernel_us / 1e3 + (product_ms(kernel, gpu, precision) if kernel.flops else pass_ms(kernel, gpu))


def pass_ms(kernel: Kernel, gpu: Gpu) -> float:
    share = (FOREACH if kernel.name.startswith("foreach") else EVEN) if kernel.even else UNEVEN
    return kernel.nbytes / (share * gpu.bandwidth_gb_s) / 1e6


def product_ms(kernel: Kernel, gpu: Gpu, precision: str) -> float:
    """Milliseconds of a matrix product; of a fused attention kernel at the peak rate."""
    peak = gpu.bf16_tflops if kernel.dtype == "bf16" else gpu.matmul_tflops("tf32" if precision == "tf32" else "fp32")
    if kernel.name.startswith("flash"):
        return max(kernel.flops / peak / 1e9, kernel.nbytes / gpu.bandwidth_gb_s / 1e6)
    itemsize = 2 if kernel.dtype == "bf16" else 4
    return max(tiled_ms(*kernel.shape, itemsize, peak, gpu), kernel.nbytes / gpu.bandwidth_gb_s / 1e6)


@cache
def tiled_ms(batch: int, m: int, k: int, n: int, itemsize: int, peak: float, gpu: Gpu) -> float:
    """waves · (time of one tile), for the cheapest cut of k; a cut writes its parts and reads them again."""
    tiles = batch * ceil(m / TILE) * ceil(n / TILE)
    tile = 2 * TILE * TILE * k / (peak / gpu.multiprocessors * 1e9)
    best = ceil(tiles / gpu.multiprocessors) * tile
    for parts in SPLITS[1:]:
        if k // parts < SHORTEST_K:
            break
        traffic = (parts + 1) * batch * m * n * itemsize / gpu.bandwidth_gb_s / 1e6
        best = min(best, ceil(tiles * parts / gpu.multiprocessors) * tile / parts + traffic)
    return best
