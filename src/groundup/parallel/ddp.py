"""Data parallelism four ways: every rank holds the whole model, gradients are reduced over ranks.

In increasing order of cleverness, one interface:

    NaiveDDP     after backward, one all-reduce a parameter
    FlatDDP      after backward, one all-reduce of all gradients in one buffer
    OverlapDDP   during backward, one asynchronous all-reduce a parameter, from hooks
    BucketedDDP  during backward, one asynchronous all-reduce a bucket of parameters

An all-reduce of S bytes over W ranks moves 2·(W-1)/W·S bytes through each rank's link, whatever its pieces; pieces cost
latency, one large piece cannot start before the last gradient. Buckets are between the two (Li et al. 2020).

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

from collections.abc import Generator, Iterable
from contextlib import contextmanager
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
        self.op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self.reduce_dtype = reduce_dtype
        self.synchronizing = True
        self.handles: list[Any] = []
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
        mask = torch.ones(len(here), device=device) if all(here) else torch.tensor(here, dtype=torch.float32).to(device)
        dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group)
        return here if all(here) else [used > 0 for used in mask.tolist()]

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
            wire = grad if self.reduce_dtype is None else grad.to(self.reduce_dtype)
            dist.all_reduce(wire, self.op, group=self.group)
            if wire is not grad:
                grad.copy_(wire)


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


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        self.waiting = len(params)
        """Gradients still to come in this backward."""
        self.work: Any = None
        self.flat: Tensor | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` that belong to each parameter, in the parameter's shape."""
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def flat_of_views(self) -> Tensor | None:
        """The buffer that all gradients still are views of (zero_grad kept them), or None."""
        first = self.params[0].grad
        base = None if first is None else first._base
        if base is None or base.numel() != sum(p.numel() for p in self.params):
            return None
        offset = 0
        for p in self.params:
            grad = p.grad
            if grad is None or grad._base is not base or grad.storage_offset() != offset or not grad.is_contiguous():
                return None
            offset += p.numel()
        return base


class OverlapDDP(DataParallel):
    """One asynchronous all-reduce a parameter, launched by a hook as soon as the gradient is there.

    The order of launches is fixed: reverse registration in the first step, then the order in which rank 0's backward
    produced the gradients. A gradient that is early waits for its turn.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.buckets: list[Bucket] = []
        self._home: dict[nn.Parameter, Bucket] = {}
        self._arrived: dict[nn.Parameter, None] = {}
        self._next = 0
        """The first bucket not launched yet."""
        self._observed = False
        self._make_buckets(self.params[::-1])
        self.handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.params]

    def _partition(self, order: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[p] for p in order]

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        self.buckets = [Bucket(params) for params in self._partition(order)]
        self._home = {p: bucket for bucket in self.buckets for p in bucket.params}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._next and self.synchronizing:
            raise RuntimeError("call finish_gradient_synchronization() after backward, before the next forward")
        return super().forward(*args, **kwargs)

    def _on_gradient(self, p: nn.Parameter) -> None:
        """Called by autograd when p.grad is complete."""
        if not self.synchronizing:
            return
        bucket = self._home[p]
        if p in self._arrived:
            raise RuntimeError(
                f"a second backward reached {self.names[p]} before finish_gradient_synchronization(): its gradient is "
                "being reduced already; put every backward but the last of a step into no_sync()"
            )
        self._arrived[p] = None
        bucket.waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        (p,) = bucket.params
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        bucket.flat = p.grad if self.reduce_dtype is None else p.grad.to(self.reduce_dtype)
        bucket.work = dist.all_reduce(bucket.flat, self.op, group=self.group, async_op=True)

    def _landed(self, bucket: Bucket) -> None:
        """The reduction of `bucket` is done: bring it home where it travelled in another type."""
        (p,) = bucket.params
        if bucket.flat is not p.grad and bucket.flat is not None:
            cast(Tensor, p.grad).copy_(bucket.flat)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()
        here = [p.grad is not None for p in self.params]
        for bucket in self.buckets[self._next :]:  # whose gradients did not all come
            self._launch(bucket)
        used = self._used(here)
        for bucket in self.buckets:
            bucket.work.wait()
            self._landed(bucket)
            bucket.work = bucket.flat = None
            bucket.waiting = len(bucket.params)
        for p, is_used in zip(self.params, used, strict=True):
            if not is_used:
                p.grad = None
        if not self._observed:
            self._observe()
        self._arrived.clear()
        self._next = 0

    def _observe(self) -> None:
        """Make the buckets anew in the order of rank 0's first backward; what it did not use comes last."""
        number = {p: i for i, p in enumerate(self.params)}
        rest = [p for p in reversed(self.params) if p not in self._arrived]
        order = torch.tensor([number[p] for p in [*self._arrived, *rest]], dtype=torch.int64)
        if self.params:
            order = order.to(self.params[0].device)
            source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            dist.broadcast(order, source, group=self.group)
        self._make_buckets([self.params[i] for i in order.tolist()])
        self._observed = True


class BucketedDDP(OverlapDDP):
    """One asynchronous all-reduce a bucket.

    A bucket holds consecutive parameters of one dtype and at most `bucket_mb` MiB (a larger parameter is alone in its
    own; None: one bucket a dtype). When its last gradient is there they are moved into one buffer by one launch and
    become views of it, so that nothing is copied back; gradients that are views already (zero_grad(set_to_none=False))
    are not moved at all. The buffer lives from then until the gradients are set to None, so a forward pass has its
    memory. Zeroing kept views instead would cost more traffic than the move: 4 + 12 bytes an element against 8.

    `in_place=True` makes no buffer: the backend reduces the separate gradients as one group of collectives.
    """

    def __init__(
        self, module: nn.Module, bucket_mb: float | None = 50.0, *args: Any, in_place: bool = False, **kwargs: Any
    ):
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb}; it must be positive, or None for one bucket")
        self.bucket_bytes = None if bucket_mb is None else bucket_mb * MB
        self.in_place = in_place
        super().__init__(module, *args, **kwargs)

    def _partition(self, order: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return partition(order, self.bucket_bytes)

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        if self.in_place and self.reduce_dtype is None:
            for p in bucket.params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            bucket.work = self._all_reduce_group([cast(Tensor, p.grad) for p in bucket.params])
            return
        bucket.flat = None if self.reduce_dtype else bucket.flat_of_views()
        if bucket.flat is None:
            bucket.flat = self._gathered(bucket)
        bucket.work = dist.all_reduce(bucket.flat, self.op, group=self.group, async_op=True)

    def _gathered(self, bucket: Bucket) -> Tensor:
        """The gradients in one new buffer, zero for a missing one; without a wire type they become its views."""
        first = bucket.params[0]
        flat = torch.empty(
            sum(p.numel() for p in bucket.params), dtype=self.reduce_dtype or first.dtype, device=first.device
        )
        views = bucket.views(flat)
        copy_or_zero(views, [p.grad for p in bucket.params])
        for p, view in zip(bucket.params, views, strict=True):
            if self.reduce_dtype is None:
                p.grad = view
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
        return flat

    def _all_reduce_group(self, grads: list[Tensor]) -> Any:
        options: Any = dist.AllreduceCoalescedOptions()
        options.reduceOp = self.op
        group: Any = self.group or dist.group.WORLD
        return group.allreduce_coalesced(grads, options)

    def _landed(self, bucket: Bucket) -> None:
        if self.reduce_dtype is not None and bucket.flat is not None:
            torch._foreach_copy_([cast(Tensor, p.grad) for p in bucket.params], bucket.views(bucket.flat))


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


def copy_or_zero(targets: list[Tensor], sources: list[Tensor | None]) -> None:
    """Copy each source to its target in one launch; zero the targets of missing ones."""
    pairs = list(zip(targets, sources, strict=True))
    present = [(target, source) for target, source in pairs if source is not None]
    if present:
        torch._foreach_copy_([target for target, _ in present], [source for _, source in present])
    missing = [target for target, source in pairs if source is None]
    if missing:
        torch._foreach_zero_(missing)
