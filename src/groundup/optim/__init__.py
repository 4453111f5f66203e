"""How weights move: AdamW, the learning-rate schedule, gradient clipping."""

from groundup.optim.adamw import AdamW, parameter_groups
from groundup.optim.clip import clip_grad_norm
from groundup.optim.schedule import cosine_lr

__all__ = ["AdamW", "clip_grad_norm", "cosine_lr", "parameter_groups"]
