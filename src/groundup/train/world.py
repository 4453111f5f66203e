"""Which process this is, of how many, and what they agree on. The loop asks only here."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, distributed, tensor

from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.parallel import processes
from groundup.train.device import choose_device

T = TypeVar("T")


@dataclass(frozen=True)
class World(processes.World):
    """What the ranks decide together. Every method is a collective: all ranks call it at the same place. Alone it
    costs nothing.
    """

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over the ranks, in place and on their device; no process waits for the numbers."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank. Through the CPU's back-end (gloo): a GPU does not wait for it."""
        if self.size == 1:
            return flag
        count = tensor(float(flag))
        distributed.all_reduce(count)
        return count.item() > 0

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """`work()` on rank 0 alone; its result, or its UserError, on every rank."""
        return processes.from_rank_zero(self, work)


def this_world() -> World:
    """The world that whoever started this process put it into; alone, a world of one."""
    found = processes.this_world()
    return World(found.rank, found.size, found.local_rank, found.launcher)


@contextmanager
def joined(world: World, config: RunConfig, note: Callable[[str], None]) -> Generator[None]:
    """Be one of the world's processes meanwhile. `note` gets a line for what is set for the back-end.

    Raises UserError when the others do not come, or when one is lost underway.
    """
    if world.size == 1 or distributed.is_initialized():
        yield
        return
    parallel = config.parallel.check()
    device = processes.local_device(choose_device(config.train.device).type, world)
    chosen = processes.connect(
        world, device, nvls=parallel.nvls, start_timeout=parallel.start_timeout, timeout=parallel.timeout
    )
    if chosen:
        note(f"set for NCCL: {', '.join(f'{name}={value}' for name, value in chosen.items())}")
    try:
        yield
        world.any(False)  # nobody leaves, and takes the meeting point away, before all are done
    except RuntimeError as error:
        if not processes.is_lost_peer(error):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"rank {world.rank} lost another rank ({reason}); go on from the last checkpoint with --resume"
        ) from error
    processes.disconnect()
