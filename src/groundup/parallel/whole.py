"""The sharded optimizer in its simple form, as the course teaches it: every parameter belongs to one rank.

The owner alone keeps the parameter's state and updates it; then each rank broadcasts what it owns. Right for every
optimizer, also for those that need whole matrices: with Muon this is distributed Muon, and the balance is by the cost
of its iterations. Parameters go to the rank with the least so far, the costliest first (within 4/3 of the best possible
balance: Graham 1969). After an all-reduce of gradients it moves S bytes where ZeRO-1 on flat shards (zero.py) moves
nothing extra, so element-wise optimizers do better there.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.parallel.agree import START_TIMEOUT
from groundup.parallel.flat import on_cpu
from groundup.parallel.optimizer import DistributedOptimizer, load_pieces


def update_cost(p: Tensor, group: dict[str, Any]) -> float:
    """FLOPs of Muon's Newton-Schulz iterations, 2·(2 m² n + m³) each for sides m ≤ n; else the parameter's size."""
    if not group.get("muon"):
        return float(p.numel())
    m, n = sorted(p.shape)
    return 2.0 * (2 * m * m * n + m**3) * group["steps"]


class WholeParameterOptimizer(DistributedOptimizer):
    """`optimizer_cls` over the parameters that this rank owns; used like the plain optimizer, by all ranks alike.

    Gradients must be reduced already (any class of ddp.py).
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Any = None,
        timeout: float = START_TIMEOUT,
        **kwargs: Any,
    ):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owner: dict[nn.Parameter, int] = {}
        self.load = [0.0] * self.world_size
        """What each rank has to do, in units of update_cost."""
        super().__init__(params, optimizer_cls, kwargs, timeout)

    def _own_part(self, params: list[nn.Parameter], group: dict[str, Any]) -> list[nn.Parameter]:
        for p in sorted(params, key=lambda p: -update_cost(p, group)):
            owner = min(range(self.world_size), key=lambda rank: self.load[rank])
            self.owner[p] = owner
            self.load[owner] += update_cost(p, group)
        return [p for p in params if self.owner[p] == self.rank]

    def _after_step(self) -> None:
        """Broadcast every rank's parameters, in one buffer a rank and dtype."""
        under_way = []
        for rank in range(self.world_size):
            kinds: dict[Any, list[Tensor]] = {}
            for p, owner in self.owner.items():
                if owner == rank:
                    kinds.setdefault((p.dtype, p.device), []).append(p.data)
            for tensors in kinds.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                work: Any = dist.broadcast(flat, group=self.group, async_op=True, group_src=rank)
                under_way.append((work, flat, tensors, rank))
        for work, flat, tensors, rank in under_way:
            work.wait()
            if rank != self.rank:
                parts = flat.split([tensor.numel() for tensor in tensors])
                torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    @torch.no_grad()
    def gathered_state(self, keep: bool = True) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
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
                    dist.broadcast(tensor, group=self.group, group_src=owner)
                    value = tensor.to("cpu", copy=True) if keep else None
                whole[key] = value
            if whole:
                yield p, whole if keep else {}

    def load_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        load_pieces(self.inner, {p: entry for p, entry in state.items() if self.owner[p] == self.rank})


def is_large(value: Any) -> bool:
    """Whether a state value is worth a broadcast of its own."""
    return isinstance(value, Tensor) and value.ndim > 0
