"""Which process this is, of how many, and what they agree on. The loop asks only here."""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, distributed, tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes; each trains on its slice of the global batch.

    Every method is a collective: all ranks call it at the same place. Alone it costs nothing.
    """

    rank: int
    size: int

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


def this_world() -> World:
    """The world of this process: a run is one process."""
    return World(rank=0, size=1)
