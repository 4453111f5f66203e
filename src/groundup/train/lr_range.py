"""The learning-rate range test (Smith 2017): one short run whose learning rate grows exponentially from step to step.

Too low, and the loss hardly moves; too high, and it rises. In between it falls steepest. The test ends when the loss
diverges: not finite, or its running mean `DIVERGED` times the lowest one. Then weights, optimizer state, random numbers
and loss scale are put back, so the model is what it was.

Smoothing: an exponential mean forwards and backwards, which has no lag, so the curve's features stay at their learning
rates. The suggestion is a tenth of the rate of the lowest loss: at that rate itself a longer run is likely to diverge.
The steepest fall against log(lr) is told too; it is the careful end. For a language model it is mostly where the word
frequencies are learnt, and too low for the rest (docs/training.md has the figures).
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch

from groundup.errors import UserError
from groundup.train.job import Job
from groundup.train.loop import training_step
from groundup.train.resume import rng_state, set_rng_state

BETA = 0.8
"""Of the exponential means."""
DIVERGED = 1.25
"""Times the lowest running mean of the loss."""
FEWEST = 10
"""Points that a curve needs before anything can be read off it."""


@dataclass(frozen=True)
class LrRange:
    """The curve of a range test and what it says."""

    rates: list[float]
    """Learning rate of each step made."""
    losses: list[float]
    """Loss of each step, nats a token, as far as it was finite (the last step's may not be)."""
    smoothed: list[float]
    """The losses without their noise."""
    suggestion: float
    """A peak learning rate to try."""
    steepest: float
    """The rate at which the smoothed loss falls steepest."""
    lowest: float
    """The rate at which the smoothed loss is lowest."""
    diverged: float | None
    """The rate at which the test stopped; None: the loss never diverged, so the range should reach higher."""


def lr_range(
    job: Job,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 200,
    on_step: Callable[[int, float, float], None] = lambda step, lr, loss: None,
) -> LrRange:
    """Sweep the learning rate of `job` from `lowest` to `highest` and leave the job as it was.

    `on_step` is told (step from 1, learning rate, loss). Batches are those of the run's first steps. Raises UserError
    for a senseless range, and when the loss diverges before anything can be seen.
    """
    if not 0 < lowest < highest:
        raise UserError(f"the learning rates go from {lowest:g} to {highest:g}; they must be positive and rise")
    if steps < FEWEST:
        raise UserError(f"{steps} steps are too few for a curve; give at least {FEWEST}")
    if job.engine is not None:
        raise UserError("a range test is one process: run it on one GPU, with the batch of one step")
    restore = _remembered(job)
    try:
        rates, losses, diverged = _sweep(job, lowest, highest, steps, on_step)
    finally:
        restore()
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < FEWEST:
        raise UserError(f"the loss diverged at a learning rate of {rates[-1]:g}, step {len(rates)}; start lower")
    smoothed = smooth(finite)
    steepest, low = _steepest(rates, smoothed), rates[smoothed.index(min(smoothed))]
    return LrRange(rates, finite, smoothed, low / 10, steepest, low, diverged)


def smooth(losses: list[float]) -> list[float]:
    """Exponential means in both directions, without lag; each starts unbiased."""
    return _running_mean(_running_mean(losses)[::-1])[::-1]


def _running_mean(values: list[float]) -> list[float]:
    """Σ β^(k-i) v_i / Σ β^(k-i) for each k."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = BETA * total + value, BETA * weight + 1
        means.append(total / weight)
    return means


def _sweep(
    job: Job, lowest: float, highest: float, steps: int, on_step: Callable[[int, float, float], None]
) -> tuple[list[float], list[float], float | None]:
    rates, losses, best = [], [], math.inf
    for step in range(1, steps + 1):
        lr = lowest * (highest / lowest) ** ((step - 1) / (steps - 1))
        loss = training_step(job, job.read(step), lr)[0].item()
        rates.append(lr)
        losses.append(loss)
        on_step(step, lr, loss)
        mean = _running_mean(losses[-64:])[-1]
        best = min(best, mean) if step >= FEWEST else best
        if not math.isfinite(loss) or mean > DIVERGED * best:
            return rates, losses, lr
    return rates, losses, None


def _steepest(rates: list[float], smoothed: list[float]) -> float:
    """The rate of the steepest fall before the lowest loss; the steps are equally spaced in log(lr)."""
    end = max(2, smoothed.index(min(smoothed)) + 1)
    slopes = [after - before for before, after in pairwise(smoothed[:end])]
    at = slopes.index(min(slopes))
    return math.sqrt(rates[at] * rates[at + 1])


def _remembered(job: Job) -> Callable[[], None]:
    """Copy all that a step changes; the result puts it back."""
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in job.model.state_dict().items()}
    optimizer = deepcopy(job.optimizer.state_dict())
    random, scale = rng_state(job.device), job.scaler.state_dict()

    @torch.no_grad()
    def restore() -> None:
        job.model.load_state_dict(weights)
        job.optimizer.load_state_dict(optimizer)
        job.optimizer.zero_grad(set_to_none=True)
        set_rng_state(random, job.device)
        job.scaler.load_state_dict(scale)

    return restore
