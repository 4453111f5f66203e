"""Token files → the batch of a step on the device.

A batch is a pure function of the step, so reading ahead carries no state: one background thread reads the batch of the
next step while the current one trains, and a resumed run asks for its first step like any other.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from groundup.data import WindowSampler
from groundup.parallel.processes import World


@dataclass(frozen=True)
class Batch:
    """This rank's sequences of one step."""

    inputs: Int[Tensor, "sequences context_length"]
    targets: Int[Tensor, "sequences context_length"]
    n_valid: int
    """Valid targets of the whole global batch, over all micro-batches and ranks."""

    def micro_batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of `size` sequences on the device; from pinned memory the copy does not wait."""
        pieces = zip(self.inputs.split(size), self.targets.split(size), strict=True)
        for inputs, targets in pieces:
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def read_batch(tokens: np.ndarray, sampler: WindowSampler, step: int, world: World, pin: bool) -> Batch:
    """The batch of optimizer step `step` (counted from 1). Raises UserError for an id the model has no row for."""
    inputs, targets = map(torch.from_numpy, sampler.batch(tokens, step - 1, rank=world.rank, world_size=world.size))
    if pin:
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    # Every target of a window is valid and every rank has as many, so the global count needs no communication.
    return Batch(inputs, targets, targets.numel() * world.size)


def prefetched(read: Callable[[int], Batch], first: int, last: int) -> Iterator[tuple[int, Batch]]:
    """(step, batch) for the steps first … last, each read while the one before is in use."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="groundup-batches") as thread:
        coming = thread.submit(read, first) if first <= last else None
        for step in range(first, last + 1):
            assert coming is not None
            batch = coming.result()
            if step < last:
                coming = thread.submit(read, step + 1)
            yield step, batch
