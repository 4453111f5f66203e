"""Output head and cross entropy of next-token prediction."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groundup.kernels import linear_cross_entropy
from groundup.kernels.backend import at_least_float32
from groundup.kernels.linear_cross_entropy import IGNORE, given_count
from groundup.model.layers import Linear, soft_cap, use_kernel


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
    count = valid.sum().clamp(min=1) if n_valid is None else given_count(n_valid, wide.dtype, wide.device)
    return losses.sum() / count


class Head(Linear):
    """The output head: logits of the next token, or the loss when targets are given. weight: (vocab_size, d_model)."""

    def __init__(self, d_model: int, vocab_size: int, softcap: float = 0.0, kernels: str = "reference"):
        super().__init__(d_model, vocab_size, kernels)
        self.softcap = softcap

    def forward(  # pyrefly: ignore[bad-override]
        self,
        x: Float[Tensor, "... d_model"],
        targets: Int[Tensor, "..."] | None = None,
        n_valid: Tensor | float | None = None,
    ) -> Tensor:
        return logits_or_loss(x, self.weight, targets, n_valid, self.softcap, self.kernels)


def logits_or_loss(
    x: Float[Tensor, "... d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, "..."] | None,
    n_valid: Tensor | float | None,
    softcap: float,
    kernels: str,
) -> Tensor:
    """x Wᵀ (soft-capped in float32 at least), or with targets its cross entropy.

    Where ModelConfig.kernels says so, the loss comes from kernels.linear_cross_entropy, which never holds all logits.
    """
    never_full = kernels == "loss" or (kernels == "auto" and x.is_cuda and x.dtype != torch.float64)
    if targets is not None and (never_full or use_kernel(kernels, x)):
        backend = "triton" if kernels == "triton" else "auto"
        return linear_cross_entropy(x, weight, targets, n_valid, softcap=softcap, backend=backend)
    logits = x @ weight.T
    if softcap:
        logits = soft_cap(at_least_float32(logits), softcap)
    return logits if targets is None else cross_entropy(logits, targets, n_valid)
