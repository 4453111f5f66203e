"""The sharded optimizer in its simple form, as the course teaches it: every parameter belongs to one rank.

The owner alone keeps the parameter's state and updates it; then each rank broadcasts what it owns. Right for every
optimizer, also for those that need whole matrices: with Muon this is distributed Muon, and the balance is by the cost
of its iterations. Parameters go to the rank with the least so far, the costliest first (within 4/3 of the best possible
balance: Graham 1969). After an all-reduce of gradients it moves S bytes where ZeRO-1 on flat shards (zero.py) moves
nothing extra, so element-wise optimizers do better there.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.parallel.agree import check_same
from groundup.parallel.flat import on_cpu
from groundup.parallel.zero import defaults_of, load_pieces, options_of, pass_options


def element_cost(p: Tensor, _: dict[str, Any]) -> float:
    """An element-wise update costs as much as the parameter is large."""
    return float(p.numel())


def muon_cost(p: Tensor, group: dict[str, Any]) -> float:
    """FLOPs of Muon's Newton-Schulz iterations, 2·(2 m² n + m³) each for sides m ≤ n; AdamW's groups as their size."""
    if not group.get("muon"):
        return float(p.numel())
    m, n = sorted(p.shape)
    return 2.0 * (2 * m * m * n + m**3) * group["steps"]


class WholeParameterOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` over the parameters that this rank owns; used like the plain optimizer, by all ranks alike.

    Gradients must be reduced already (any class of ddp.py). `state_dict` is a collective and holds the whole state.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        cost: Callable[[Tensor, dict[str, Any]], float] = element_cost,
        group: Any = None,
        **kwargs: Any,
    ):
        self.group, self.cost = group, cost
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owner: dict[nn.Parameter, int] = {}
        self.load = [0.0] * self.world_size
        """What each rank has to do, in units of `cost`."""
        self.inner: Any = None
        self._own: list[dict[str, Any]] = []
        """The parameter groups of the optimizer inside, until it is there."""
        super().__init__(params, defaults_of(optimizer_cls, kwargs))
        self.inner = optimizer_cls(self._own, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group on every rank alike; its parameters are dealt out. Raises DisagreementError otherwise."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        check_same([[str(i), list(p.shape), str(p.dtype), True] for i, p in enumerate(params)], "parameter", self.group)
        for p in sorted(params, key=lambda p: -self.cost(p, group)):
            owner = min(range(self.world_size), key=lambda rank: self.load[rank])
            self.owner[p] = owner
            self.load[owner] += self.cost(p, group)
        own = {**options_of(group), "params": [p for p in params if self.owner[p] == self.rank]}
        if self.inner is None:
            self._own.append(own)
        else:
            self.inner.add_param_group(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update what this rank owns, then exchange; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pass_options(self.param_groups, self.inner.param_groups)
        self.inner.step(**kwargs)
        pass_options(self.inner.param_groups, self.param_groups)
        self._exchange()
        return loss

    def _exchange(self) -> None:
        """Broadcast every rank's parameters, in one buffer a rank and dtype."""
        under_way = []
        for rank in range(self.world_size):
            kinds: dict[Any, list[Tensor]] = {}
            for p, owner in self.owner.items():
                if owner == rank:
                    kinds.setdefault((p.dtype, p.device), []).append(p.data)
            for tensors in kinds.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                work: Any = dist.broadcast(flat, self._global(rank), group=self.group, async_op=True)
                under_way.append((work, flat, tensors, rank))
        for work, flat, tensors, rank in under_way:
            work.wait()
            if rank != self.rank:
                parts = flat.split([tensor.numel() for tensor in tensors])
                torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank

    @torch.no_grad()
    def gathered_state(self, keep: bool = True) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """(parameter, its state on the CPU) of every parameter that has any; a collective, one tensor at a time."""
        params = list(self.owner)
        mine = [
            {k: (v.dtype, tuple(v.shape)) if is_large(v) else on_cpu(v) for k, v in self.inner.state.get(p, {}).items()}
            for p in params
        ]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        for index, p in enumerate(params):
            owner, whole = self.owner[p], {}
            for key, kind in everyone[owner][index].items():
                value = kind
                if isinstance(kind, tuple):
                    tensor = torch.empty(kind[1], dtype=kind[0], device=p.device)
                    if owner == self.rank:
                        tensor.copy_(self.inner.state[p][key])
                    dist.broadcast(tensor, self._global(owner), group=self.group)
                    value = tensor.to("cpu", copy=True) if keep else None
                whole[key] = value
            if whole:
                yield p, whole if keep else {}

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state_dict, tensors on the CPU. Every rank must call it."""
        number = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = [{**options_of(g), "params": [number[p] for p in g["params"]]} for g in self.param_groups]
        return {"state": {number[p]: entry for p, entry in self.gathered_state()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a plain optimizer, or of this class at any world size."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        saved = [i for group in groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        self.load_state({p: state[i] for p, i in zip(params, saved, strict=True) if i in state})
        pass_options(groups, self.param_groups)

    def load_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take whole states by parameter; this rank keeps those that it owns."""
        load_pieces(self.inner, {p: entry for p, entry in state.items() if self.owner[p] == self.rank})


def is_large(value: Any) -> bool:
    """Whether a state value is worth a broadcast of its own."""
    return isinstance(value, Tensor) and value.ndim > 0
