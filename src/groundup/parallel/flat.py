"""Parameters side by side in one flat line of elements, cut into world_size equal shards.

Shards are cut by elements, not by parameters or rows: they are equal to within the padding whatever the shapes, and a
gathered line is at once all the parameters, with no copy. Rank r owns elements [r·shard, (r+1)·shard); what it owns of
one parameter is a piece, a slice of the flattened parameter, possibly empty. Padding: at most 8·W - 1 elements a line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 8
"""Shards are multiples of this many elements, so that each starts at a multiple of 16 bytes."""


@dataclass(frozen=True)
class Layout:
    """Where each parameter and each shard lies in a line."""

    shapes: tuple[torch.Size, ...]
    world_size: int

    @cached_property
    def numels(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def shard(self) -> int:
        """Elements a rank owns, padding included."""
        return -(-sum(self.numels) // (self.world_size * ALIGN)) * ALIGN

    @cached_property
    def total(self) -> int:
        """Elements of the line, padding included."""
        return self.shard * self.world_size

    def views(self, line: Tensor) -> list[Tensor]:
        """The parameters inside a whole line, each in its shape."""
        return [part.view(shape) for part, shape in zip(self.places(line), self.shapes, strict=True)]

    def places(self, line: Tensor) -> Sequence[Tensor]:
        """The parameters inside a whole line, 1-D."""
        return cut_up(line, self.numels, self.total)

    def fill(self, line: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy the tensors to their places in a whole line, in one launch (None: zeros); the padding stays."""
        pairs = list(zip(self.places(line), tensors, strict=True))
        present = [place for place, tensor in pairs if tensor is not None]
        if present:
            torch._foreach_copy_(present, [tensor.reshape(-1) for tensor in tensors if tensor is not None])
        if len(present) < len(pairs):
            torch._foreach_zero_([place for place, tensor in pairs if tensor is None])

    def slices(self, rank: int) -> list[tuple[int, int]]:
        """[start, stop) within each flattened parameter of what `rank` owns."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        found, offset = [], 0
        for numel in self.numels:
            start = min(max(low - offset, 0), numel)
            found.append((start, min(max(high - offset, start), numel)))
            offset += numel
        return found


def cut_up(line: Tensor, lengths: list[int], total: int) -> Sequence[Tensor]:
    """Consecutive parts of a line of `total` elements; what is left over is not among them."""
    # Not Tensor.split, which does the same with twice the host's time, here once a bucket and step.
    return line.split_with_sizes([*lengths, total - sum(lengths)])[:-1]


class Line:
    """One flat line of parameters as this rank sees it."""

    params: list[nn.Parameter]
    """What the state of each place in the line is known by."""
    pieces: list[nn.Parameter]
    """What this rank's optimizer updates, one for each place."""

    def __init__(self, shapes: Sequence[torch.Size], group: Any = None):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = Layout(tuple(shapes), self.world_size)
        self.slices = self.layout.slices(self.rank)
        self._lengths = [stop - start for start, stop in self.slices]

    def split_shard(self, shard: Tensor) -> Sequence[Tensor]:
        """The pieces inside this rank's shard, 1-D, one for each parameter."""
        return cut_up(shard, self._lengths, self.layout.shard)

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor that has the shape of parameter `index`."""
        start, stop = self.slices[index]
        return whole.reshape(-1)[start:stop]

    @torch.no_grad()
    def gather_pieces(self, pieces: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Every rank's pieces (None: zeros) put together: the whole tensors, on this device. A collective."""
        shard = torch.zeros(self.layout.shard, dtype=dtype, device=device)
        for target, piece in zip(self.split_shard(shard), pieces, strict=True):
            if piece is not None:
                target.copy_(piece)
        line = torch.empty(self.layout.total, dtype=dtype, device=device)
        dist.all_gather_into_tensor(line, shard, group=self.group)
        return self.layout.views(line)

    def reduce_scatter(
        self, params: Sequence[nn.Parameter], dtype: torch.dtype, op: Any, group: Any = None
    ) -> tuple[Any, Tensor]:
        """Launch the reduction of their gradients, which are given up; a missing one counts as zero.

        Returns (work, this rank's shard in `dtype`); its padding is undefined.
        """
        whole = torch.empty(self.layout.total, dtype=dtype, device=params[0].device)
        self.layout.fill(whole, [p.grad for p in params])
        for p in params:
            p.grad = None
        shard = whole.new_empty(self.layout.shard)
        return dist.reduce_scatter_tensor(shard, whole, op, group=group, async_op=True), shard


def gathered_state(
    lines: Sequence[Line], state: Any, group: Any = None, keep: bool = True
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, its whole optimizer state) for every parameter that has any, tensors on the CPU; a collective.

    `state` is the optimizer's, keyed by piece. One key of one line is on the device at a time. A rank with keep=False
    takes part and gets empty dicts. State that is one number a parameter (a step count) comes from a rank with a piece.
    """
    for line in lines:
        own = line.pieces
        mine: list[dict[str, Any]] = [_kinds(piece, state.get(piece, {})) for piece in own]
        everyone: list[Any] = [None] * line.world_size
        dist.all_gather_object(everyone, mine, group=group)
        merged: list[dict[str, Any]] = [{} for _ in own]
        for rank, theirs in enumerate(everyone):
            for index, (start, stop) in enumerate(line.layout.slices(rank)):
                if stop > start:
                    merged[index].update(theirs[index])
        whole: list[dict[str, Any]] = [
            {key: kind for key, kind in entry.items() if not isinstance(kind, torch.dtype)} for entry in merged
        ]
        for key in sorted({k for entry in merged for k, kind in entry.items() if isinstance(kind, torch.dtype)}):
            dtype = next(entry[key] for entry in merged if isinstance(entry.get(key), torch.dtype))
            tensors = line.gather_pieces([state.get(piece, {}).get(key) for piece in own], dtype, own[0].device)
            for index, tensor in enumerate(tensors):
                if key in merged[index] and keep:
                    whole[index][key] = tensor.to("cpu", copy=True)
        for p, entry in zip(line.params, whole, strict=True):
            if entry:
                yield p, entry if keep else {}


def _kinds(piece: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """A dtype for each state that has the piece's shape, the value itself for any other."""
    return {
        key: value.dtype if isinstance(value, Tensor) and value.shape == piece.shape else on_cpu(value)
        for key, value in entry.items()
    }


def on_cpu(value: Any) -> Any:
    """A copy of a tensor on the CPU; anything else as it is."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def cut_state(line: Line, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    """One parameter's whole state → this rank's: tensors of its shape are cut, single numbers stay."""
    shape = line.layout.shapes[index]
    return {
        key: line.cut(index, value) if isinstance(value, Tensor) and value.shape == shape and key != "step" else value
        for key, value in entry.items()
    }
