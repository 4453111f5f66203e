"""Cross entropy of next-token prediction."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groundup.model.layers import at_least_float32

IGNORE = -100
"""A target with this value counts neither in the loss nor in the number of valid tokens."""


def cross_entropy(
    logits: Float[Tensor, "... vocab"],
    targets: Int[Tensor, "..."],
    n_valid: Tensor | float | None = None,
) -> Float[Tensor, ""]:
    """Σ -log softmax(logits)[target] / n_valid in nats, in float32 at least.

    n_valid None: the number of valid targets here, so the mean. Given, it is the count over the whole global batch:
    the losses of all micro-batches and ranks then simply add up to the mean over all tokens. No valid target: 0.
    """
    wide = at_least_float32(logits)
    valid = targets != IGNORE
    chosen = wide.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = (torch.logsumexp(wide, dim=-1) - chosen) * valid
    return losses.sum() / (valid.sum().clamp(min=1) if n_valid is None else n_valid)
