"""What FSDP gathers together: a unit of layers, its weights in one flat line of which each rank keeps a shard.

The whole weights' storage is there all the time and has memory only while they are whole: autograd saves references to
it in forward, and finds the gathered values there in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from groundup.model import Embedding, Linear
from groundup.parallel.flat import Line

LAYERS = (Linear, Embedding, nn.Linear, nn.Embedding)
"""The layers whose parameters are sharded."""


@dataclass(frozen=True)
class UnitPlan:
    """Which layers form a unit, and which module's call shows that it is needed."""

    gate: nn.Module
    layers: list[nn.Module]
    keep: bool = False
    """Whether its weights may be read after the gate's call: then they stay whole until backward is done with them."""


def default_units(module: nn.Module, layer_types: tuple[type, ...] = LAYERS) -> list[UnitPlan]:
    """Elements of a ModuleList are units (the model's blocks), other layers are one each, in the order of definition.

    Layers that share a parameter across units form one unit that stays whole from the model's call on.
    """
    plans: list[UnitPlan] = []
    blocks = [block for m in module.modules() if isinstance(m, nn.ModuleList) for block in m]
    taken: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child in taken or not name:
            continue
        if child in blocks or isinstance(child, layer_types):
            members = list(child.modules())
            plans.append(UnitPlan(child, [m for m in members if isinstance(m, layer_types) and m not in taken]))
            taken.update(members)
    seen: dict[nn.Parameter, int] = {}
    shared: set[int] = set()
    for index, plan in enumerate(plans):
        for p in (p for layer in plan.layers for p in layer.parameters(recurse=False)):
            if seen.setdefault(p, index) != index:
                shared |= {seen[p], index}
    tied = [layer for index in sorted(shared) for layer in plans[index].layers]
    rest = [plan for index, plan in enumerate(plans) if index not in shared and plan.layers]
    return ([UnitPlan(module, tied, keep=True)] if tied else []) + rest


class Unit(Line):
    """A unit's line: this rank's shard for the optimizer, and the storage for the whole."""

    @torch.no_grad()
    def __init__(
        self,
        plan: UnitPlan,
        names: dict[nn.Parameter, str],
        dtype: torch.dtype | None,
        group: Any,
        device: torch.device | None = None,
    ):
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for layer in plan.layers:
            for name, p in layer.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(p, []).append((layer, name))
        originals, first = list(places), next(iter(places))
        super().__init__([p.shape for p in originals], group)
        self.gate, self.keep, self.names = plan.gate, plan.keep, [names[p] for p in originals]
        if any(p.dtype != first.dtype for p in originals):
            raise ValueError(
                f"FSDP keeps a unit's weights in one dtype: {self.names[0]} is {first.dtype}, one beside it is not; "
                "give the weights of a unit one dtype, or their layers units of their own"
            )
        # An index does not read its table again; all other layers need their weights for the gradient of their input.
        self.reads_in_backward = plan.keep or not all(isinstance(m, Embedding | nn.Embedding) for m in plan.layers)
        self.dtype = dtype or first.dtype
        device = device or first.device
        self.shard = torch.zeros(self.layout.shard, dtype=first.dtype, device=device)
        parts = self.split_shard(self.shard)
        self.pieces = [nn.Parameter(part, p.requires_grad) for part, p in zip(parts, originals, strict=True)]
        self.params = self.pieces
        for index, p in enumerate(originals):
            self.pieces[index].copy_(self.cut(index, p))
        self.line = torch.empty(self.layout.total, dtype=self.dtype, device=device)
        views = self.layout.views(self.line)
        self.full = [nn.Parameter(view, p.requires_grad) for view, p in zip(views, originals, strict=True)]
        self.trainable = {i for i, p in enumerate(originals) if p.requires_grad}
        self._places = list(places.values())
        self._nbytes = self.line.untyped_storage().nbytes()
        self.line.untyped_storage().resize_(0)
        self.is_whole = False
        self.arrived: set[int] = set()
        """Places whose gradients are there in this backward."""
        self.is_scattered = False
        self._gathering: Any = None
        self._scattering: Any = None
        self.show(self.pieces)

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Let the layers hold `params`: the whole weights while they compute, the pieces for everybody else."""
        for places, p in zip(self._places, params, strict=True):
            for layer, name in places:
                layer._parameters[name] = p

    @torch.no_grad()
    def gather(self) -> None:
        """Launch the all-gather of the weights, cast before they travel."""
        if self.is_whole:
            return
        self.line.untyped_storage().resize_(self._nbytes)
        source = self.shard.to(self.dtype)
        # .data: autograd has saved these weights; they come back, they do not change.
        work = dist.all_gather_into_tensor(self.line.data, source, group=self.group, async_op=True)
        self._gathering, self.is_whole = (work, source), True

    def wait(self) -> None:
        """The weights are whole, in the order of the current stream."""
        if self._gathering is not None:
            self._gathering[0].wait()
            self._gathering = None

    def free(self) -> None:
        """Give the whole weights' memory back."""
        self.wait()
        self.show(self.pieces)
        self.line.untyped_storage().resize_(0)
        self.is_whole = False

    def scatter(self, op: Any, dtype: torch.dtype | None, group: Any) -> None:
        """Launch the reduce-scatter of the gradients, zero where this rank has none; the weights are freed."""
        self._scattering = self.reduce_scatter(self.full, dtype or self.shard.dtype, op, group)
        self.is_scattered = True
        if len(self.trainable) == len(self.full):
            self.free()  # a frozen weight may be read after the last gradient has come: it stays until the pass ends

    @torch.no_grad()
    def scattered(self) -> None:
        """Wait for it and add the result to the pieces' gradients."""
        work, out = self._scattering
        work.wait()
        self._scattering = None
        for index, grad in enumerate(self.split_shard(out.to(self.shard.dtype))):
            piece = self.pieces[index]
            if index in self.trainable:
                piece.grad = grad if piece.grad is None else piece.grad.add_(grad)
