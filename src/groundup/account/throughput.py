"""Time of an eager step: a host that issues kernels one after another, a device that runs them in that order.

Two clocks go over the traced list of kernels. The host has issued kernel i when it has issued the one before and
`launch_us` have passed; the device ends it at

    end(i) = max(end(i - 1), issued(i)) + time(i),

with time(i) of device.py. A phase lasts from its predecessor's last kernel to its own last kernel, as events in the
device's queue measure it; the host waits for the device only at the end of the step. So a phase that the device
falls behind in hides the host's work of the next one. A cast that autocast puts in runs in C++ inside another
operation: it costs the host nothing here.

This replaces a roofline for each phase (the larger of kernels' sum and launches' sum, at peak rates), which was too
low in 40 of 42 measured cells. A host is noisy: what it decides cannot be predicted better than it repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from groundup.account.device import EAGER, Costs, kernel_ms
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
    """The device's time for kernels that multiply matrices."""
    elementwise: float
    """For all others, bound by memory traffic."""
    launch: float
    """The host's time: operations × time of one."""
    kernels: int
    issued: int
    """Kernels that are operations of their own: those that the host takes time for."""
    flops: int
    bytes: int
    total: float
    """From the end of the phase before to the end of this one, on the device."""

    @property
    def device(self) -> float:
        return self.matmul + self.elementwise

    @property
    def idle(self) -> float:
        """How long the device waited for the host."""
        return max(0.0, self.total - self.device)


def phase_times(kernels: Sequence[Kernel], gpu: Gpu, precision: str, costs: Costs) -> dict[str, PhaseTime]:
    """Time of each phase of a traced step."""
    times, host, device = {}, 0.0, 0.0
    for name in PHASES:
        inside = [k for k in kernels if k.phase == name]
        if not inside:
            continue
        before, issued = device, 0
        durations = [kernel_ms(k, gpu, precision, costs.kernel_us) for k in inside]
        for kernel, duration in zip(inside, durations, strict=True):
            if kernel.name != "autocast":
                issued += 1
                host += costs.launch_us / 1e3
            device = max(device, host) + duration
        times[name] = PhaseTime(
            matmul=sum(t for k, t in zip(inside, durations, strict=True) if k.flops),
            elementwise=sum(t for k, t in zip(inside, durations, strict=True) if not k.flops),
            launch=issued * costs.launch_us / 1e3,
            kernels=len(inside),
            issued=issued,
            flops=sum(k.flops for k in inside),
            bytes=sum(k.nbytes for k in inside),
            total=device - before,
        )
    return times


def throughput(
    config: ModelConfig,
    step: Step,
    gpu: Gpu,
    costs: Costs = EAGER,
    tokens: int = 0,
    dollars_per_hour: float = 0.0,
    gpus: int = 1,
) -> dict[str, float]:
    """Step time, MFU, tokens a second; days and cost for `tokens` tokens on `gpus` devices without communication.

    Keys: {forward,backward,optimizer,step} in ms with their parts; tokens_per_second (all devices); mfu (convention
    FLOP of the tokens / time / the GPU's peak in this precision); days, gpu_hours, cost where tokens are given.
    """
    setting = step.setting
    times = phase_times(step.kernels, gpu, setting.precision, costs)
    table: dict[str, float] = {}
    for name, time in times.items():
        table[name] = time.total
        table |= {f"{name}.matmul": time.matmul, f"{name}.elementwise": time.elementwise}
        table |= {f"{name}.launch": time.launch, f"{name}.idle": time.idle, f"{name}.kernels": time.kernels}
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
