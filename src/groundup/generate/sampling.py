"""From logits to the next token: temperature, top-k, top-p, min-p, and a draw that is reproducible.

The order is fixed: temperature, then top-k, then top-p, then min-p. Each step works on what the one before it left, so
top-p measures probabilities after the temperature and renormalised over the k tokens that top-k kept (the order of
most other samplers, hence the same numbers mean the same thing here). min-p compares with the likeliest token, which
every step keeps: it removes the same tokens wherever it stands after the temperature, and last it leaves top-p's
measure alone.

Cost per row of V logits: top-k O(V); top-p one sort, O(V log V); the draw O(V). All of it in float64: a vocabulary's
worth of doubles is nothing beside the model, and a temperature of 1e-3 or a nucleus of 0.9999 then means what it says.

The draw is the Gumbel-max trick: with independent E_i ~ Exponential(1), argmax(logit_i − log E_i) falls on i with
probability softmax(logits)_i. Rejected: inverting the cumulative distribution (rounding can land on a token of
probability zero) and `torch.multinomial` (needs normalised probabilities, at most 2^24 of them).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groundup.errors import UserError


def check_sampling(temperature: float, top_k: int, top_p: float, seed: int = 0, min_p: float = 0.0) -> None:
    """Raise UserError, with the legal range, for a setting that means nothing."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature}; it must be a number ≥ 0 (0: always the likeliest token)")
    if top_k < 0:
        raise UserError(f"top_k is {top_k}; it must be ≥ 0 (0: no limit)")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be in (0, 1] (1: no limit)")
    if not 0 <= min_p <= 1:
        raise UserError(f"min_p is {min_p}; it must be in [0, 1] (0: no limit)")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}; it must be in [0, 2^63)")


def check_finite(total: float) -> None:
    """Raise UserError where a float64 sum of logits is not finite: it is only if all of them are."""
    if not math.isfinite(total):
        raise UserError("the model's logits are not finite numbers; its weights are damaged or its training diverged")


def scale_by_temperature(logits: Float[Tensor, "... vocab"], temperature: float) -> Float[Tensor, "... vocab"]:
    """logits / temperature in float64, shifted so that the largest is 0. `temperature` > 0.

    The shift changes no probability; it keeps a tiny temperature from turning large logits into inf − inf.
    """
    logits = logits.double()
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Float[Tensor, "... vocab"], k: int) -> Float[Tensor, "... vocab"]:
    """All but the k largest logits become -inf; of equal logits at the border the lower ids stay. k = 0: all stay."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    border = logits.topk(k, dim=-1).values[..., -1:]
    above, equal = logits > border, logits == border
    room = k - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -math.inf)


def keep_top_p(logits: Float[Tensor, "... vocab"], p: float) -> Float[Tensor, "... vocab"]:
    """All logits outside the nucleus become -inf. p = 1: all stay.

    The nucleus (Holtzman et al. 2020, arXiv:1904.09751, eq. 2–3) is the smallest set of most likely tokens whose
    probabilities sum to at least p. A token belongs to it when the tokens *before* it do not reach p yet, so the token
    that crosses p is in and the set is never empty. Of equally likely tokens the lower ids come first.
    """
    if p >= 1:
        return logits
    ordered, order = logits.double().sort(stable=True, dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= p
    outside[..., 0] = False  # true already, unless a NaN got in
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -math.inf)


def keep_min_p(logits: Float[Tensor, "... vocab"], p: float) -> Float[Tensor, "... vocab"]:
    """All logits whose probability is below p times the likeliest token's become -inf. p = 0: all stay.

    Nguyen et al. 2024 (arXiv:2407.01082): a sure model gets a short list, an unsure one a long list. The ratio of two
    probabilities is exp of their logits' difference, so no softmax is needed.
    """
    if p == 0:
        return logits
    wide = logits.double()
    return logits.masked_fill(wide < wide.amax(-1, keepdim=True) + math.log(p), -math.inf)


def sample(
    logits: Float[Tensor, "... vocab"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    min_p: float = 0.0,
) -> Int[Tensor, "..."]:
    """Draw one token id a row (int64).

    temperature 0 takes the largest logit (the lowest id of equal ones) and draws nothing. `generator` lives on the
    logits' device and is advanced by one draw of the logits' size; without it torch's global one is. A sequence of
    them, one a row of logits (rows, vocab), gives each row the draw that it would have had alone. Raises UserError for
    settings out of range.
    """
    check_sampling(temperature, top_k, top_p, min_p=min_p)
    if temperature == 0:
        return logits.argmax(-1)
    scaled = keep_top_p(keep_top_k(scale_by_temperature(logits, temperature), top_k), top_p)
    scaled = keep_min_p(scaled, min_p)
    noise = torch.empty_like(scaled)
    if isinstance(generator, Sequence):
        for row, own in zip(noise, generator, strict=True):
            row.exponential_(generator=own)
    else:
        noise.exponential_(generator=generator)
    # An exponential of exactly 0 would give -inf + inf at a token that was ruled out.
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)
    return (scaled - noise.log()).argmax(-1)


def seeded_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """A random stream of its own: the global one is neither read nor moved.

    The same seed gives the same tokens on one kind of device; CPU and GPU number their streams differently.
    """
    return torch.Generator(device=device).manual_seed(seed)
