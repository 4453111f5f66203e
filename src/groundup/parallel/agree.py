"""What all ranks must hold in common, checked before the first collective.

A collective on tensors of different sizes does not raise: NCCL hangs, Gloo aborts the process. So every rank writes
what its module looks like into the store that the processes met at, reads what the others wrote, and all of them raise
the same sentence. Cost: one digest a rank; the descriptions themselves are read only where digests differ.
"""

import json
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.errors import UserError

START_TIMEOUT = 60.0
"""Seconds that ranks wait for each other before the first collective, unless the configuration says otherwise."""

_calls: Counter[tuple[int, ...]] = Counter()
"""By the group's members: ranks of several groups call a different number of times."""


class DisagreementError(UserError):
    """Ranks that do not hold the same; the message names the rank and what differs."""


def check_agreement(module: nn.Module, group: Any = None, timeout: float = START_TIMEOUT) -> None:
    """Raise DisagreementError on every rank unless names, shapes, dtypes and requires_grad are everywhere the same."""
    tensors = [*module.named_parameters(), *((f"buffer {name}", b) for name, b in module.named_buffers())]
    check_same(tensors, group, timeout)


def check_same(named: Iterable[tuple[str, Tensor]], group: Any = None, timeout: float = START_TIMEOUT) -> None:
    """Raise DisagreementError on every rank with the first tensor that looks different from rank 0's.

    Ranks that do not get here within `timeout` seconds are named as well. Every rank must call it, in the same order.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store: Any = dist.distributed_c10d._get_default_store()
    members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    _calls[members] += 1
    prefix = f"groundup/agree/{'-'.join(map(str, members))}/{_calls[members]}"
    rows = [[name, list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for name, t in named]
    text = json.dumps(rows)
    store.set(f"{prefix}/rows/{rank}", text)
    store.set(f"{prefix}/digest/{rank}", sha256(text.encode()).hexdigest())
    digests = []
    for other in range(size):
        try:
            store.wait([f"{prefix}/digest/{other}"], timedelta(seconds=timeout))
        except (dist.DistStoreError, RuntimeError):
            raise DisagreementError(
                f"rank {other} did not come to compare its parameters within {timeout:g} s; look for its error above"
            ) from None
        digests.append(store.get(f"{prefix}/digest/{other}"))
    for other in range(1, size):
        if digests[other] != digests[0]:
            first, second = (json.loads(store.get(f"{prefix}/rows/{r}")) for r in (0, other))
            raise DisagreementError(_difference(first, second, other))


def _difference(first: list[list[Any]], second: list[list[Any]], other: int) -> str:
    for a, b in zip(first, second, strict=False):
        if a != b:
            return f"ranks disagree on parameter {_words(a)}: rank 0 has {_words(a)}, rank {other} has {_words(b)}"
    longer, rank, lacks = (first, 0, other) if len(first) > len(second) else (second, other, 0)
    extra = longer[min(len(first), len(second))]
    return f"ranks disagree: rank {rank} has the parameter {_words(extra)}, which rank {lacks} lacks"


def _words(row: list[Any]) -> str:
    name, shape, dtype, trainable = row
    return f"{name} {tuple(shape)} {dtype}{'' if trainable else ', frozen'}"


@torch.no_grad()
def broadcast_module(module: nn.Module, group: Any = None) -> None:
    """Give every rank the parameters and buffers of the group's first rank."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers()) if t.numel()]
    whole = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    works: list[Any] = [dist.broadcast(t, source, group=group, async_op=True) for t in whole]
    for work in works:
        work.wait()
    for tensor, contiguous in zip(tensors, whole, strict=True):
        if tensor is not contiguous:
            tensor.copy_(contiguous)
