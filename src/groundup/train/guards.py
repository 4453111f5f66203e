"""Guards: steps that would spoil the weights are left out, counted, and end the run when they do not stop.

Where what is decided. Whether a step is applied is a function of three numbers that are on the device when backward
ends: the loss, the gradients' norm (not finite as soon as one gradient is not) and a limit for the loss that the host
computed from earlier rows. With many processes the flags are added up over them first, so all skip or none does. What
the decision was is read with the row, which on a GPU happens one step later: counting and stopping never make it wait.

Applying it: AdamW's kernel reads the flag on the device, and the host, which has counted the step, takes the count back
when it knows (optim/base.py). Every other optimizer is not called, which asks the host to wait for the flag: free on a
CPU, one pipeline bubble a step on a GPU, in which it does its own work, the row of the step before.
Rejected: a copy of weights and state to go back to (memory); zeroed gradients (moments and decay would still move the
weights); gradients clamped to finite numbers (a wrong step instead of none).

Spikes: a loss above median + threshold · 1.4826 · MAD of the last `spike_window` losses, where 1.4826 · MAD estimates a
standard deviation that outliers do not move. Flagged losses enter the window too, so a level that the loss stays on
becomes usual after half a window. The limit of step k comes from rows up to k - 2 everywhere, because a GPU run knows
no more by then: so a resumed run, and one on another device, decides alike.
"""

from collections import deque
from statistics import median
from typing import Any

import torch
from torch import Tensor

from groundup.config import TrainConfig
from groundup.errors import UserError
from groundup.optim import Optimizer

WARMUP = 8
"""Losses that must be known before any can be a spike."""
LEAST_DEVIATION = 1e-3
"""Of the median: a window of (nearly) equal losses must not make a spike of each rounding error."""


def to_skip(loss: Tensor, unsound: Tensor, limit: float) -> Tensor:
    """Whether a step must not be applied: a bool scalar on the device of `loss` (the global one).

    unsound: how many ranks found a gradient that is not finite. limit inf: every finite loss passes.
    """
    return ~(torch.isfinite(loss) & (unsound == 0) & (loss <= limit))


def apply_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, unless the flag is set; then weights and optimizer state stay as they are."""
    if isinstance(optimizer, Optimizer):
        optimizer.step_unless(skip)
    elif not skip.item():
        optimizer.step()


_NO_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a GPU or the machine has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


class Guards:
    """What the host knows of steps that were skipped or stood out."""

    def __init__(self, train: TrainConfig):
        self.train = train
        self.skipped = 0
        """Steps skipped in all."""
        self.in_a_row = 0
        """Steps skipped since the last one that was applied."""
        self._losses: deque[tuple[int, float]] = deque(maxlen=train.spike_window + 1)
        self._in_spike = False

    def limit(self, step: int) -> float:
        """The highest usual loss for `step`, from the rows up to step - 2; inf while too few are known."""
        known = [loss for at, loss in self._losses if at <= step - 2][-self.train.spike_window :]
        if not self.train.spike_threshold or len(known) < WARMUP:
            return float("inf")
        middle = median(known)
        deviation = 1.4826 * median(abs(loss - middle) for loss in known)
        return middle + self.train.spike_threshold * max(deviation, LEAST_DEVIATION * abs(middle))

    def device_limit(self, step: int) -> float:
        """The loss above which the device skips `step`."""
        return self.limit(step) if self.train.skip_spikes else float("inf")

    def observe(self, row: dict[str, Any]) -> str | None:
        """Count a step's row, add `spike` to it where its loss is one; returns a line for people, if there is news."""
        step, loss = row["step"], row["loss"]
        limit = self.limit(step)
        spike = loss is not None and loss > limit
        if loss is not None:
            self._losses.append((step, loss))
        news = spike and not self._in_spike
        self._in_spike = spike
        if spike:
            row["spike"] = True
        if not row.get("skipped"):
            self.in_a_row = 0
            return f"step {step:,}: the loss {loss:.4f} is a spike (usual: up to {limit:.4f})" if news else None
        self.skipped += 1
        self.in_a_row += 1
        what = (
            f"the loss {loss:.4f} is a spike"
            if spike
            else f"loss {_said(loss)}, gradient norm {_said(row['grad_norm'])}"
        )
        return f"step {step:,} skipped: {what} ({self.in_a_row} in a row, {self.skipped} in all)"

    def check(self, step: int) -> None:
        """Raise UserError when more steps in a row were skipped than train.max_skipped_steps."""
        if self.in_a_row > self.train.max_skipped_steps:
            raise UserError(
                f"step {step}: {self.in_a_row} steps in a row were skipped (loss or gradient not finite, or a spike); "
                "the run stopped and its last checkpoint is kept: try a lower optim.lr, more optim.warmup_steps or a "
                "smaller optim.grad_clip"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "losses": [list(pair) for pair in self._losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict gave."""
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        self._losses.extend((step, loss) for step, loss in state["losses"])


def _said(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
