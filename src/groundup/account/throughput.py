"""Time of a step from peak rates: a roofline for each kernel (Williams, Waterman & Patterson 2009).

A kernel takes the longer of arithmetic (FLOP / peak of its data type) and traffic (bytes / bandwidth); kernels of a
phase follow one another. An eager step cannot run faster than Python launches it, so a phase takes the longer of its
kernels' sum and (number of kernels) × (time of a launch). What it leaves out makes it an optimistic floor: tiles that
do not fill the GPU, caches (which make small kernels faster than their traffic says), gaps between kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from groundup.account.flops import convention_per_token
from groundup.account.hardware import Gpu
from groundup.account.memory import Setting, Step, trace
from groundup.account.tape import Kernel
from groundup.config import ModelConfig
from groundup.errors import UserError

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class PhaseTime:
    """Milliseconds of one phase."""

    matmul: float
    """Kernels that multiply matrices."""
    elementwise: float
    """All others, bound by memory traffic."""
    launch: float
    """The host's share: launches × time of one."""
    kernels: int
    flops: int
    bytes: int

    @property
    def total(self) -> float:
        return max(self.matmul + self.elementwise, self.launch)


def kernel_ms(kernel: Kernel, gpu: Gpu, precision: str) -> float:
    """Roofline time of one kernel in milliseconds."""
    if not kernel.flops:
        return kernel.nbytes / gpu.bandwidth_gb_s / 1e6
    peak = gpu.bf16_tflops if kernel.dtype == "bf16" else gpu.matmul_tflops("tf32" if precision == "tf32" else "fp32")
    return max(kernel.flops / peak / 1e9, kernel.nbytes / gpu.bandwidth_gb_s / 1e6)


def phase_times(kernels: Sequence[Kernel], gpu: Gpu, precision: str, launch_us: float) -> dict[str, PhaseTime]:
    """Time of each phase of a traced step."""
    times = {}
    for name in PHASES:
        inside = [k for k in kernels if k.phase == name]
        if not inside:
            continue
        matmul = sum(kernel_ms(k, gpu, precision) for k in inside if k.flops)
        other = sum(kernel_ms(k, gpu, precision) for k in inside if not k.flops)
        times[name] = PhaseTime(
            matmul,
            other,
            len(inside) * launch_us / 1e3,
            len(inside),
            sum(k.flops for k in inside),
            sum(k.nbytes for k in inside),
        )
    return times


def throughput(
    config: ModelConfig,
    step: Step,
    gpu: Gpu,
    launch_us: float = 8.0,
    tokens: int = 0,
    dollars_per_hour: float = 0.0,
    gpus: int = 1,
) -> dict[str, float]:
    """Step time, MFU, tokens a second; days and cost for `tokens` tokens on `gpus` devices without communication.

    Keys: {forward,backward,optimizer,step} in ms with their parts; tokens_per_second (all devices); mfu (convention
    FLOP of the tokens / time / the GPU's peak in this precision); days, gpu_hours, cost where tokens are given.
    """
    setting = step.setting
    times = phase_times(step.kernels, gpu, setting.precision, launch_us)
    table: dict[str, float] = {}
    for name, time in times.items():
        table[name] = time.total
        table |= {f"{name}.matmul": time.matmul, f"{name}.elementwise": time.elementwise}
        table |= {f"{name}.launch": time.launch, f"{name}.kernels": time.kernels}
    table["step"] = sum(time.total for time in times.values())
    here = setting.batch * setting.context
    table["tokens_per_second"] = gpus * here / table["step"] * 1e3
    useful = here * convention_per_token(config, setting.context)
    if setting.mode == "forward":
        useful //= 3
    table["mfu"] = useful / table["step"] / 1e9 / gpu.matmul_tflops(setting.precision)
    if tokens:
        seconds = tokens / table["tokens_per_second"]
        table |= {"steps": ceil(tokens / (here * gpus)), "days": seconds / 86400, "gpu_hours": gpus * seconds / 3600}
        table["cost"] = table["gpu_hours"] * dollars_per_hour
    return table


def max_batch(config: ModelConfig, setting: Setting, memory_gib: float, reserve_gib: float = 1.0) -> int:
    """The largest batch whose peak fits `memory_gib` less `reserve_gib` (CUDA's own memory, fragments); 0: not one.

    The peak is a straight line in the batch up to the allocator's rounding: two traces give it, two more confirm.
    """
    if memory_gib <= reserve_gib:
        raise UserError(f"memory is {memory_gib} GiB; it must be more than the {reserve_gib} GiB set aside")
    room = (memory_gib - reserve_gib) * 2**30

    @cache
    def peak(batch: int) -> int:
        step = trace(config, replace(setting, batch=batch))
        return max(step.phases[name].peak for name in PHASES if name in step.phases)

    if peak(1) > room:
        return 0
    low, high = 1, 2
    while peak(high) <= room:
        slope = max(1, (peak(high) - peak(low)) // (high - low))
        low, high = high, max(high + 1, high + int((room - peak(high)) // slope) + 1)
        if low > 2**20:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= room else (low, middle)
    return low
