"""The precision modes of the benchmarks, and what they switch.

fp32: float32 throughout, TF32 off. tf32: the same tensors, matrix products on the tensor cores' TF32 mode (10 bits of
mantissa). bf16: torch.autocast to bfloat16 around forward and loss; weights, gradients and optimizer state stay
float32. Casting the whole model to bf16 is another thing (and another loss curve), so it does not share the name.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""For benchmarks in which all tensors have one type."""
PRECISIONS = ("fp32", "tf32", "bf16")


def use_precision(name: str, device: torch.device) -> AbstractContextManager:
    """Set this process's TF32 flag for `name`; return the context that belongs around forward and loss."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    if name == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def tensor_name(dtype: torch.dtype) -> str:
    """How a stamp describes a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_name(name: str) -> str:
    return {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16 autocast, float32 weights"}[name]
