"""Peak rates and memory of the GPUs people train on: one table, plain data.

Rates are dense (no sparsity) with float32 accumulation, in TFLOP/s (1e12 floating-point operations a second; a
multiply-add is two). Bandwidth is decimal GB/s of device memory, read and written bytes together. Two memory
figures: the datasheet's name of it in GB, and the GiB that CUDA reports as the device's total, which is what a
program can plan with. `h200-measured` holds what large torch matrix products and copies reached on one H200, so
that a prediction can be made from what is attainable instead of what is printed.
"""

import re
from dataclasses import dataclass

from groundup.errors import UserError, nearest_name


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one device."""

    name: str
    bf16_tflops: float
    """Dense bf16 matrix products, TFLOP/s."""
    tf32_tflops: float
    """Dense TF32 matrix products (float32 tensors, torch's TF32 flag on), TFLOP/s."""
    fp32_tflops: float
    """Float32 without tensor cores (torch's default for float32 matrix products), TFLOP/s."""
    bandwidth_gb_s: float
    """Device memory, decimal GB/s."""
    memory_gb: float
    """The datasheet's memory size (GB as the vendor prints it)."""
    memory_gib: float
    """What CUDA reports as the device's total memory, GiB (2**30 bytes)."""
    multiprocessors: int
    """Streaming multiprocessors: what takes a tile of a matrix product at a time."""
    source: str
    cublas_workspace_mib: float = 8.125
    """What torch gives cuBLAS for each thread and stream: 8.125 MiB, 32 MiB from Hopper on."""

    def matmul_tflops(self, precision: str) -> float:
        """Peak of the matrix products of a precision mode ("fp32", "tf32", "bf16-mixed", "bf16")."""
        if precision == "fp32":
            return self.fp32_tflops
        return self.tf32_tflops if precision == "tf32" else self.bf16_tflops


_TABLE = [
    Gpu("h200", 989, 494, 67, 4800, 141, 139.8, 132, "NVIDIA H200 datasheet (SXM, without sparsity)", 32),
    Gpu("h200-measured", 700, 390, 51, 4273, 141, 139.8, 132, "measured: torch 2.11, matmul n = 16384, copy", 32),
    Gpu("h100-sxm", 989, 494, 67, 3350, 80, 79.1, 132, "NVIDIA H100 datasheet (SXM5, without sparsity)", 32),
    Gpu("h100-pcie", 756, 378, 51, 2000, 80, 79.1, 114, "NVIDIA H100 datasheet (PCIe, without sparsity)", 32),
    Gpu("h100-nvl", 835, 418, 60, 3938, 94, 93.1, 132, "NVIDIA H100 datasheet (NVL, without sparsity)", 32),
    Gpu("a100-sxm-80gb", 312, 156, 19.5, 2039, 80, 79.2, 108, "NVIDIA A100 80GB datasheet (SXM4)"),
    Gpu("a100-sxm-40gb", 312, 156, 19.5, 1555, 40, 39.4, 108, "NVIDIA A100 40GB datasheet (SXM4)"),
    Gpu("a100-pcie-80gb", 312, 156, 19.5, 1935, 80, 79.2, 108, "NVIDIA A100 80GB datasheet (PCIe)"),
    Gpu("b200", 2250, 1125, 75, 7700, 180, 178.4, 148, "NVIDIA HGX B200 datasheet (per GPU, dense)", 32),
    Gpu("l40s", 362, 183, 91.6, 864, 48, 44.4, 142, "NVIDIA L40S datasheet (dense)"),
    Gpu("l4", 121, 60, 30.3, 300, 24, 22.0, 58, "NVIDIA L4 datasheet (without sparsity)"),
    Gpu("a10", 125, 62.5, 31.2, 600, 24, 22.1, 72, "NVIDIA A10 datasheet (dense)"),
    Gpu("rtx-5090", 209.5, 104.8, 104.8, 1792, 32, 31.4, 170, "NVIDIA RTX Blackwell whitepaper (FP32 accumulate)"),
    Gpu("rtx-4090", 165.2, 82.6, 82.6, 1008, 24, 23.6, 128, "NVIDIA Ada whitepaper (FP32 accumulate)"),
    Gpu("rtx-3090", 71, 35.6, 35.6, 936, 24, 23.7, 82, "NVIDIA GA102 whitepaper (FP32 accumulate)"),
]

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def gpu(name: str) -> Gpu:
    """The device called `name`. Raises UserError with the nearest name."""
    if name not in GPUS:
        raise UserError(f'no GPU "{name}" in the table{nearest_name(name, GPUS)}')
    return GPUS[name]


_DRIVER = {
    "h200": "h200-measured",
    "h100 nvl": "h100-nvl",
    "h100 pcie": "h100-pcie",
    "h100": "h100-sxm",
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100 80gb pcie": "a100-pcie-80gb",
    "b200": "b200",
    "l40s": "l40s",
    "l4": "l4",
    "a10": "a10",
    "rtx 5090": "rtx-5090",
    "rtx 4090": "rtx-4090",
    "rtx 3090": "rtx-3090",
}
"""Whole words in the driver's name of a device → its row, the measured one where there is one; the first match wins."""


def named_by_driver(text: str) -> Gpu | None:
    """The row of a GPU that the driver calls `text` ("NVIDIA H100 PCIe"); None for one that is not in the table."""
    words = re.sub(r"\s+", " ", text.lower())
    if "laptop" in words or "max-q" in words:  # other chips under the same numbers
        return None
    for mark, name in _DRIVER.items():
        if re.search(rf"(?<![a-z0-9]){re.escape(mark)}(?![a-z0-9])", words):
            return GPUS[name]
    return None
