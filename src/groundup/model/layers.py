"""The layers without a notion of position: linear, embedding, RMSNorm, feed-forward.

Each is written out in plain operations; where `kernels` says so (see `use_kernel`), one fused kernel does the same.
"""

from collections.abc import Callable
from math import sqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from groundup import kernels as fused
from groundup.kernels.backend import at_least_float32


def use_kernel(kernels: str, x: Tensor, fuses: bool = False) -> bool:
    """Whether a kernel takes the place of plain operations on `x` (ModelConfig.kernels); none knows float64.

    auto: on a GPU. `fuses`: what a compiler joins with its neighbours, as a norm with the residual sum and casts, and
    could not if it were a kernel; auto leaves that to the compiler where there is one.
    """
    auto = kernels == "auto" and x.is_cuda and not (fuses and torch.compiler.is_compiling())
    return (kernels == "triton" or auto) and x.dtype != torch.float64


def joined_product(x: Float[Tensor, "... d_in"], *layers: "Linear") -> Float[Tensor, "... d_outs"]:
    """x times the layers' weights, side by side, in one matrix product: larger products are faster, and the gradient
    of x is one product instead of a sum. The weights are copied together, which costs next to nothing beside a batch
    of activations, and too much beside a single token.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    return product(x, torch.cat(weights), layers[0].kernels)


def product(
    x: Float[Tensor, "... d_in"], weight: Float[Tensor, "d_out d_in"], kernels: str, residual: Tensor | None = None
) -> Tensor:
    """x Wᵀ, plus `residual`: (..., d_out)."""
    if use_kernel(kernels, x):
        return fused.linear(x, weight, residual)
    return x @ weight.T if residual is None else residual + x @ weight.T


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): close to x where |x| is small, never beyond ±cap (Gemma Team 2024, section 2)."""
    return cap * torch.tanh(x / cap)


def truncated_normal_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill `weight` from N(0, std²) cut at ±3 std, by inverting the normal's distribution function.

    Rejection would draw a varying number of random numbers; inversion draws one an element.
    """
    edge = torch.special.erf(torch.tensor(3 / sqrt(2))).item()
    with torch.no_grad():
        weight.uniform_(-edge, edge, generator=generator).erfinv_().mul_(sqrt(2) * std)
        # erfinv rounds: keep the promise to the last bit.
        weight.clamp_(-3 * std, 3 * std)


class Linear(nn.Module):
    """y = x Wᵀ, no bias. weight: (d_out, d_in)."""

    def __init__(self, d_in: int, d_out: int, kernels: str = "reference"):
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Variance 2 / (d_in + d_out): keeps the scale of activations and gradients (Glorot & Bengio 2010)."""
        d_out, d_in = self.weight.shape
        truncated_normal_(self.weight, sqrt(2 / (d_in + d_out)), generator)

    def forward(self, x: Float[Tensor, "... d_in"], residual: Tensor | None = None) -> Float[Tensor, "... d_out"]:
        return product(x, self.weight, self.kernels, residual)


class Embedding(nn.Module):
    """A row of a table for each token id. weight: (vocab_size, d_model)."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def init_weights(self, generator: torch.Generator | None = None, std: float = 1.0) -> None:
        truncated_normal_(self.weight, std, generator)

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d_model"]:
        return self.weight[ids]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), computed in float32 at least. weight: (d_model,)."""

    def __init__(self, d_model: int, eps: float = 1e-5, kernels: str = "reference"):
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        if use_kernel(self.kernels, x, fuses=True):
            return fused.rms_norm(x, self.weight, self.eps, backend=self.kernels)
        wide = at_least_float32(x)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) (Hendrycks & Gimpel 2016; Elfwing et al. 2017)."""
    return x * torch.sigmoid(x)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, Primer)."""
    return torch.relu(x).square()


class SwiGLU(nn.Module):
    """w2(silu(w1 x) ⊙ w3 x) (Shazeer 2020): w1 and w3 widen to d_ff, w2 brings back to d_model."""

    def __init__(self, d_model: int, d_ff: int, kernels: str = "reference"):
        super().__init__()
        self.kernels = kernels
        self.w1 = Linear(d_model, d_ff, kernels)
        self.w2 = Linear(d_ff, d_model, kernels)
        self.w3 = Linear(d_model, d_ff, kernels)

    def forward(self, x: Float[Tensor, "... d_model"], residual: Tensor | None = None) -> Float[Tensor, "... d_model"]:
        if torch.is_grad_enabled() and use_kernel(self.kernels, x):
            widen = torch.cat([self.w1.weight, self.w3.weight])
            return fused.swiglu_feed_forward(x, widen, self.w2.weight, residual, self.kernels)
        return self.w2(silu(self.w1(x)) * self.w3(x), residual)


class FeedForward(nn.Module):
    """w2(activation(w1 x)): w1 widens to d_ff, w2 brings back to d_model; no gate."""

    def __init__(self, d_model: int, d_ff: int, activation: Callable[[Tensor], Tensor], kernels: str = "reference"):
        super().__init__()
        self.activation = activation
        self.w1 = Linear(d_model, d_ff, kernels)
        self.w2 = Linear(d_ff, d_model, kernels)

    def forward(self, x: Float[Tensor, "... d_model"], residual: Tensor | None = None) -> Float[Tensor, "... d_model"]:
        return self.w2(self.activation(self.w1(x)), residual)


def feed_forward(kind: str, d_model: int, d_ff: int, kernels: str = "reference") -> SwiGLU | FeedForward:
    """The layer that ModelConfig.ffn names."""
    if kind == "swiglu":
        return SwiGLU(d_model, d_ff, kernels)
    return FeedForward(d_model, d_ff, {"silu": silu, "relu2": relu2}[kind], kernels)
