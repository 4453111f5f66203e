"""How the weights move: optimizer, schedule, decay."""

from dataclasses import dataclass, replace
from typing import Literal

from groundup.errors import UserError

ORIGINAL_MUON_LR = 0.02
"""Jordan et al. (2024), for their factor of the shape."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, a warm-up, a schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for every parameter. muon: Muon for the hidden matrices, AdamW for embeddings, head and norms."""
    lr: float = 1e-3
    """Peak learning rate (with muon: AdamW's)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine, a straight line, a plateau with a straight line at its end (warm-up, stable,
    decay), or no change."""
    min_lr_ratio: float = 0.1
    """The learning rate at the last step as a fraction of the peak; constant knows no minimum."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    decay_share: float = 0.2
    """wsd: the last part of the steps, in which the learning rate falls."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on every matrix unless the next two say otherwise."""
    decay_norms: bool = False
    """Whether the gains of norms decay too."""
    decay_embeddings: bool = True
    """Whether the token embedding and the output head decay."""
    grad_clip: float = 1.0
    """Largest global L2 norm of the gradients; 0: no clipping."""
    muon_lr: float = 0.0
    """Muon's peak learning rate, before the factor of the shape; 0: lr (match-adamw) or 0.02 (original)."""
    muon_momentum: float = 0.95
    """Muon's (Nesterov) momentum."""
    muon_steps: int = 5
    """Newton-Schulz iterations."""
    muon_factor: Literal["match-adamw", "original"] = "match-adamw"
    """Factor of a matrix' learning rate. match-adamw: 0.2 · sqrt(max(d_out, d_in)), so that updates are as large as
    AdamW's and lr and decay carry over (Liu et al. 2025). original: sqrt(max(1, d_out / d_in)) (Jordan et al. 2024)."""
    master_weights: bool = True
    """bf16-pure: whether the optimizer keeps float32 weights and moments. Without, all of it is bf16 and each result is
    rounded up or down at random, in proportion to its distance."""

    def resolve(self) -> "OptimConfig":
        """The same with Muon's learning rate filled in, checked. Raises UserError naming the offending number."""
        if not self.lr > 0:
            raise UserError(f"optim.lr is {self.lr}; it must be positive")
        for name in ("min_lr_ratio", "warmup_steps", "eps", "weight_decay", "grad_clip", "muon_lr"):
            if not getattr(self, name) >= 0:
                raise UserError(f"optim.{name} is {getattr(self, name)}; it must not be negative")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise UserError(f"optim.betas holds {beta}; each must be in [0, 1)")
        if not 0 <= self.muon_momentum < 1:
            raise UserError(f"optim.muon_momentum is {self.muon_momentum}; it must be in [0, 1)")
        if not 0 <= self.decay_share <= 1:
            raise UserError(f"optim.decay_share is {self.decay_share}; it is a part of the steps, from 0 to 1")
        if self.muon_steps < 1:
            raise UserError(f"optim.muon_steps is {self.muon_steps}; it must be at least 1")
        if self.name != "muon" or self.muon_lr:
            return self
        return replace(self, muon_lr=self.lr if self.muon_factor == "match-adamw" else ORIGINAL_MUON_LR)
