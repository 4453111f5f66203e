"""Which implementation runs: what this machine can do, and a fallback that is seen.

Triton is imported only when a kernel is about to run, so the package works where Triton does not exist.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from groundup.errors import UserError, nearest_name

T = TypeVar("T")
HAS_TRITON = find_spec("triton") is not None
"""Whether Triton can be imported."""
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton runs its kernels in Python on the CPU; fixed when Triton is imported."""
FLOAT32_PRODUCT = torch.version.hip is None and os.environ.get("PYTORCH_TUNABLEOP_ENABLED", "0") != "1"
"""Whether PyTorch has a product of half-precision matrices into float32 here: cuBLAS alone, and not under TunableOp."""


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel can run on `x`: on a GPU, or on the CPU when interpreting."""
    return HAS_TRITON and (x.is_cuda or (x.device.type == "cpu" and INTERPRETING))


def choose(backend: str, x: Tensor, legal: Sequence[str] = ("auto", "triton", "torch")) -> str:
    """ "triton" or "torch" for `backend`; "auto" takes Triton on a GPU. UserError when Triton is asked for in vain.

    float64 is torch's: the kernels compute in float32.
    """
    if backend not in legal:
        raise UserError(f'kernel backend "{backend}" does not exist{nearest_name(backend, legal)}')
    if backend == "auto":
        return "triton" if x.is_cuda and HAS_TRITON and x.dtype != torch.float64 else "torch"
    if backend == "triton" and not runs_triton(x):
        why = "Triton is not installed" if not HAS_TRITON else f"the tensor is on {x.device}"
        raise UserError(f'kernel backend "triton" cannot run: {why}; use "auto" or "torch"')
    if backend == "triton" and x.dtype == torch.float64:
        note_fallback('kernel backend "triton"', "no kernel for float64; using torch")
        return "torch"
    return backend


def wide_type(x: Tensor) -> torch.dtype:
    """float32 for half precision, else x's own type."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 when it is in half precision, else as it is."""
    return x.to(wide_type(x))


def fit(ok: bool, what: str, **tensors: Tensor | None) -> None:
    """UserError with the shapes of the tensors that are there, unless `ok`."""
    if not ok:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items() if x is not None)
        raise UserError(f"{what}: {shapes} do not fit together")


def decided_once(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, run once for the same arguments and a constant in a compiled graph.

    Two functions, for torch.compile looks through a cache at what is inside and would break its graph there.
    """
    kept = cache(function)

    def decided(*arguments: Any) -> T:
        return kept(*arguments)

    # What torch.compiler.assume_constant_result sets; calling that imports the compiler, which takes seconds.
    decided._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return decided


@decided_once
def note_fallback(what: str, why: str) -> None:
    """Say once a process that a fast path was left for a slower one."""
    warnings.warn(f"{what}: {why}", stacklevel=4)


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise where a backward is to be differentiated itself: what it returns would count as a constant, silently."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative; {instead}")


def proven(proofs: dict[Any, bool], key: Any, what: str, instead: str, check: Callable[[], bool]) -> bool:
    """Whether a kernel came out right on the small problem of `check`, which runs once for each `key`.

    Where not, it is said once that `instead` runs; so it is in a CUDA graph that is captured before, for the check
    would be recorded. Inside the check the kernel counts as right.
    """
    if key not in proofs:
        if torch.cuda.is_current_stream_capturing():
            note_fallback(what, f"not checked before this CUDA graph, which keeps {instead}: run a step before capture")
            return False
        proofs[key] = True
        why = "wrong on a small check"
        try:
            proofs[key] = check()
        except Exception as error:
            proofs[key], why = False, f"{type(error).__name__} at its first use: {str(error)[:200]}"
        if not proofs[key]:
            note_fallback(what, f"{why}; using {instead}")
    return proofs[key]


def agree(a: Tensor, b: Tensor, within: float = 1e-2) -> bool:
    """Whether a kernel's result is another's but for rounding to half precision. Written so that NaN fails."""
    return float((a.float() - b.float()).norm() / b.float().norm()) < within


def launch(x: Tensor, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start `programs` programs of a Triton kernel on the device of `x`; by itself Triton takes the current one."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel[(programs,)](*arguments, **constants)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may use; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether the GPU multiplies whole tiles from shared memory (Hopper and later), and not 16 rows from registers."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def n_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 stands in for them in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
