"""What torch's CUDA caching allocator counts as allocated and reserved, for a stream of sizes.

`torch.cuda.max_memory_allocated` does not sum the bytes of tensors. It sums blocks: a request is rounded up to 512
bytes, and a block that is larger than the request is split only where the rest is worth keeping (any rest in the
pool of small blocks, more than 1 MiB in the pool of large ones). A matrix of 39.06 MiB therefore counts as 40 MiB:
its segment is a multiple of 2 MiB, and the 0.94 MiB left over are too small to split off. On the course's sizes
that is worth up to 3% of the parameters, so the predictions replay the allocator instead of rounding.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (one stream, no expandable
segments): best fit by size, then by age; requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, larger ones from a segment of their own; freed neighbours are merged. Segments are never given
back here (no prediction runs out of memory). Rejected: a flat percentage for fragmentation, which is right for no
shape. Cost: O(log blocks) a call, plus the shift of a sorted list.
"""

from bisect import bisect_left, insort

MIB = 2**20
ROUND = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB
LARGE_SEGMENT = 20 * MIB


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that holds `size`."""
    return -(-size // multiple) * multiple


class Block:
    """A contiguous piece of a segment; neighbours of the same segment are linked in address order."""

    __slots__ = ("address", "free", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool):
        self.address, self.size, self.small = address, size, small
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None


class PlainAllocator:
    """Counts the bytes as asked for: what a CPU does, and the sum of the tensors."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0

    def malloc(self, nbytes: int) -> Block | None:
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated)
        return Block(0, nbytes, False) if nbytes else None

    def free(self, block: Block | None) -> None:
        if block is not None:
            self.allocated -= block.size


class CachingAllocator:
    """`allocated`, `reserved`: bytes now. Peaks are the caller's business."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._pools: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def malloc(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` bytes; None for no bytes at all."""
        if nbytes == 0:
            return None
        size = round_up(nbytes, ROUND)
        block = self._take(size) or self._segment(size)
        rest = block.size - size
        if rest >= ROUND if block.small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                block = self._merge(block, neighbour)
        self._insert(block)

    def _take(self, size: int) -> Block | None:
        pool = self._pools[size <= SMALL]
        at = bisect_left(pool, (size, -1))  # type: ignore[arg-type]  # compared by size and address, unique
        return pool.pop(at)[2] if at < len(pool) else None

    def _segment(self, size: int) -> Block:
        if size <= SMALL:
            length = SMALL_SEGMENT
        elif size < MIN_LARGE:
            length = LARGE_SEGMENT
        else:
            length = round_up(size, 2 * MIB)
        block = Block(self.reserved, length, size <= SMALL)
        self.reserved += length
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._insert(rest)

    @staticmethod
    def _merge(block: Block, neighbour: Block) -> Block:
        """One block in place of two neighbours; `block` survives."""
        if neighbour is block.next:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        else:
            block.previous, block.address = neighbour.previous, neighbour.address
            if block.previous is not None:
                block.previous.next = block
        block.size += neighbour.size
        return block

    def _insert(self, block: Block) -> None:
        block.free = True
        insort(self._pools[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._pools[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]  # type: ignore[arg-type]
