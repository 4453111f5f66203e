"""A process that computes the same bits each time, compiled and on a GPU too; its cost is in docs/training.md.

Without it a compiled run on a GPU may differ in last bits from process to process: kernels are chosen by timing them,
and sums in an order that is not fixed (atomics; the embedding's gradient is the one in a language model) are rounded
as they come. With it torch takes an algorithm with a fixed order or refuses (the embedding's gradient is sorted by id
first), cuBLAS gets a workspace of its own, and inductor takes no decision by the clock. Torch would also fill every new
tensor with NaN, to show what reads memory that nobody wrote; that is off, as it changes no result and costs a pass.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(enabled: bool) -> Generator[None]:
    """Inside: deterministic algorithms only, if `enabled`. The settings before come back at the end.

    Enter it before the first matrix product on a GPU: cuBLAS reads its workspace from the environment once.
    """
    if not enabled:
        yield
        return
    import torch._inductor.config as inductor  # costs a second, which only such a run pays

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # a module with a property, which a type checker cannot see
    enabled_before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    before = cudnn.benchmark, inductor.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory, cudnn.benchmark, inductor.deterministic = False, False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled_before)
        memory.fill_uninitialized_memory = filled
        cudnn.benchmark, inductor.deterministic = before
