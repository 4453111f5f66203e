"""PyTorch's own engines behind the interface of ours: DistributedDataParallel and FSDP2 (fully_shard).

FSDP2 and DTensor are imported where they are used: it takes seconds, and most runs use neither.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from groundup.optim import clip_grad_norm
from groundup.parallel.ddp import DataParallel


class TorchDDP(DataParallel):
    """torch.nn.parallel.DistributedDataParallel. It refuses, in the next forward, parameters that were not used."""

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, *args: Any, **kwargs: Any):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        super().__init__(module, *args, **kwargs)
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        self.ddp = DistributedDataParallel(module, process_group=self.group, bucket_cap_mb=bucket_mb, **options)
        if self.reduce_dtype == torch.bfloat16 and self.average:
            self.ddp.register_comm_hook(self.group, default_hooks.bf16_compress_hook)
        elif self.reduce_dtype or not self.average:
            self.ddp.register_comm_hook((self.reduce_dtype, self.op, self.group), _reduce_as)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        with super().no_sync(), self.ddp.no_sync():
            yield

    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()


def _reduce_as(state: tuple, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket in a type, by an operation."""
    dtype, op, group = state
    buffer = bucket.buffer()
    wire = buffer.to(dtype or buffer.dtype)
    future = dist.all_reduce(wire, op, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


class TorchFSDP2(DataParallel):
    """torch.distributed.fsdp.fully_shard on each of `units` and the whole: parameters become DTensors.

    All ranks must run the same layers: a layer that only some ranks skip leaves the others waiting until the timeout.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        compute_dtype: torch.dtype | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(module, *args, **kwargs)
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=self.reduce_dtype or (torch.float32 if compute_dtype else None)
        )
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        device = next(module.parameters()).device.type
        mesh = dist.device_mesh.DeviceMesh(device, ranks)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        self.root: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        for part in () if self.average else (self.root, *units):
            part.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.params = list(self.names)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        with super().no_sync():
            self.root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.root.set_requires_gradient_sync(True)

    def finish_gradient_synchronization(self) -> None:
        self._must_synchronize()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        local = [p.grad for p in self.params if p.grad is not None]
        norm = clip_grad_norm(self.params, max_norm) if local else torch.zeros(())
        return whole(norm)

    def take_shards(self) -> None:
        """Hold shards only: FSDP2 keeps the root's weights whole after an evaluation, until the next backward."""
        self.root.reshard()

    def full_parameters(self, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter on the CPU) of every parameter; a collective."""
        for name, p in self.module.named_parameters():
            value = whole(p).detach()
            if keep:
                yield name, value.to("cpu", copy=True)

    @torch.no_grad()
    def load_full_parameters(self, read: Callable[[str], Tensor]) -> None:
        """Take whole parameters by name; each rank keeps its shard."""
        for name, p in self.module.named_parameters():
            p.copy_(like(p, read(name)))


def is_distributed(x: Any) -> bool:
    """Whether `x` is a DTensor."""
    return hasattr(x, "full_tensor")


def whole(x: Any) -> Tensor:
    """The whole of a DTensor, a collective; any other tensor itself."""
    return x.full_tensor() if is_distributed(x) else x


def like(p: Any, given: Tensor) -> Tensor:
    """`given`, whole, on p's device, distributed as p is; what is distributed already stays as it is."""
    if is_distributed(given):
        return given
    if not is_distributed(p):
        return given.to(p.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(given.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
