"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2).

float16 ends at 65504 and below 6e-8: small gradients of activations would vanish. So the loss is multiplied by a large
scale before backward and the gradients divided by it afterwards. A step whose gradients are not finite is skipped
(guards.py) and halves the scale; `growth_interval` sound steps in a row double it.

Scale and count live on the device, so nothing waits for them. Powers of two: scaling loses no bit.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

GROWTH, BACKOFF, LARGEST = 2.0, 0.5, 2.0**24


class LossScaler:
    """The scale and what moves it; not `enabled`, every method does nothing at all."""

    def __init__(
        self, enabled: bool, device: torch.device | str = "cpu", scale: float = 2.0**16, growth_interval: int = 2000
    ):
        self.enabled, self.growth_interval = enabled, growth_interval
        self.scale = torch.tensor(scale, device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Sound steps since the scale last changed."""

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss * self.scale if self.enabled else loss

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, in place; before they are clipped."""
        if self.enabled:
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, sound: Tensor) -> None:
        """`sound`: a scalar, non-zero where every gradient of the step was finite (on all ranks)."""
        if not self.enabled:
            return
        sound = sound.to(self.scale.device).bool()
        self.streak = torch.where(sound, self.streak + 1, 0)
        grown = self.streak >= self.growth_interval
        factor = torch.where(sound, torch.where(grown, GROWTH, 1.0), BACKOFF)
        self.scale = (self.scale * factor).clamp(1.0, LARGEST)
        self.streak = torch.where(grown, 0, self.streak)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it."""
        return {"scale": self.scale.item(), "streak": int(self.streak.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict gave."""
        self.scale.fill_(state["scale"])
        self.streak.fill_(state["streak"])
