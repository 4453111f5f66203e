"""Forward and backward of a micro-batch as CUDA graphs: one launch in the place of hundreds.

A small model's kernels are shorter than the time the host needs to launch them, and between any two kernels of a large
one there is a gap of a microsecond or two. A graph is recorded once and then launched as a whole; the kernels, and so
the numbers, are the same. There may be two, for the first micro-batch of a step writes the gradients and the others
add to them.

What a graph reads and writes lies where it lay when it was recorded: inputs are copied there, gradients are found
there. Its memory is that of a plain step, but stays with it, so what an evaluation needs comes on top.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor

from groundup.kernels.backend import note_fallback
from groundup.train.guards import is_out_of_memory

WARM_UP = 3
"""Runs before the recording: compilers, cuBLAS and kernels that are proved at first use are done by then."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of warm-ups and recordings: cuBLAS takes memory for each stream and never gives it back."""
    return torch.cuda.Stream(device)


class StepGraph:
    """Graphs of a function that adds to the gradients of `parameters`, each recorded when it is first needed."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.parameters = list(parameters)
        self.recorded: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Graph and loss of the first micro-batch of a step (True), and of the others."""
        self.kept: list[Tensor | None] = []
        """The gradients that the graphs write."""
        self.given_up = False
        """Whether there was no memory to record in."""

    def __call__(
        self,
        gradients: Callable[[Tensor, Tensor, Tensor | int], Tensor],
        inputs: Int[Tensor, "sequences seq"],
        targets: Int[Tensor, "sequences seq"],
        n_valid: int,
        first: bool,
    ) -> Tensor:
        """What gradients(inputs, targets, n_valid) gives, a loss on the GPU, which the next call overwrites.

        All calls must mean the same function and have the same shapes, else ValueError. `first`: of a step; what the
        parameters had for gradients before does not count.
        """
        if self.given_up:
            return gradients(inputs, targets, n_valid)
        if not self.recorded:
            self._prepare(gradients, inputs, targets)
        if inputs.shape != self.inputs.shape:
            raise ValueError(
                f"a micro-batch of {tuple(inputs.shape)} does not fit the recorded {tuple(self.inputs.shape)}"
            )
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        self.n_valid.fill_(n_valid)
        if first not in self.recorded:
            try:
                self._record(gradients, first)
            except Exception as error:  # what recording leaves behind may hide the reason
                if not any(is_out_of_memory(e) for e in (error, error.__context__) if e is not None):
                    raise
                self.given_up = True
            if self.given_up:  # nothing ran: the gradients are those of the micro-batches before
                note_fallback("train.cuda_graph", "there is no memory to record a step; steps run as they are")
                self.release(forget=first)
                return gradients(inputs, targets, n_valid)
        for parameter, gradient in zip(self.parameters, self.kept, strict=True):
            parameter.grad = gradient
        graph, loss = self.recorded[first]
        graph.replay()
        return loss

    def release(self, forget: bool = True) -> bool:
        """Give the graphs' memory back, with the gradients unless `forget` is False; whether there was any.

        Between two steps: the next one is recorded anew.
        """
        held = bool(self.recorded)
        self.recorded.clear()
        self.kept = []
        if forget:
            self._forget()
        return held

    def _prepare(self, gradients: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Run a few times aside, as recording needs it."""
        self.inputs, self.targets = inputs.clone(), targets.clone()
        device = inputs.device
        self.n_valid = torch.ones((), device=device)
        self.pool = torch.cuda.graph_pool_handle()
        side = side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._forget()
                gradients(self.inputs, self.targets, self.n_valid)
        torch.cuda.current_stream(device).wait_stream(side)
        self._forget()

    def _record(self, gradients: Callable[..., Tensor], first: bool) -> None:
        """Nothing runs: the graph's first replay does. Gradients that are there are added to, others come to be."""
        graph, device = torch.cuda.CUDAGraph(), self.inputs.device
        before = torch.cuda.current_stream(device)
        how = {"pool": self.pool, "stream": side_stream(device)}
        try:
            # Only this thread is recorded: the one that reads the next batch pins memory meanwhile.
            with torch.cuda.graph(graph, **how, capture_error_mode="thread_local"):
                loss = gradients(self.inputs, self.targets, self.n_valid)
        finally:
            torch.cuda.set_stream(before)  # torch's context leaves its own where the recording failed
        self.recorded[first] = graph, loss
        self.kept = [parameter.grad for parameter in self.parameters]

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
