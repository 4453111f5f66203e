"""Fully sharded data parallelism over Linear and Embedding layers (ZeRO stage 3; Zhao et al. 2023).

A unit is a group of layers that is gathered together: a block of the model, or a layer that stands alone. Its weights
lie in one flat line (flat.py) of which each rank keeps a shard, in the parameters' own type (the master copy). Around
the use of a unit

    forward   all-gather(i+1) in the background │ compute i │ free i
    backward  all-gather(i-1) in the background │ compute i │ reduce-scatter gradients of i │ free i

so at most `prefetch` units besides the one at work are whole, in `compute_dtype`, which is cast to before anything
travels. An all-gather is launched when the unit before the running one has ended: the backend makes it wait for all
that is queued. Weights are gathered straight into the storage that autograd has saved references to: freeing sets the
storage's size to 0, gathering gives it back. Norms and other layers stay replicated; their gradients are all-reduced.

Communication a step: all-gather, all-gather, reduce-scatter = 1.5 × an all-reduce, in compute_dtype.

Collectives are issued in the order of the units, on a process group for gathers and one for reductions, so ranks that
skip a unit or run units in another order than they were defined in stay in step: what was skipped is gathered when a
later unit needs its turn, and stays whole until the pass has ended. Under accumulation every backward reduces, and the
shards add up: `no_sync` saves no communication here, it only postpones the replicated gradients.

Rejected: sharding by rows (rows that do not divide leave ranks idle, and a gather needs a copy to become the weights),
one flat parameter for the optimizer (it would hide from it which parameter had no gradient).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.parallel.ddp import DataParallel, all_reduce_flat
from groundup.parallel.units import LAYERS, Unit, UnitPlan, default_units
from groundup.parallel.zero import clip_shards

IN_FLIGHT = 2
"""Reductions whose whole gradients may be held at once; the older ones are waited for, which frees theirs."""


class FSDP(DataParallel):
    """The module with its Linear and Embedding weights sharded; `parameters()` are this rank's pieces.

    Make the optimizer afterwards; it must be element-wise. Whole weights: `full_parameters()`.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        units: Sequence[UnitPlan] | None = None,
        prefetch: int = 1,
        layer_types: tuple[type, ...] = LAYERS,
        materialise: Callable[[nn.Module], None] | None = None,
        device: torch.device | None = None,
        **common: Any,
    ):
        """`prefetch`: units gathered ahead, 0 to 2. `common`: see DataParallel; reduce_dtype None: the master weights'.
        `layer_types`: whose parameters are sharded, where `units` does not say it; a model's own classes, for instance.

        `materialise`, for a module on the meta device, gives one module's own parameters and buffers memory and values;
        it is called for every module in the order of `modules()`, and no more than one unit is whole at a time.
        `device`: where shards and replicated parameters go; None: they stay where they are.
        """
        if not 0 <= prefetch <= 2:
            raise ValueError(f"prefetch is {prefetch}; it must be 0, 1 or 2")
        super().__init__(module, **common)
        self.prefetch = prefetch
        plans = default_units(module, layer_types) if units is None else list(units)
        self.units: list[Unit] = []
        for plan in plans:
            if materialise is not None:
                for layer in plan.layers:
                    materialise(layer)
            names = {p: name for name, p in module.named_parameters()}
            self.units.append(Unit(plan, names, compute_dtype, self.group, device))
        sharded = {layer for plan in plans for layer in plan.layers}
        if materialise is not None:
            for other in [m for m in module.modules() if m not in sharded]:
                materialise(other)
        for tensor in [*module.parameters(), *module.buffers()] if device is not None else ():
            tensor.data = tensor.data.to(device)
        self.pieces = {piece for unit in self.units for piece in unit.pieces}
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.params = list(self.names)
        self.replicated = [p for p in self.params if p not in self.pieces]
        sharing: Any = self.group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(sharing)
        # Local synchronisation, for a part of the world only: it names a group by how many groups this rank knows, and
        # ranks that know different ones would wait for each other.
        self._reduce_group = dist.new_group(
            ranks,
            sharing._get_backend(next(module.parameters()).device).options._timeout,  # else it has the backend's own
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self._in_backward = False
        self._awaits_drain = False
        """Whether a forward pass has ended that a backward may follow: on every rank alike, whatever layers it uses."""
        self._gathered = 0
        """Units gathered in this forward pass, in order."""
        self._to_gather = self._to_scatter = -1
        """In backward: the next unit to gather and the next to scatter, downwards."""
        self._used_here: set[nn.Parameter] = set()
        self._in_flight: list[Unit] = []
        self._install()

    def _distribute(self) -> None:
        if not any(p.is_meta for p in self.module.parameters()):
            super()._distribute()

    def _install(self) -> None:
        """Hooks: around the model's call, around each gate's, and on each whole weight's gradient."""
        hook = self.handles.append
        hook(self.module.register_forward_pre_hook(lambda *_: self._begin()))
        for index, unit in enumerate(self.units):
            hook(unit.gate.register_forward_pre_hook(partial(self._before, index)))
            hook(unit.gate.register_forward_hook(partial(self._after, index)))
            for place in unit.trainable:
                hook(unit.full[place].register_post_accumulate_grad_hook(partial(self._on_gradient, unit, place)))
        hook(self.module.register_forward_hook(lambda *_: self._end()))

    def _begin(self) -> None:
        """A forward pass starts."""
        if self._awaits_drain:
            self._drain()  # a backward under no_sync came before
        for unit in self.units:
            unit.is_scattered = False
            if unit.is_whole:
                unit.free()
        self._gathered = 0

    def _before(self, index: int, *_: Any) -> None:
        """Unit `index` is about to compute: in forward, or again because its activations are recomputed."""
        unit = self.units[index]
        if self._in_backward:
            self._gather_down_to(index)
        else:
            self._gather_up_to(index + self.prefetch)
        unit.gather()
        unit.wait()
        unit.show(unit.full)

    def _after(self, index: int, _: Any, __: Any, output: Any) -> None:
        """It has computed. Its backward begins with the gradient of its output."""
        unit = self.units[index]
        if self._in_backward:
            return
        is_last = unit is self.units[-1] and torch.is_grad_enabled()
        if not (unit.keep or is_last):
            unit.free()
        for tensor in _tensors(output):
            if tensor.requires_grad and unit.gate is not self.module:
                tensor.register_hook(partial(self._before_backward, index))

    def _end(self) -> None:
        """The forward pass has ended: every rank has gathered every unit, and holds those that backward begins with."""
        if self._in_backward:
            return
        self._gather_up_to(len(self.units))
        for index, unit in enumerate(self.units):
            is_last = index == len(self.units) - 1
            if torch.is_grad_enabled() and (unit.keep or is_last):
                unit.wait()
                unit.show(unit.pieces)
            else:
                unit.free()
        self._to_gather = self._to_scatter = len(self.units) - 1
        self._awaits_drain = torch.is_grad_enabled()

    def _gather_up_to(self, last: int) -> None:
        while self._gathered <= min(last, len(self.units) - 1):
            self.units[self._gathered].gather()
            self._gathered += 1

    def _before_backward(self, index: int, _: Tensor) -> None:
        self._in_backward = True
        self._gather_down_to(index - self.prefetch)
        self.units[index].wait()

    def _gather_down_to(self, first: int) -> None:
        while self._to_gather >= max(first, 0):
            unit = self.units[self._to_gather]
            if unit.reads_in_backward and not unit.is_scattered:
                unit.gather()
            self._to_gather -= 1

    def _on_gradient(self, unit: Unit, place: int, _: Tensor) -> None:
        self._in_backward = True
        if unit.is_scattered:
            raise RuntimeError(f"a second backward through one forward reached {unit.names[place]}; FSDP allows one")
        unit.arrived.add(place)
        self._used_here.add(unit.pieces[place])
        while self._to_scatter >= 0 and self.units[self._to_scatter].arrived >= self.units[self._to_scatter].trainable:
            self._scatter_next()

    def _scatter_next(self) -> None:
        unit = self.units[self._to_scatter]
        self._to_scatter -= 1
        unit.arrived.clear()
        if not unit.trainable:
            return  # its weights may still be read; the pass' end frees them
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.pop(0).scattered()
        unit.scatter(self.op, self.reduce_dtype, self._reduce_group)
        self._in_flight.append(unit)

    def _drain(self) -> None:
        """The backward pass has ended: gather and reduce what this rank skipped, and wait."""
        self._gather_down_to(0)
        while self._to_scatter >= 0:
            self._scatter_next()
        while self._in_flight:
            self._in_flight.pop(0).scattered()
        for unit in self.units:
            if unit.is_whole:
                unit.free()
        self._in_backward = self._awaits_drain = False

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        self._drain()
        replicated = set(self.replicated)
        here = [p in self._used_here or (p in replicated and p.grad is not None) for p in self.params]
        used = dict(zip(self.params, self._used(here), strict=True))
        for p, is_used in used.items():
            if not is_used:
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
        all_reduce_flat([cast(Tensor, p.grad) for p in self.replicated if used[p]], self.op, None, self.group)
        self._used_here.clear()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        own = [piece for unit in self.units for piece in unit.pieces]
        return clip_shards(own, self.replicated, max_norm, self.group)

    def remove_hooks(self) -> None:
        """Take the hooks off and give the layers whole weights back; every rank must call it."""
        super().remove_hooks()
        for unit in self.units:
            whole = unit.gather_pieces(unit.pieces, unit.shard.dtype, unit.shard.device)
            trainable = [p.requires_grad for p in unit.pieces]
            unit.show([nn.Parameter(w.clone(), t) for w, t in zip(whole, trainable, strict=True)])
        self.units.clear()
        self.pieces.clear()

    def full_parameters(self, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter on the CPU) of every parameter; a collective, one unit on the device at a time.

        A rank with keep=False takes part and gets nothing.
        """
        for unit in self.units:
            whole = unit.gather_pieces(unit.pieces, unit.shard.dtype, unit.shard.device)
            if keep:
                yield from ((name, w.detach().to("cpu", copy=True)) for name, w in zip(unit.names, whole, strict=True))
        if keep:
            for name, p in self.module.named_parameters():
                if p not in self.pieces:
                    yield name, p.detach().to("cpu", copy=True)

    @torch.no_grad()
    def load_full_parameters(self, read: Callable[[str], Tensor]) -> None:
        """Take whole parameters by name, for instance from a mapped file: each rank reads its own pieces."""
        for unit in self.units:
            for index, name in enumerate(unit.names):
                unit.pieces[index].copy_(unit.cut(index, read(name)))
        for name, p in self.module.named_parameters():
            if p not in self.pieces:
                p.copy_(read(name))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
