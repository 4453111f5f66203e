"""The learning rate as a function of the step alone, so that a resumed run needs no schedule state.

All schedules begin with a straight line from 0 at step 0 to `max_lr` at `warmup_steps` and stay at their last value
after `total_steps`. The training loop counts steps from 1: its first step already moves.
"""

from math import cos, pi

from groundup.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """The learning rate of optimizer step `step` under the schedule that `optim` names."""
    max_lr, min_lr, warmup = optim.lr, optim.lr * optim.min_lr_ratio, optim.warmup_steps
    if optim.schedule == "cosine":
        return cosine_lr(step, max_lr, min_lr, warmup, total_steps)
    if optim.schedule == "linear":
        return linear_lr(step, max_lr, min_lr, warmup, total_steps)
    if optim.schedule == "wsd":
        return wsd_lr(step, max_lr, min_lr, warmup, total_steps, round(optim.decay_share * total_steps))
    return constant_lr(step, max_lr, warmup)


def cosine_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """Half a cosine from `max_lr` after the warm-up to `min_lr` at `total_steps` (Loshchilov & Hutter 2017)."""
    if step <= warmup_steps:
        return max_lr * step / warmup_steps if warmup_steps else max_lr
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + 0.5 * (1 + cos(pi * progress)) * (max_lr - min_lr)


def linear_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """A straight line from `max_lr` after the warm-up to `min_lr` at `total_steps`."""
    if step <= warmup_steps:
        return max_lr * step / warmup_steps if warmup_steps else max_lr
    if step >= total_steps:
        return min_lr
    return max_lr + (min_lr - max_lr) * (step - warmup_steps) / (total_steps - warmup_steps)


def wsd_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int, decay_steps: int) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): `max_lr` until the last `decay_steps`, then a straight line.

    Only the decay knows `total_steps`: runs of any length have the same plateau. A warm-up that reaches into the decay
    delays it.
    """
    start = max(warmup_steps, total_steps - decay_steps)
    if warmup_steps <= step < start:
        return max_lr
    return linear_lr(step, max_lr, min_lr, warmup_steps if step < warmup_steps else start, total_steps)


def constant_lr(step: int, max_lr: float, warmup_steps: int) -> float:
    """`max_lr` after the warm-up."""
    return max_lr * step / warmup_steps if step < warmup_steps else max_lr
