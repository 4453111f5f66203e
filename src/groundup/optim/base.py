"""What AdamW and Muon share: whose turn it is, and weights narrower than float32.

A bf16 weight has 8 bits of mantissa: an update smaller than 1/512 of it is lost when it is rounded to nearest, and at
usual learning rates most are. Two ways out:

master weights: the optimizer keeps weight and moments in float32, and the model's bf16 weight is a rounded copy. With
AdamW 12 bytes a parameter beside the weight's 2 (Micikevicius et al. 2018, section 3.1).

stochastic rounding: nothing is wider than bf16 between steps (with AdamW 4 bytes a parameter beside the weight). A step
is computed in float32 and rounded up with the probability of its distance from below, so it is right on average (Gupta
et al. 2015). The random bits are a function of (seed, step, place in the optimizer): a resumed run rounds alike, and so
do all ranks of a data-parallel one, without any state.

Rounded stochastically, parameters are taken one at a time, so the float32 temporaries are those of the largest one.
With master weights a group is one update, as in float32: the kernel reads bf16 gradients and writes the copies.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

MASTER = "master"
NARROW = (torch.bfloat16,)


class Optimizer(torch.optim.Optimizer):
    """A step over the parameters that have a gradient. State a parameter: `step` (int) and the tensors of `moments`."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], master_weights: bool, seed: int):
        self.master_weights, self.seed = master_weights, seed
        self.flag: Tensor | None = None
        """What `update` must heed on the device, while step_unless runs."""
        self.factor: Tensor | None = None
        """A scalar on the device that the next step multiplies the gradients by, if `heeds_flag`."""
        self._counted: list[dict[str, Any]] = []
        """States whose step the newest call has counted."""
        self._unknown: tuple[Tensor, Any] | None = None
        """The flag of a step that may not have taken place: on its way to the host, and the event of its arrival."""
        super().__init__(params, defaults)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the tensors that the state of a group's parameters holds."""
        raise NotImplementedError

    def update(
        self, columns: list[list[Tensor]], step: int, group: dict[str, Any], copies: Sequence[Tensor] = ()
    ) -> None:
        """Step number `step` (from 1), in place: `columns` are weights, gradients, then each of `moments`.

        copies: bf16 tensors that receive the new weights, rounded; the gradients may be bf16 then.
        """
        raise NotImplementedError

    def heeds_flag(self) -> bool:
        """Whether `update` heeds `flag`, by which it leaves a step out on the device, and `factor`."""
        return False

    def step_unless(self, skip: Tensor) -> None:
        """`step()`, unless the flag (a bool scalar) is set; then weights and state stay as they are.

        Where the update heeds a flag on the device, the host does not wait for it: the step is counted, and taken back
        by `settle`, which the next step and state_dict call.
        """
        if not self.heeds_flag():
            if not skip.item():
                self.step()
            return
        self.flag = skip
        try:
            self.step()
        finally:
            self.flag = None
        on_host, arrival = skip, None
        if skip.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(skip, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(skip.device))
        self._unknown = on_host, arrival

    def settle(self) -> None:
        """Wait for the flag of the step before, and take its count back if it was left out."""
        if self._unknown is None:
            return
        (flag, arrival), self._unknown = self._unknown, None
        if arrival is not None:
            arrival.synchronize()
        if flag.item():
            for state in self._counted:
                state["step"] -= 1

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        self._counted.clear()
        place = 0
        for group in self.param_groups:
            for step, params in self._by_step(group).items():
                wide = [p for p in params if p.dtype not in NARROW]
                if wide:
                    self.update([wide, *self._gradients_and_moments(wide, group)], step, group)
                narrow = [p for p in params if p.dtype in NARROW]
                mastered = [p for p in narrow if MASTER in self.state[p]]
                if mastered:
                    masters = [self.state[p][MASTER] for p in mastered]
                    self.update([masters, *self._gradients_and_moments(mastered, group)], step, group, mastered)
                for index, p in enumerate(narrow, place):
                    if MASTER not in self.state[p]:
                        self._update_by_chance(p, step, group, index)
                place += len(narrow)
        self.factor = None
        return loss

    def _gradients_and_moments(self, params: list[Tensor], group: dict[str, Any]) -> list[list[Tensor]]:
        states = ([self.state[p][name] for p in params] for name in self.moments(group))
        return [[cast(Tensor, p.grad) for p in params], *states]

    def _by_step(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Count the step of every parameter with a gradient; parameters that joined later are at another number."""
        found: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self._state_of(p, group)
            state["step"] += 1
            self._counted.append(state)
            found.setdefault(int(state["step"]), []).append(p)
        return found

    @torch.no_grad()
    def make_state(self) -> None:
        """Take the memory of the state now, and not in the first step."""
        for group in self.param_groups:
            for p in group["params"]:
                self._state_of(p, group)

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """State of a parameter, which comes to be here."""
        state = self.state[p]
        if not state:
            keeps_master = p.dtype in NARROW and self.master_weights
            like = p.float() if keeps_master else p
            state.update(step=0, **{name: torch.zeros_like(like) for name in self.moments(group)})
            if keeps_master:
                state[MASTER] = like
        return state

    def _update_by_chance(self, p: Tensor, step: int, group: dict[str, Any], place: int) -> None:
        grad = own_part(p.grad).float()
        stored = [own_part(x) for x in (p, *(self.state[p][name] for name in self.moments(group)))]
        weight, *moments = (tensor.float() for tensor in stored)
        self.update([[weight], [grad], *([moment] for moment in moments)], step, group)
        # A hash, because the CPU's generator takes the low 32 bits of a seed only.
        key = blake2b(f"{self.seed} {step} {place}".encode(), digest_size=8).digest()
        generator = torch.Generator(p.device).manual_seed(int.from_bytes(key))
        for target, value in zip(stored, [weight, *moments], strict=True):
            stochastic_round_(target, value, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast every tensor to its parameter's type: here float32 state stays float32."""
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and p.dtype in NARROW:
                    self.state[p][name] = value.to(p.device, copy=True)


def own_part(x: Any) -> Tensor:
    """This rank's part of a DTensor (a shard of FSDP2's), in the same memory; any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def stochastic_round_(target: Tensor, value: Tensor, generator: torch.Generator | None = None) -> None:
    """Write float32 `value` into bf16 `target`, each up or down with the probability of its distance from below.

    bf16 is float32 without its low 16 bits. Adding a uniform 16-bit number before they are cut off carries with
    probability low / 2^16, which is just that distance (in magnitude, so for both signs).
    """
    noise = torch.randint(1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    target.copy_((noise.add_(value.contiguous().view(torch.int32)) & -(1 << 16)).view(torch.float32))
