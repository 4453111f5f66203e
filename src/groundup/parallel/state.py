"""The state of a run as whole named tensors, however it is spread: gathered for a checkpoint, cut when it is read.

Gathering brings one tensor (or one bucket) at a time to the host of rank 0, so no GPU ever holds the whole; reading is
done by each rank for itself, from the mapped file, its own parts only. The names are those of one process, so that a
checkpoint knows nothing of world sizes and engines. Without an engine (None) the whole is what the process has.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from groundup.optim.base import own_part
from groundup.parallel.flat import cut_state, gathered_state
from groundup.parallel.fsdp import FSDP
from groundup.parallel.optimizer import DistributedOptimizer
from groundup.parallel.torch_engines import TorchFSDP2, is_distributed, like, whole
from groundup.parallel.units import Unit


def whole_weights(engine: nn.Module | None, model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Name → weight on the CPU, on ranks with `keep`; a collective. A tied matrix appears once."""
    if isinstance(engine, FSDP | TorchFSDP2):
        found = dict(engine.full_parameters(keep))
    else:
        found = model.state_dict() if keep else {}
    return {name: found[name].detach().cpu().contiguous() for name in model.state_dict() if name in found}


def whole_state(
    engine: nn.Module | None, model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True
) -> dict[str, Tensor]:
    """`exp_avg.layers.0.…` → the optimizer's state on the CPU, counts as int64, on ranks with `keep`; a collective."""
    if isinstance(engine, TorchFSDP2):
        engine.take_shards()
    names = {p: name for name, p in model.named_parameters()}
    if isinstance(engine, FSDP):
        entries = dict(gathered_state(engine.units, optimizer.state, engine.group, keep))
        entries |= {p: optimizer.state[p] for p in names if p not in engine.pieces and p in optimizer.state}
    elif isinstance(optimizer, DistributedOptimizer):
        entries = dict(optimizer.gathered_state(keep))
    else:
        entries = {p: optimizer.state[p] for p in names if p in optimizer.state}
    found = {}
    for p, name in names.items():
        for key, value in entries.get(p, {}).items():
            value = whole(value)
            if keep:
                found[f"{key}.{name}"] = as_saved(value)
    return found


def as_saved(value: Any) -> Tensor:
    """A state value as a checkpoint holds it: on the CPU; a single number as int64."""
    if isinstance(value, Tensor) and value.ndim:
        return value.detach().cpu().contiguous()
    return torch.tensor(int(value))


@torch.no_grad()
def load_weights(engine: nn.Module | None, model: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Take whole weights by name; `read` may map a file, of which only this rank's parts are then touched."""
    if isinstance(engine, FSDP | TorchFSDP2):
        engine.load_full_parameters(read)
        return
    for name, tensor in model.state_dict().items():
        tensor.copy_(read(name))


def load_state(
    engine: nn.Module | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Iterable[str],
    read: Callable[[str], Tensor],
) -> None:
    """Take the whole optimizer state of the names `saved`, as whole_state gives them; this rank keeps its parts.

    The optimizer is one of optim/ (a count is an int there), or a distributed one around it.
    """
    params = dict(model.named_parameters())
    entries: dict[Any, dict[str, Any]] = {}
    places: dict[Any, tuple[Unit, int]] = {}
    if isinstance(engine, FSDP):
        places = {piece: (unit, index) for unit in engine.units for index, piece in enumerate(unit.pieces)}
    for full in saved:
        key, _, name = full.partition(".")
        p, value = params[name], read(full)
        if value.ndim and p in places:
            unit, index = places[p]
            value = cut_state(unit, index, {key: value})[key]
        # Copied, because what was read may be a view of the mapped file; a distributed optimizer makes its own copy.
        if value.ndim and is_distributed(p):
            value = value if is_distributed(value) else like(p, value).clone()
        elif value.ndim and not isinstance(optimizer, DistributedOptimizer):
            value = value.to(p.device, copy=True)
        entries.setdefault(p, {})[key] = value if value.ndim else int(value)
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.load_state(entries)
    else:
        optimizer.state.update(entries)


def local_bytes(value: Any) -> int:
    """Bytes that this rank holds of a tensor; 0 for anything else."""
    if not isinstance(value, Tensor):
        return 0
    return own_part(value).nbytes
