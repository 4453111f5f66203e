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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.optim import AdamW
from groundup.parallel.agree import check_same
from groundup.parallel.ddp import MB, DataParallel, copy_or_zero, partition
from groundup.parallel.flat import Line, cut_state, gathered_state

_TORCH = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
ELEMENTWISE = (AdamW, *(getattr(torch.optim, name) for name in _TORCH))
"""Optimizers known to update each element by itself."""
IN_FLIGHT = 2
"""Reductions whose whole gradients may be held at once; the older ones are waited for, which frees theirs."""


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
        self.scattering: Any = None
        self.gathering: Any = None

    @torch.no_grad()
    def scatter(self, op: Any, dtype: torch.dtype | None) -> None:
        """Launch the reduce-scatter of the parameters' gradients, which are given up; a missing one counts as zero."""
        whole = torch.empty(self.layout.total, dtype=dtype or self.buffer.dtype, device=self.buffer.device)
        copy_or_zero(self.layout.views(whole), [p.grad for p in self.params])
        whole[sum(self.layout.numels) :].zero_()
        for p in self.params:
            p.grad = None
        self.gradient = torch.empty(self.layout.shard, dtype=whole.dtype, device=whole.device)
        self.scattering = dist.reduce_scatter_tensor(self.gradient, whole, op, group=self.group, async_op=True)

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


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` with its state sharded by elements; used like the plain optimizer, by all ranks alike.

    Parameters become views of flat buffers: move them to their device before. Gradients: each rank's `.grad`, already
    reduced (any class of ddp.py), or those of a ShardedDDP around the module. `param_groups` are the caller's:
    schedules act on them, `add_param_group` works at any time. `state_dict` is a collective and holds the whole state.
    Raises ValueError for an optimizer that is not known to be element-wise; `elementwise=True` vouches for one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_mb: float | None = 50.0,
        group: Any = None,
        elementwise: bool | None = None,
        **kwargs: Any,
    ):
        if not (elementwise or (elementwise is None and issubclass(optimizer_cls, ELEMENTWISE))):
            raise ValueError(
                f"{optimizer_cls.__name__} is not known to update elements independently; use WholeParameterOptimizer, "
                "or pass elementwise=True if it does"
            )
        self.lines: list[ShardedLine] = []
        self.home: dict[nn.Parameter, ShardedLine] = {}
        self.group, self.bucket_bytes = group, None if bucket_mb is None else bucket_mb * MB
        self.scattered = False
        """Whether the pieces hold this step's gradients already."""
        self.overlapped = False
        """Whether somebody waits for the parameters in the next forward, so that `step` need not."""
        self.inner: Any = None
        self._pieces: list[dict[str, Any]] = []
        """The parameter groups of the optimizer inside, until it is there."""
        super().__init__(params, defaults_of(optimizer_cls, kwargs))
        self.inner = optimizer_cls(self._pieces, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group on every rank alike; its parameters join the sharding. Raises DisagreementError otherwise."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        check_same([[str(i), list(p.shape), str(p.dtype), True] for i, p in enumerate(params)], "parameter", self.group)
        # Reverse order: about the order in which backward produces gradients.
        lines = [ShardedLine(part, self.group) for part in partition(params[::-1], self.bucket_bytes)]
        self.lines += lines
        self.home |= {p: line for line in lines for p in line.params}
        pieces = [piece for line in lines for piece in line.pieces]
        inner_group = {**options_of(group), "params": pieces}
        if self.inner is None:
            self._pieces.append(inner_group)
        else:
            self.inner.add_param_group(inner_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's pieces and launch the gathering of the parameters; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        if not self.scattered:
            self._take_gradients()
        pass_options(self.param_groups, self.inner.param_groups)
        self.inner.step(**kwargs)
        pass_options(self.inner.param_groups, self.param_groups)
        self._drop_gradients()
        for line in reversed(self.lines):  # the first layers are needed first
            line.gather_parameters()
        if not self.overlapped:
            self.wait()
        return loss

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

    def gathered_state(self, keep: bool = True) -> Any:
        """(parameter, whole state on the CPU) of every parameter that has state; a collective."""
        return gathered_state(self.lines, self.inner.state, self.group, keep)

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state_dict, tensors on the CPU. Every rank must call it."""
        number = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = [{**options_of(g), "params": [number[p] for p in g["params"]]} for g in self.param_groups]
        state = {number[p]: entry for p, entry in self.gathered_state()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a plain optimizer, or of this class at any world size. The dict is left as it is."""
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        saved = [i for group in groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        self.load_state(
            {p: state_dict["state"][i] for p, i in zip(params, saved, strict=True) if i in state_dict["state"]}
        )
        pass_options(groups, self.param_groups)

    def load_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take whole states by parameter; this rank keeps its pieces of them."""
        entries = {
            piece: cut_state(line, index, state[p])
            for line in self.lines
            for index, (p, piece) in enumerate(zip(line.params, line.pieces, strict=True))
            if p in state
        }
        load_pieces(self.inner, entries)


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


class ShardedDDP(DataParallel):
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
        self._arrived: set[nn.Parameter] = set()
        self._next = 0
        self._order: list[ShardedLine] = []
        self._position = {p: i for i, p in enumerate(self.params)}
        self.handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.params]
        for gate in gates[:-1]:
            self.handles.append(gate.register_forward_pre_hook(self._wait_for))
        self.handles.append((gates[-1] if gates else module).register_forward_pre_hook(lambda *_: optimizer.wait()))

    def remove_hooks(self) -> None:
        self.optimizer.overlapped = False
        self.optimizer.wait()
        super().remove_hooks()

    def _wait_for(self, gate: nn.Module, _: Any) -> None:
        for p in gate.parameters():
            if p in self.optimizer.home:
                self.optimizer.home[p].wait()

    def _lines(self) -> list[ShardedLine]:
        """The optimizer's lines in the order in which backward completes them: by their first-registered parameter."""
        lines = self.optimizer.lines
        if len(self._order) != len(lines):
            first = {id(line): min(self._position.get(p, 1 << 60) for p in line.params) for line in lines}
            self._order = sorted(lines, key=lambda line: -first[id(line)])
            for line in self._order:
                line.waiting = sum(p in self._position for p in line.params)
        return self._order

    def _on_gradient(self, p: nn.Parameter) -> None:
        if not self.synchronizing or p not in self.optimizer.home:
            return
        if p in self._arrived:
            raise RuntimeError(
                f"a second backward reached {self.names[p]} before finish_gradient_synchronization(): its gradient is "
                "being reduced already; put every backward but the last of a step into no_sync()"
            )
        lines = self._lines()
        self._arrived.add(p)
        self.optimizer.home[p].waiting -= 1
        while self._next < len(lines) and lines[self._next].waiting == 0:
            self._scatter(lines[self._next])

    def _scatter(self, line: ShardedLine) -> None:
        for p in line.params:
            if p.grad is not None:
                self._arrived.add(p)  # also a gradient that came only inside no_sync
        line.scatter(self.op, self.reduce_dtype)
        if self._next >= IN_FLIGHT:
            self._order[self._next - IN_FLIGHT].scattered()
        self._next += 1

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        for line in self._lines()[self._next :]:
            self._scatter(line)
        managed = [p for line in self._order for p in line.params]
        used = dict(zip(managed, self._used([p in self._arrived for p in managed]), strict=True))
        for line in self._order[-IN_FLIGHT:]:
            line.scattered()
        for line in self._order:
            for p, piece in zip(line.params, line.pieces, strict=True):
                if not used[p]:
                    piece.grad = None
            line.waiting = sum(p in self._position for p in line.params)
        self.optimizer.scattered = True
        self._arrived.clear()
        self._next = 0

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        pieces = [piece for line in self.optimizer.lines for piece in line.pieces]
        return clip_shards(pieces, [], max_norm, self.group)


@torch.no_grad()
def clip_shards(
    pieces: Iterable[Tensor], replicated: Iterable[Tensor], max_norm: float, group: Any = None, eps: float = 1e-6
) -> Tensor:
    """As optim.clip_grad_norm, where each rank holds its own `pieces` and all hold the same `replicated`."""
    grads = [p.grad for p in pieces if p.grad is not None and p.grad.numel()]
    shared = [p.grad for p in replicated if p.grad is not None]
    device = next((g.device for g in [*grads, *shared]), None)
    if device is None:
        device = next((p.device for p in [*pieces, *replicated]), torch.device("cpu"))
    square = torch.zeros((), device=device)
    if grads:
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))).square().to(torch.float32)
    dist.all_reduce(square, group=group)
    if shared:
        square = square + torch.linalg.vector_norm(torch.stack(torch._foreach_norm(shared))).square()
    norm = square.sqrt()
    if max_norm and (grads or shared):
        torch._foreach_mul_([*grads, *shared], (max_norm / (norm + eps)).clamp(max=1.0))
    return norm
