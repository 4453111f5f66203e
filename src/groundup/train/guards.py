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

Last in the file: when validation losses say that it is time to stop, and whether they can be true.
"""

import lzma
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groundup.config import TrainConfig
from groundup.data import TokenData
from groundup.errors import UserError
from groundup.optim import Optimizer

WARMUP = 8
"""Losses that must be known before any can be a spike."""
LEAST_DEVIATION = 1e-3
"""Of the median: a window of (nearly) equal losses must not make a spike of each rounding error."""
SAMPLE = 1 << 20
"""Bytes of text that are compressed: 0.4 s."""
SHARE = 0.1
"""Of the compressor's bits, what a model can not do with."""
TOLERANCE = 0.1
"""Share by which bytes may differ: a tokenizer that normalises text changes some."""


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
            return inf
        middle = median(known)
        deviation = 1.4826 * median(abs(loss - middle) for loss in known)
        return middle + self.train.spike_threshold * max(deviation, LEAST_DEVIATION * abs(middle))

    def device_limit(self, step: int) -> float:
        """The loss above which the device skips `step`."""
        return self.limit(step) if self.train.skip_spikes else inf

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


@dataclass
class BestLoss:
    """Lowest validation loss, nats a token, the evaluations since: when to stop waiting for a better (Prechelt 1998).

    A function of the evaluations seen. A checkpoint of step k is written before the evaluation of step k, so it holds
    the state up to the evaluation before; `replay` catches up from the rows of metrics.jsonl.
    """

    min_delta: float = 0.0
    loss: float = inf
    step: int = 0
    """Where `loss` was found; 0: nowhere yet."""
    waited: int = 0
    """Evaluations since."""
    seen: int = 0
    """The step of the last evaluation that counted here."""

    def observe(self, step: int, loss: float) -> bool:
        """Count an evaluation; True where it is the best so far. The same step again changes nothing: a run killed
        between the save of its best and the evaluation's row evaluates once more.
        """
        if step == self.seen:
            return step == self.step
        self.seen = step
        better = loss < self.loss - self.min_delta
        if better:
            self.loss, self.step, self.waited = loss, step, 0
        else:
            self.waited += 1
        return better

    def replay(self, rows: Iterable[dict[str, Any]]) -> None:
        """Count the evaluations among `rows` that came after the last one counted."""
        for row in rows:
            if row["step"] > self.seen and "valid_loss" in row:
                self.observe(row["step"], row["valid_loss"])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it; an infinite loss is None."""
        state = asdict(self)
        del state["min_delta"]
        return {**state, "loss": None if self.loss == inf else self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict gave."""
        self.loss = inf if state["loss"] is None else state["loss"]
        self.step, self.waited, self.seen = state["step"], state["waited"], state["seen"]


def foreign_tokens(data: TokenData) -> str | None:
    """A line for people when the bytes of the validation ids are not those of the text that meta.json counted: ids that
    another tokenizer wrote stand for other bytes, and a loss over them is a loss over another text.
    """
    lengths, counted = data.token_bytes, data.meta["splits"]["valid"]["bytes"]
    found = sum(
        int(lengths[np.minimum(data.valid[start : start + SAMPLE], len(lengths) - 1)].sum())
        for start in range(0, len(data.valid), SAMPLE)
    )
    if abs(found - counted) <= TOLERANCE * max(counted, 1):
        return None
    return (
        f"the validation tokens in {data.directory} stand for {found:,} bytes of text, but meta.json counts "
        f"{counted:,}: another tokenizer may have written them; run groundup tokenize again"
    )


def least_bits_per_byte(data: TokenData) -> float:
    """A tenth of what xz needs for a byte of the validation text (its first MiB); 0 where there is no text.

    No language model comes far below a compressor: xz needs 2 to 2.5 bits for a byte of English prose, large models
    0.5, so a run that needs less than a tenth of what xz needs has seen its validation text, or does not predict it at
    all. Rejected: a fixed bound in bits per byte (a log file or a table is honestly that easy); a bound on the loss a
    token (it hangs on the tokenizer).
    """
    vocab = data.tokenizer().vocab
    text = b"".join(vocab.get(token, b"") for token in data.valid[: SAMPLE // 2].tolist())[:SAMPLE]
    return SHARE * 8 * len(lzma.compress(text, preset=6)) / len(text) if text else 0.0
