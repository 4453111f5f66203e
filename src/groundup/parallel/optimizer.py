"""What the sharded optimizers share: a plain optimizer inside, which sees this rank's part; the whole state outside.

To its user each is the plain optimizer: `param_groups` are the caller's and schedules act on them, `add_param_group`
works at any time, `state_dict` is that of the plain optimizer. A subclass says what this rank's part of a group is, and
what happens around the inner step.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from groundup.parallel.agree import START_TIMEOUT, DisagreementError, check_same


class DistributedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` over this rank's part of the parameters; used by all ranks alike."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        timeout: float = START_TIMEOUT,
    ):
        """`timeout`: seconds that ranks wait for each other to compare a parameter group."""
        self.inner: Any = None
        self.timeout = timeout
        self._first_groups: list[dict[str, Any]] = []
        """The parameter groups of the optimizer inside, until it is there."""
        super().__init__(params, defaults_of(optimizer_cls, options))
        self.inner = optimizer_cls(self._first_groups, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group on every rank alike. Raises DisagreementError otherwise."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_same(((str(i), p) for i, p in enumerate(group["params"])), self.group, self.timeout)
        except DisagreementError:
            self.param_groups.pop()
            raise
        own = {**options_of(group), "params": self._own_part(group["params"], group)}
        if self.inner is None:
            self._first_groups.append(own)
        else:
            self.inner.add_param_group(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's part and exchange; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        pass_options(self.param_groups, self.inner.param_groups)
        self.inner.step(**kwargs)
        pass_options(self.inner.param_groups, self.param_groups)
        self._after_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state_dict, tensors on the CPU. Every rank must call it."""
        number = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = [{**options_of(g), "params": [number[p] for p in g["params"]]} for g in self.param_groups]
        state = {number[p]: entry for p, entry in self.gathered_state()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a plain optimizer, or of this class at any world size. The dict is left as it is."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        saved = [i for group in groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        self.load_state({p: state[i] for p, i in zip(params, saved, strict=True) if i in state})
        pass_options(groups, self.param_groups)

    group: Any
    """The processes that share."""

    def _own_part(self, params: list[nn.Parameter], group: dict[str, Any]) -> list[nn.Parameter]:
        raise NotImplementedError

    def _before_step(self) -> None:
        """What the inner step needs."""

    def _after_step(self) -> None:
        raise NotImplementedError

    def gathered_state(self, keep: bool = True) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """(parameter, whole state on the CPU) of every parameter that has any; a collective.

        A rank with keep=False takes part and gets empty dicts.
        """
        raise NotImplementedError

    def load_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take whole states by parameter; this rank keeps its part of them."""
        raise NotImplementedError


def defaults_of(optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options that a parameter group of such an optimizer has, learnt from one of a single number."""
    return optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **options).defaults


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Give the groups of `target` the options of `source`: learning rates and what else a schedule moves."""
    for a, b in zip(source, target, strict=True):
        b.update(options_of(a))


def load_pieces(optimizer: torch.optim.Optimizer, entries: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Give `optimizer` these states, through its own load_state_dict, which knows where its numbers must be."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        i: {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries[p].items()}
        for i, p in enumerate(params)
        if p in entries
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
