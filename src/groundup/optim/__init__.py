"""How weights move: AdamW, Muon, learning-rate schedules, gradient clipping.

adamw.py, muon.py  the two optimizers; base.py: what they share, bf16 weights included
groups.py          which parameter is moved how
schedule.py        the learning rate of a step
clip.py            the gradients' norm
"""

from groundup.optim.adamw import AdamW
from groundup.optim.base import Optimizer
from groundup.optim.clip import clip_grad_norm
from groundup.optim.groups import describe_groups, make_optimizer, parameter_groups, set_learning_rate
from groundup.optim.muon import Muon, newton_schulz
from groundup.optim.schedule import constant_lr, cosine_lr, learning_rate, linear_lr, wsd_lr

__all__ = [
    "AdamW",
    "Muon",
    "Optimizer",
    "clip_grad_norm",
    "constant_lr",
    "cosine_lr",
    "describe_groups",
    "learning_rate",
    "linear_lr",
    "make_optimizer",
    "newton_schulz",
    "parameter_groups",
    "set_learning_rate",
    "wsd_lr",
]
