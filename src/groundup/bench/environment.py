"""The stamp of every cell: what a reader must know to compare two numbers.

Published tables of the same model cannot be compared when they leave out the GPU, the TF32 flag, whether gradients
were recorded, or whether the first step was timed. Nothing here names a machine, a person or a path.
"""

import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from groundup import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and flags of this process, as they are now."""
    stamp: dict[str, Any] = {
        "device": device.type,
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "groundup": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        stamp |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cudnn": torch.backends.cudnn.version(),
            "cublas_workspace": "cleared between cells",
        }
    return stamp


@cache
def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _nvml() -> Any:
    """The initialised NVML binding, or None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: the stamp then has no clocks, the benchmark still runs
        return None
    return pynvml


def _driver() -> str | None:
    nvml = _nvml()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@cache
def _handle(device: torch.device) -> Any:
    """NVML's handle of torch's device: by UUID, since CUDA_VISIBLE_DEVICES renumbers only torch's."""
    return _nvml().nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def clocks(device: torch.device) -> dict[str, Any] | None:
    """Clocks (MHz), power (W), temperature (°C) and throttling of the GPU at this moment; None without NVML."""
    nvml = _nvml()
    if nvml is None or device.type != "cuda":
        return None
    try:
        handle = _handle(device)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "sm_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except nvml.NVMLError:
        return None
