"""Asynchronous collectives whose result is there only after `wait()`.

Gloo finishes a small collective before anybody can look, so code that forgets to wait is right by luck. Here each one
runs on copies at once, so that its place in the order is kept; its output is NaN until somebody waits for it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groundup.parallel.ddp import OverlapDDP

IN_PLACE, INTO = ("broadcast",), ("all_gather_into_tensor", "reduce_scatter_tensor")


class LateWork:
    """A collective under way on `copies`, which belong into `outputs`."""

    def __init__(self, work: Any, outputs: list[Tensor], copies: list[Tensor], log: list["LateWork"]):
        self.work, self.outputs, self.copies, self.waited = work, outputs, copies, False
        for output in outputs:
            if output.is_floating_point():
                output.fill_(torch.nan)
        log.append(self)

    @torch.no_grad()
    def wait(self) -> None:
        self.work.wait()
        for output, copy in zip(self.outputs, self.copies, strict=True):
            if not self.waited:
                output.copy_(copy)
        self.waited = True


@contextmanager
def late_collectives() -> Generator[None]:
    """Every async_op collective of torch.distributed is late inside; at the end all must have been waited for."""
    log: list[LateWork] = []
    originals = {name: getattr(dist, name) for name in (*IN_PLACE, *INTO)}
    all_reduce = OverlapDDP._all_reduce

    def in_place(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return originals[name](tensor, *args, **kwargs)
            with torch.no_grad():
                copy = tensor.detach().clone()
                work = originals[name](copy, *args, async_op=True, **kwargs)
                return LateWork(work, [tensor.detach()], [copy], log)

        return call

    def into(name: str) -> Any:
        def call(output: Tensor, source: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return originals[name](output, source, *args, **kwargs)
            with torch.no_grad():
                copy = torch.empty_like(output)
                work = originals[name](copy, source.detach().clone(), *args, async_op=True, **kwargs)
                return LateWork(work, [output.detach()], [copy], log)

        return call

    def overlapped(self: OverlapDDP, tensors: list[Tensor]) -> LateWork:
        copies = [tensor.clone() for tensor in tensors]
        return LateWork(all_reduce(self, copies), tensors, copies, log)

    try:
        for name in originals:
            setattr(dist, name, in_place(name) if name in IN_PLACE else into(name))
        OverlapDDP._all_reduce = overlapped
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        OverlapDDP._all_reduce = all_reduce
    forgotten = sum(not late.waited for late in log)
    assert not forgotten, f"{forgotten} of {len(log)} collectives were never waited for"
