"""ZeRO stage 1: every rank keeps the optimizer's state of its shard only (Rajbhandari et al. 2020).

ShardedOptimizer   any element-wise optimizer over flat shards: rank r updates elements [r·n/W, (r+1)·n/W) of each
                   bucket of parameters, then the parameters are gathered. Memory a rank: 4 + 4 + 8/W bytes a float32
                   parameter with Adam; with ShardedDDP gradients shrink too, to 4/W and the buckets in flight.
ShardedDDP         the matching data parallelism: gradients are reduce-scattered during backward, parameters gathered
                   during the next forward. Reduce-scatter and all-gather together move what one all-reduce moves.

The optimizer inside sees one piece a parameter, not one flat tensor: so a parameter without a gradient is skipped as in
one process, step counts are a parameter's own, and `state_dict` is that of the plain optimizer. Element-wise means that
an element's update depends on no other element. Optimizers that are not (Muon, Adafactor, LBFGS) keep whole parameters:
whole.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.optim import AdamW
from groundup.optim.clip import clip_factor, total_norm
from groundup.parallel.agree import START_TIMEOUT
from groundup.parallel.ddp import MB, HookedDDP, partition
from groundup.parallel.flat import Line, cut_state, gathered_state
from groundup.parallel.optimizer import DistributedOptimizer, load_pieces

_TORCH = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
ELEMENTWISE = (AdamW, *(getattr(torch.optim, name) for name in _TORCH))
"""Optimizers known to update each element by itself."""
IN_FLIGHT = 4
"""Reductions whose whole gradients may be held at once; the older ones are waited for, which frees theirs. With fewer
a rank's computation stands still whenever another rank is a little behind."""


class ShardedLine(Line):
    """A bucket: its parameters live side by side in `buffer`, of which this rank updates its shard."""

    @torch.no_grad()
    def __init__(self, params: Sequence[nn.Parameter], group: Any = None):
        super().__init__([p.shape for p in params], group)
        self.params, first = list(params), params[0]
        self.buffer = torch.zeros(self.layout.total, dtype=first.dtype, device=first.device)
        for p, view in zip(self.params, self.layout.views(self.buffer), strict=True):
            view.copy_(p)
            p.data = view
        self.shard = self.buffer.chunk(self.world_size)[self.rank]
        self.pieces = [nn.Parameter(piece) for piece in self.split_shard(self.shard)]
        self.waiting = len(params)
        self.gradient: Tensor | None = None
        """This rank's shard of the reduced gradients."""
        self.present: list[bool] = []
        """Which parameters had a gradient on this rank."""
        self.scattering: Any = None
        self.gathering: Any = None

    def scatter(self, op: Any, dtype: torch.dtype | None) -> None:
        """Launch the reduction of the parameters' gradients."""
        self.present = [p.grad is not None for p in self.params]
        self.scattering, self.gradient = self.reduce_scatter(self.params, dtype or self.buffer.dtype, op, self.group)

    def scattered(self) -> None:
        """Wait for it; every piece gets its gradient."""
        self.scattering.wait()
        self.scattering = None
        self.gradient = cast(Tensor, self.gradient).to(self.buffer.dtype)
        for piece, grad in zip(self.pieces, self.split_shard(self.gradient), strict=True):
            piece.grad = grad

    def gather_parameters(self) -> None:
        """Launch the all-gather of the updated shards, in place."""
        self.gathering = dist.all_gather_into_tensor(self.buffer, self.shard, group=self.group, async_op=True)

    def wait(self) -> None:
        """The parameters are whole, in the order of the current stream."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


class ShardedOptimizer(DistributedOptimizer):
    """`optimizer_cls` with its state sharded by elements; used like the plain optimizer, by all ranks alike.

    Parameters become views of flat buffers: move them to their device before. Gradients: each rank's `.grad`, already
    reduced (any class of ddp.py), or those of a ShardedDDP around the module.
    Raises ValueError for an optimizer that is not known to be element-wise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_mb: float | None = 50.0,
        group: Any = None,
        timeout: float = START_TIMEOUT,
        **kwargs: Any,
    ):
        if not issubclass(optimizer_cls, ELEMENTWISE):
            raise ValueError(
                f"{optimizer_cls.__name__} is not known to update elements independently; use WholeParameterOptimizer"
            )
        self.lines: list[ShardedLine] = []
        self.home: dict[nn.Parameter, ShardedLine] = {}
        self.group, self.bucket_bytes = group, None if bucket_mb is None else bucket_mb * MB
        self.scattered = False
        """Whether the pieces hold this step's gradients already."""
        self.overlapped = False
        """Whether somebody waits for the parameters in the next forward, so that `step` need not."""
        super().__init__(params, optimizer_cls, kwargs, timeout)

    def _own_part(self, params: list[nn.Parameter], group: dict[str, Any]) -> list[nn.Parameter]:
        # Reverse order: about the order in which backward produces gradients.
        lines = [ShardedLine(part, self.group) for part in partition(params[::-1], self.bucket_bytes)]
        self.lines += lines
        self.home |= {p: line for line in lines for p in line.params}
        return [piece for line in lines for piece in line.pieces]

    def _before_step(self) -> None:
        self.wait()
        if not self.scattered:
            self._take_gradients()

    def _after_step(self) -> None:
        self._drop_gradients()
        for line in reversed(self.lines):  # the first layers are needed first
            line.gather_parameters()
        if not self.overlapped:
            self.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._drop_gradients()

    def wait(self) -> None:
        """Every parameter is whole when this returns, in the order of the current stream."""
        for line in self.lines:
            line.wait()

    def _take_gradients(self) -> None:
        """Pieces of the full gradients, as views."""
        for line in self.lines:
            for index, (p, piece) in enumerate(zip(line.params, line.pieces, strict=True)):
                piece.grad = None if p.grad is None else line.cut(index, p.grad)

    def _drop_gradients(self) -> None:
        self.scattered = False
        for line in self.lines:
            line.gradient = None
            for piece in line.pieces:
                piece.grad = None

    def gathered_state(self, keep: bool = True) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        return gathered_state(self.lines, self.inner.state, self.group, keep)

    def load_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        entries = {
            piece: cut_state(line, index, state[p])
            for line in self.lines
            for index, (p, piece) in enumerate(zip(line.params, line.pieces, strict=True))
            if p in state
        }
        load_pieces(self.inner, entries)


class ShardedDDP(HookedDDP):
    """Data parallelism for a ShardedOptimizer: each rank receives only the gradients that it will use.

    `gates`: modules in the order in which the forward pass calls them, which together are all that read parameters
    before the last one is called. Each waits for its own parameters, the last one for all. Without gates the forward
    pass begins when every parameter is there.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        *args: Any,
        gates: Sequence[nn.Module] = (),
        **kwargs: Any,
    ):
        super().__init__(module, *args, **kwargs)
        self.optimizer = optimizer
        optimizer.overlapped = True
        self._gates = list(gates[:-1])
        self._needs: list[list[ShardedLine]] = []
        """The lines that each gate waits for."""
        self._follow()
        for index, gate in enumerate(self._gates):
            self.handles.append(gate.register_forward_pre_hook(partial(self._wait_for, index)))
        self.handles.append((gates[-1] if gates else module).register_forward_pre_hook(lambda *_: optimizer.wait()))

    def _follow(self) -> None:
        """Take over the optimizer's lines, where it has new ones: in the order in which backward completes them."""
        if len(self.buckets) == len(self.optimizer.lines):
            return
        if self._arrived:
            raise RuntimeError(
                "the optimizer got a parameter group while gradients are being reduced; "
                "call add_param_group() after finish_gradient_synchronization()"
            )
        position = {p: i for i, p in enumerate(self.params)}
        first = {id(line): min(position.get(p, 1 << 60) for p in line.params) for line in self.optimizer.lines}
        self._set_buckets(sorted(self.optimizer.lines, key=lambda line: -first[id(line)]))
        home = self.optimizer.home
        self._needs = [
            list({id(home[p]): home[p] for p in gate.parameters() if p in home}.values()) for gate in self._gates
        ]

    def remove_hooks(self) -> None:
        self.optimizer.overlapped = False
        self.optimizer.wait()
        super().remove_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        return super().forward(*args, **kwargs)

    def _wait_for(self, index: int, *_: Any) -> None:
        self._follow()
        for line in self._needs[index]:
            line.wait()

    def _launch(self, index: int) -> None:
        if index >= IN_FLIGHT:
            self.buckets[index - IN_FLIGHT].scattered()
        self.buckets[index].scatter(self.op, self.reduce_dtype)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        self._follow()
        self._launch_ready(all_of_them=True)
        used = self._used([present for line in self.buckets for present in line.present])
        for line in self.buckets[-IN_FLIGHT:]:
            line.scattered()
        pieces = (piece for line in self.buckets for piece in line.pieces)
        for piece, is_used in zip(pieces, used, strict=True):
            if not is_used:
                piece.grad = None
        self.optimizer.scattered = True
        self._restart()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        pieces = [piece for line in self.optimizer.lines for piece in line.pieces]
        return clip_shards(pieces, [], max_norm, self.group)


@torch.no_grad()
def clip_shards(pieces: Sequence[Tensor], replicated: Sequence[Tensor], max_norm: float, group: Any = None) -> Tensor:
    """As optim.clip_grad_norm, where each rank holds its own `pieces` and all hold the same `replicated`."""
    grads = [p.grad for p in pieces if p.grad is not None and p.grad.numel()]
    shared = [p.grad for p in replicated if p.grad is not None]
    device = next((t.device for t in (*grads, *shared, *pieces, *replicated)), torch.device("cpu"))
    square = total_norm(grads, device).square().to(torch.float32)
    dist.all_reduce(square, group=group)
    norm = (square + total_norm(shared, device).square()).sqrt()
    if max_norm and (grads or shared):
        torch._foreach_mul_([*grads, *shared], clip_factor(norm, max_norm))
    return norm
