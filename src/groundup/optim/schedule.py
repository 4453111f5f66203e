"""The learning rate as a function of the step alone, so that a resumed run needs no schedule state."""

from math import cos, pi


def cosine_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """Linear from 0 at step 0 to `max_lr` at `warmup_steps`, half a cosine down to `min_lr` at `total_steps`, constant.

    The cosine is Loshchilov & Hutter's (2017). The training loop counts steps from 1: its first step already moves.
    """
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + 0.5 * (1 + cos(pi * progress)) * (max_lr - min_lr)
