"""Data parallelism four ways: every rank holds the whole model, gradients are reduced over ranks.

In increasing order of cleverness, one interface:

    NaiveDDP     after backward, one all-reduce a parameter
    FlatDDP      after backward, one all-reduce of all gradients in one buffer
    OverlapDDP   during backward, one asynchronous all-reduce a parameter, from hooks
    BucketedDDP  during backward, one asynchronous all-reduce a bucket of parameters

An all-reduce of S bytes over W ranks moves 2·(W-1)/W·S bytes through each rank's link, whatever its pieces; pieces cost
latency, one large piece cannot start before the last gradient. Buckets are between the two (Li et al. 2020).

Rejected: one buffer a bucket with gradients as its views, as torch DDP has it. Autograd hands a new gradient over
without a copy only where there is none, so either each step moves every gradient into the buffer (8 bytes an element),
or buffers are kept and zeroed (4 + 12). The backend reduces a group of separate tensors as one operation instead.

What every class promises: parameters and buffers start as rank 0's; a tied parameter is reduced once; a frozen one
never; a parameter that some ranks did not use counts as zero there, one that no rank used keeps the gradient None, so
that the optimizer skips it as in one process. Collectives are issued in an order that all ranks share, whatever order
gradients become ready in. A second backward before `finish_gradient_synchronization` outside `no_sync` is refused where
it would be wrong, never summed twice.

    for micro_batch in all_but_last:
        with model.no_sync():
            loss(model(micro_batch)).backward()
    loss(model(last)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

`average=True` divides by the world size (each rank's loss is its own mean); False only sums (each rank's loss is
already divided by the global token count; then gradients must be zeroed between steps).
"""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.optim import clip_grad_norm
from groundup.parallel.agree import START_TIMEOUT, broadcast_module, check_agreement

MB = 1 << 20
"""Bucket sizes are in MiB, as torch DDP's are."""


class DataParallel(nn.Module):
    """What the engines share: the module, accumulation, and the knowledge which parameters were used."""

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        average: bool = True,
        reduce_dtype: torch.dtype | None = None,
        timeout: float = START_TIMEOUT,
    ):
        """`reduce_dtype`: gradients travel in this type (bfloat16 halves the bytes); None: their own.

        Raises DisagreementError on every rank when modules differ between ranks.
        """
        super().__init__()
        self.module, self.group = module, group
        self.world_size = dist.get_world_size(group)
        self.average, self.op = average, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self.reduce_dtype = reduce_dtype
        self.synchronizing = True
        self.handles: list[Any] = []
        self._ones: Tensor | None = None
        check_agreement(module, group, timeout)
        self._distribute()
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.params = list(self.names)

    def _distribute(self) -> None:
        broadcast_module(self.module, self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside only add to the local gradients."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """After the last backward of a step: every gradient is reduced over all ranks when this returns.

        On a GPU "is" means in the order of the current stream; the host does not wait.
        """
        raise NotImplementedError

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the reduced gradients by their joint norm, which is returned (as before clipping)."""
        return clip_grad_norm(self.params, max_norm)

    def remove_hooks(self) -> None:
        """Take every hook off the module: it is then a plain module again."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _used(self, here: list[bool]) -> list[bool]:
        """Whether each parameter has a gradient on any rank. Only a rank that lacks some waits for the answer."""
        device = self.params[0].device if self.params else torch.device("cpu")
        if all(here):
            if self._ones is None or len(self._ones) != len(here):
                self._ones = torch.ones(len(here), device=device)
            dist.all_reduce(self._ones, dist.ReduceOp.MAX, group=self.group)  # the largest stays 1
            return here
        mask = torch.tensor(here, dtype=torch.float32).to(device)
        dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group)
        return [used > 0 for used in mask.tolist()]

    def _to_reduce(self) -> list[Tensor]:
        """The gradient of every parameter that any rank used, zero where this rank did not."""
        used = self._used([p.grad is not None for p in self.params])
        for p, is_used in zip(self.params, used, strict=True):
            if is_used and p.grad is None:
                p.grad = torch.zeros_like(p)
        return [cast(Tensor, p.grad) for p, is_used in zip(self.params, used, strict=True) if is_used]

    def _must_synchronize(self) -> None:
        if not self.synchronizing:
            raise RuntimeError("finish_gradient_synchronization() belongs after the last backward, outside no_sync()")


class NaiveDDP(DataParallel):
    """One blocking all-reduce a parameter after backward: latency for each, nothing overlapped."""

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        for grad in self._to_reduce():
            wire = on_wire(grad, self.reduce_dtype)
            dist.all_reduce(wire, self.op, group=self.group)
            if wire is not grad:
                grad.copy_(wire)


def on_wire(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The gradient as backends take it: contiguous, in the type that travels (None: its own)."""
    return grad.to(dtype or grad.dtype).contiguous()


class FlatDDP(DataParallel):
    """One all-reduce after backward: all bandwidth, no overlap, and a second copy of the gradients meanwhile."""

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        all_reduce_flat(self._to_reduce(), self.op, self.reduce_dtype, self.group)


def all_reduce_flat(tensors: Iterable[Tensor], op: Any, dtype: torch.dtype | None, group: Any) -> None:
    """All-reduce tensors in place through one buffer a dtype, which travels as `dtype` (None: as it is)."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.reshape(-1).to(dtype or tensor.dtype) for tensor in same])
        dist.all_reduce(flat, op, group=group)
        pieces = flat.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [piece.view_as(t) for piece, t in zip(pieces, same, strict=True)])


class HookedDDP(DataParallel):
    """What the engines share that reduce during backward: hooks count gradients, full buckets leave in their order.

    A hook runs once a parameter and step in the thread that launches backward's kernels, so it does next to nothing.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.buckets: Sequence[Any] = []
        """Each has `params` and `waiting`, the number of gradients still to come in this backward."""
        self._home: list[Any] = []
        """The bucket of each parameter, by its number in `params`; None: somebody else's."""
        self._sizes: list[int] = []
        self._arrived: dict[int, None] = {}
        """Numbers of the parameters whose gradients came, in their order."""
        self._next = 0
        """The first bucket not launched yet."""
        for number, p in enumerate(self.params):
            self.handles.append(p.register_post_accumulate_grad_hook(partial(self._on_gradient, number)))

    def _set_buckets(self, buckets: Sequence[Any]) -> None:
        home = {p: bucket for bucket in buckets for p in bucket.params}
        self._home = [home.get(p) for p in self.params]
        sizes = Counter(map(id, self._home))
        self._sizes = [sizes[id(bucket)] for bucket in buckets]
        self.buckets = buckets
        self._restart()

    def _restart(self) -> None:
        """Before the next backward that reduces."""
        for bucket, size in zip(self.buckets, self._sizes, strict=True):
            bucket.waiting = size
        self._arrived.clear()
        self._next = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._next and self.synchronizing:
            raise RuntimeError("call finish_gradient_synchronization() after backward, before the next forward")
        return super().forward(*args, **kwargs)

    def _on_gradient(self, number: int, _: Tensor) -> None:
        """Called by autograd when the gradient of a parameter is complete."""
        if not self.synchronizing:
            return
        bucket = self._home[number]
        if bucket is None:
            return
        if number in self._arrived:
            raise RuntimeError(
                f"a second backward reached {self.names[self.params[number]]} before finish_gradient_synchronization():"
                " its gradient is being reduced already; put every backward but the last of a step into no_sync()"
            )
        self._arrived[number] = None
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self._launch_ready()

    def _launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the next buckets while they are full."""
        buckets, index = self.buckets, self._next
        while index < len(buckets) and (all_of_them or buckets[index].waiting == 0):
            self._launch(index)
            index += 1
        self._next = index

    def _launch(self, index: int) -> None:
        """Start the reduction of bucket `index`; gradients that are missing count as zero."""
        raise NotImplementedError


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, params: list[nn.Parameter]):
        self.params, self.waiting = params, len(params)
        self.work: Any = None
        self.grads: list[Tensor] = []
        self.wire: list[Tensor] = []
        """What travels: the gradients, or their copies in another type."""

    def wait(self) -> None:
        """The gradients are reduced, in the order of the current stream."""
        self.work.wait()
        if self.wire is not self.grads:
            torch._foreach_copy_(self.grads, self.wire)
        self.work, self.grads, self.wire = None, [], []


class OverlapDDP(HookedDDP):
    """One asynchronous all-reduce a parameter, launched by a hook as soon as the gradient is there.

    The order of launches is fixed: reverse registration in the first step, then the order in which rank 0's backward
    produced the gradients. A gradient that is early waits for its turn.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self._backend: Any = self.group or dist.group.WORLD
        one: Any = dist.AllreduceOptions()
        several: Any = dist.AllreduceCoalescedOptions()
        for options in (one, several):
            options.reduceOp, options.asyncOp = self.op, True
        self._one, self._several = one, several
        self._observed = False
        self._make_buckets(self.params[::-1])

    def _partition(self, order: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[p] for p in order]

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        self._set_buckets([Bucket(params) for params in self._partition(order)])

    def _launch(self, index: int) -> None:
        bucket = self.buckets[index]
        for p in bucket.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        bucket.grads = bucket.wire = grads = [p.grad for p in bucket.params]
        if self.reduce_dtype is not None or not all(grad.is_contiguous() for grad in grads):
            bucket.wire = [on_wire(grad, self.reduce_dtype) for grad in grads]
        bucket.work = self._all_reduce(bucket.wire)

    def _all_reduce(self, tensors: list[Tensor]) -> Any:
        """Several as one operation. The backend's own call: torch.distributed's checks cost more than the launch."""
        if len(tensors) == 1:
            return self._backend.allreduce(tensors, self._one)
        return self._backend.allreduce_coalesced(tensors, self._several)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        here = [p.grad is not None for p in self.params]
        self._launch_ready(all_of_them=True)
        used = self._used(here)
        for bucket in self.buckets:
            bucket.wait()
        for p, is_used in zip(self.params, used, strict=True):
            if not is_used:
                p.grad = None
        if not self._observed:
            self._observe()
        self._restart()

    def _observe(self) -> None:
        """Make the buckets anew in the order of rank 0's first backward; what it did not use comes last."""
        rest = [number for number in reversed(range(len(self.params))) if number not in self._arrived]
        order = torch.tensor([*self._arrived, *rest], dtype=torch.int64)
        if self.params:
            order = order.to(self.params[0].device)
            dist.broadcast(order, group=self.group, group_src=0)
        self._make_buckets([self.params[i] for i in order.tolist()])
        self._observed = True


class BucketedDDP(OverlapDDP):
    """One asynchronous group of all-reduces a bucket; gradients stay where autograd put them, and nothing is copied.

    A bucket holds consecutive parameters of one dtype and at most `bucket_mb` MiB (a larger parameter is alone in its
    own; None: one bucket a dtype).
    """

    def __init__(self, module: nn.Module, bucket_mb: float | None = 50.0, *args: Any, **kwargs: Any):
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb}; it must be positive, or None for one bucket")
        self.bucket_bytes = None if bucket_mb is None else bucket_mb * MB
        super().__init__(module, *args, **kwargs)

    def _partition(self, order: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return partition(order, self.bucket_bytes)


def partition(order: Iterable[nn.Parameter], limit: float | None) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype and device in lists of at most `limit` bytes (None: no limit).

    The lists are in the order in which their last parameters come.
    """
    closed: list[list[nn.Parameter]] = []
    open_: dict[Any, list[nn.Parameter]] = {}
    for p in order:
        key = (p.dtype, p.device)
        held = open_.get(key, [])
        if held and limit is not None and sum(q.nbytes for q in held) + p.nbytes > limit:
            closed.append(open_.pop(key))
            held = []
        open_[key] = [*held, p]
    position = {p: i for i, p in enumerate(order)}
    return sorted([*closed, *open_.values()], key=lambda params: position[params[-1]])
