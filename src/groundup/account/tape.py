"""A symbolic torch: tensors that have a shape, a data type and a lifetime, but no numbers.

The model's forward pass, written once more over these tensors (program.py), yields everything that eager torch
would do with memory and time: which tensors autograd keeps, when each byte is allocated and freed, which kernels
run and how many bytes and floating-point operations each of them moves. Memory is freed as eager torch frees it,
by reference counting: a `Storage` tells the allocator when the last Python reference to it goes. So the peak of a
step is not a formula with a correction but the largest value of a running sum.

Backward runs the nodes as torch's engine does: a node is ready when all its gradients have arrived; of the ready
ones the youngest goes first. Its saved tensors are dropped when it has run; then its results are summed to the
shape and cast to the type of the inputs. A second gradient for the same tensor is added in place. Cost: a few
thousand small objects for a model of 50 blocks, tens of milliseconds.

Rejected: closed formulas for each layer (they go wrong silently when the model changes, and peaks depend on the
order), and tracing the real model on fake tensors (that needs torch, and seconds to import it).
"""

import heapq
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Literal
from weakref import ReferenceType, ref

from groundup.account.allocator import Block, CachingAllocator, PlainAllocator

DType = Literal["fp32", "bf16", "int64", "bool"]
ITEMSIZE: dict[str, int] = {"fp32": 4, "bf16": 2, "int64": 8, "bool": 1}
Kind = Literal["parameters", "buffers", "inputs", "gradients", "optimizer", "workspace", "activations"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """One launch on the device."""

    name: str
    phase: str
    scope: str
    nbytes: int
    """Bytes read and written, each tensor once."""
    flops: int = 0
    """Floating-point operations of a matrix product (a multiply-add is two); element-wise work is not counted."""
    dtype: str = "fp32"
    """Type of the matrix product's operands."""
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    """batch, m, k, n of the matrix product."""
    even: bool = False
    """Whether all tensors have one shape, so that torch's vectorised kernel runs: no broadcast, no reduction."""


class Storage:
    """Bytes on the device, freed when nothing refers to them any more."""

    __slots__ = ("block", "kind", "name", "nbytes", "tape")

    def __init__(self, tape: "Tape", nbytes: int, kind: Kind, name: str):
        self.tape, self.nbytes, self.kind, self.name = tape, nbytes, kind, name
        self.block = tape.allocate(nbytes, kind, name)

    def __del__(self) -> None:
        self.tape.release(self)


class Tensor:
    """A shape and a type over a storage. Views share the storage."""

    __slots__ = ("dtype", "grad", "node", "requires_grad", "shape", "slot", "storage", "view")

    def __init__(self, shape: Shape, dtype: DType, storage: Storage, requires_grad: bool = False):
        self.shape, self.dtype, self.storage, self.requires_grad = shape, dtype, storage, requires_grad
        self.node: Node | None = None
        self.slot = 0
        self.grad: Tensor | None = None
        self.view = False
        """Whether the memory is another tensor's: torch adds no gradient in place of a view."""

    @property
    def tape(self) -> "Tape":
        return self.storage.tape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; for an expanded tensor those of its storage."""
        return min(self.numel * ITEMSIZE[self.dtype], self.storage.nbytes)

    def detach(self) -> "Tensor":
        """The same storage without a history."""
        return Tensor(self.shape, self.dtype, self.storage)


Backward = Callable[..., Sequence[Tensor | None]]


class Node:
    """One differentiable operation: where its gradients go, and the function that makes them."""

    __slots__ = ("backward", "edges", "name", "outputs", "scope", "sequence")

    def __init__(self, name: str, inputs: Sequence[Tensor], outputs: int, backward: Backward):
        tape = inputs[0].tape
        self.name, self.outputs, self.scope = name, outputs, tape.scope
        self.backward: Backward | None = backward
        self.sequence = next(tape.sequence)
        self.edges = [Edge.to(t) for t in inputs]


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a gradient goes: an output slot of an earlier node, or a leaf."""

    target: "Node | Tensor"
    slot: int
    shape: Shape
    dtype: DType

    @staticmethod
    def to(t: Tensor) -> "Edge | None":
        if not t.requires_grad:
            return None
        return Edge(t.node or t, t.slot, t.shape, t.dtype)


class Saved:
    """A tensor kept for backward. Under activation checkpointing it is only the promise of one."""

    __slots__ = ("__weakref__", "frame", "op", "scope", "tensor")

    def __init__(self, tensor: Tensor | None, op: str, scope: str, frame: "Frame | None" = None):
        self.tensor, self.op, self.scope, self.frame = tensor, op, scope, frame

    def get(self) -> Tensor:
        """The tensor, made again if it was only promised; a promise is good for one call."""
        if self.frame is None:
            assert self.tensor is not None
            return self.tensor
        if self.tensor is None:
            self.frame.recompute()
        tensor, self.tensor, self.frame = self.tensor, None, None
        assert tensor is not None, f"{self.op} was not made again"
        return tensor


class _EnoughRecomputed(Exception):
    """The last tensor that backward needs has been made again."""


class Frame:
    """One checkpointed piece of the forward pass: its inputs are kept, its saved tensors are made again on demand.

    As torch.utils.checkpoint (use_reentrant=False) does it: the piece runs again as a whole when backward first asks
    for one of its tensors, and stops at the last one, so the very last matrix product is not repeated.
    """

    def __init__(self, tape: "Tape", function: Callable[[Tensor], Tensor], x: Tensor):
        self.tape, self.function, self.x = tape, function, x
        self.input = Saved(x.detach(), "checkpoint", tape.scope)
        self.promises: list[Saved] = []
        self.filled = 0

    def recompute(self) -> None:
        tape = self.tape
        self.filled = 0
        outer, tape.refilled, tape.grad_enabled = tape.scope, self, True
        try:
            self.function(self.x)
        except _EnoughRecomputed:
            pass
        finally:
            tape.refilled, tape.grad_enabled, tape.scope = None, False, outer

    def fill(self, tensor: Tensor) -> None:
        self.promises[self.filled].tensor = tensor
        self.filled += 1
        if self.filled == len(self.promises):
            raise _EnoughRecomputed


@dataclass
class Phase:
    """Bytes at the end of a phase and at its worst moment, as the allocator counts them."""

    end: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    peak_tensor: str = ""
    """The tensor whose allocation made the peak."""
    peak_reserved: int = 0


class Tape:
    """Allocator, kernel list, autograd switch and the current phase and scope of one predicted step."""

    def __init__(
        self,
        autocast: bool = False,
        workspace: int = 0,
        allocator: CachingAllocator | PlainAllocator | None = None,
    ):
        """`workspace`: bytes that cuBLAS takes for each thread that multiplies."""
        self.allocator = allocator or CachingAllocator()
        self.autocast = autocast
        self._workspace = workspace
        self._workspaces: dict[str, Storage] = {}
        self.grad_enabled = True
        self.in_backward = False
        self.kernels: list[Kernel] = []
        self.live: dict[str, int] = {}
        self.phases: dict[str, Phase] = {}
        self.phase = ""
        self.scope = ""
        self._saved: list[ReferenceType[Saved]] = []
        self.packing: Frame | None = None
        self.refilled: Frame | None = None
        self.sequence = count()
        self.enter("init")

    # Memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, kind: Kind, name: str) -> Block | None:
        """Bytes from the caching allocator, and the phase's peak brought up to date."""
        block = self.allocator.malloc(nbytes)
        self.live[kind] = self.live.get(kind, 0) + (block.size if block else 0)
        phase = self.phases[self.phase]
        phase.peak_reserved = self.allocator.reserved
        if self.allocator.allocated > phase.peak:
            phase.peak, phase.at_peak = self.allocator.allocated, dict(self.live)
            phase.peak_tensor = name
        return block

    def release(self, storage: Storage) -> None:
        if storage.block is not None:
            self.live[storage.kind] -= storage.block.size
            self.allocator.free(storage.block)

    def relabel(self, storage: Storage, kind: Kind) -> None:
        """Count the storage under another heading from now on."""
        size = storage.block.size if storage.block is not None else 0
        self.live[storage.kind] -= size
        self.live[kind] = self.live.get(kind, 0) + size
        storage.kind = kind

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        self.finish()
        self.phase = phase
        allocated = self.allocator.allocated
        self.phases[phase] = Phase(allocated, allocated, dict(self.live), "", self.allocator.reserved)

    def finish(self) -> None:
        if self.phase:
            self.phases[self.phase].end = self.allocator.allocated

    @contextmanager
    def inside(self, name: str) -> Generator[None]:
        """Name the part of the model that the kernels and tensors made in this block belong to."""
        outer = self.scope
        self.scope = f"{outer}.{name}" if outer else name
        try:
            yield
        finally:
            self.scope = outer

    # Tensors and kernels --------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: DType, name: str, kind: Kind = "activations") -> Tensor:
        """Memory, no kernel."""
        full = f"{self.scope}.{name}" if self.scope else name
        return Tensor(shape, dtype, Storage(self, prod(shape) * ITEMSIZE[dtype], kind, full))

    def launch(self, name: str, tensors: Sequence[Tensor], flops: int = 0, shape=(0, 0, 0, 0)) -> None:
        """Record a kernel that touches each of `tensors` once."""
        dtype = tensors[0].dtype if flops else "fp32"
        nbytes = sum(t.nbytes for t in tensors)
        even = not flops and all(t.shape == tensors[0].shape for t in tensors)
        self.kernels.append(Kernel(name, self.phase, self.scope, nbytes, flops, dtype, shape, even))

    def reserve_workspace(self) -> None:
        """cuBLAS takes scratch memory once for each thread that multiplies: the caller's, and autograd's."""
        thread = "backward" if self.in_backward else "forward"
        if self._workspace and thread not in self._workspaces:
            self._workspaces[thread] = Storage(self, self._workspace, "workspace", f"cublas.{thread}")

    # Autograd -------------------------------------------------------------------------------------------------

    def records(self, *inputs: Tensor) -> bool:
        """Whether an operation on these inputs becomes a node."""
        return self.grad_enabled and any(t.requires_grad for t in inputs)

    def save(self, tensor: Tensor, op: str) -> Saved:
        """Keep a tensor for backward (or promise it, inside a checkpointed piece)."""
        if self.refilled is not None:
            self.refilled.fill(tensor.detach())
            return Saved(tensor.detach(), op, self.scope)
        saved = Saved(None if self.packing else tensor.detach(), op, self.scope, self.packing)
        if self.packing is not None:
            self.packing.promises.append(saved)
        else:
            self._saved.append(ref(saved))
        return saved

    def saved(self) -> list[Saved]:
        """Everything that is kept for backward at this moment, in the order of saving."""
        return [saved for saved in (r() for r in self._saved) if saved is not None]

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x), keeping only `x` for backward."""
        if not self.grad_enabled:
            return function(x)
        self.packing = Frame(self, function, x)
        self._saved.append(ref(self.packing.input))
        try:
            return function(x)
        finally:
            self.packing = None

    def backward(self, root: Tensor) -> None:
        """Gradients of every leaf that `root`, a scalar, depends on."""
        self.grad_enabled, self.in_backward = False, True
        assert root.node is not None
        waiting = _dependencies(root.node)
        arrived: dict[Node, list[Tensor | None]] = {root.node: [self.empty((), "fp32", "grad")]}
        ready = [(-root.node.sequence, root.node)]
        while ready:
            node = heapq.heappop(ready)[1]
            for edge, grad in self._run(node, arrived.pop(node)):
                target = edge.target
                if isinstance(target, Tensor):
                    self._accumulate(target, grad)
                    continue
                empty: list[Tensor | None] = [None] * target.outputs
                slots = arrived.setdefault(target, empty)
                if grad is not None:
                    slots[edge.slot] = self._added(slots[edge.slot], grad)
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, (-target.sequence, target))
                del grad
        self.grad_enabled, self.in_backward, self.scope = True, False, ""

    def _run(self, node: Node, grads: list[Tensor | None]) -> Iterator[tuple[Edge, Tensor | None]]:
        """The gradients of a node's inputs, in the shape and type of these."""
        assert node.backward is not None
        self.scope = node.scope
        results = list(node.backward(*grads))
        grads.clear()
        node.backward = None
        for i, edge in enumerate(node.edges):
            if edge is None:
                results[i] = None
                continue
            grad, results[i] = results[i], None
            if grad is not None and grad.shape != edge.shape:
                summed = self.empty(edge.shape, grad.dtype, "sum_to")
                self.launch("sum", (grad, summed))
                grad = summed
            if grad is not None and grad.dtype != edge.dtype:
                cast = self.empty(edge.shape, edge.dtype, "cast")
                self.launch("cast", (grad, cast))
                grad = cast
            results[i] = grad
            del grad
        while results:
            edge = node.edges[len(node.edges) - len(results)]
            grad = results.pop(0)
            if edge is not None:
                yield edge, grad
            del grad

    def _added(self, old: Tensor | None, new: Tensor) -> Tensor:
        """The sum of two gradients of one tensor, in place of the first where its memory is its own."""
        if old is None:
            return new
        if old.view:
            out = self.empty(old.shape, old.dtype, "grad")
            self.launch("add", (old, new, out))
            return out
        self.launch("add", (old, new, old))
        return old

    def _accumulate(self, leaf: Tensor, grad: Tensor | None) -> None:
        """The first gradient of a leaf is taken over as it is; a tied matrix gets a second one, added like any."""
        if grad is not None:
            leaf.grad = self._added(leaf.grad, grad)
            self.relabel(leaf.grad.storage, "gradients")


def _dependencies(root: Node) -> dict[Node, int]:
    """How many gradients each node waits for."""
    counts: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None or isinstance(edge.target, Tensor):
                continue
            if edge.target not in counts:
                counts[edge.target] = 0
                stack.append(edge.target)
            counts[edge.target] += 1
    return counts
