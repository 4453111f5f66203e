"""One step of generation: every row's newest token at the row's own position.

`decode` is the step over any number of keys. `CompiledDecode` runs it over the whole cache: its shapes never change, so
torch.compile sees it once, whatever the prompts' lengths are, and on a GPU it is recorded as one CUDA graph. A replay
costs the host one launch instead of some twenty a layer, which is what a step of a small model waits for otherwise.

Greedily the device needs no host: the token it chose is its own next input. So the host launches the step after the one
it waits for, and all that the host does between two tokens is hidden behind a step (`CompiledDecode.greedy`). The price
is one step that is thrown away where the text ends or the context is full.

Cost: the weights once for all rows, and the keys looked at: compiled, those of the whole context. Rejected: compiling
the prefill too (a compilation a length, or padding to a few lengths), and CUDA graphs of torch.compile's own (they copy
or refuse inputs that are written to, as the cache is).
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groundup.generate.cache import KVCache
from groundup.generate.sampling import check_finite
from groundup.kernels import decode as one_kernel
from groundup.kernels.backend import agree, proven
from groundup.model import TransformerLM
from groundup.model.transformer import residual_type


class Places:
    """The cache as one step sees it: row i's new keys go to place i, and all keys of the layer come back."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor | slice, places: Tensor | int):
        self.keys, self.values, self.rows, self.places = keys, values, rows, places

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer, self.rows, :, self.places] = k[:, :, 0].to(self.keys.dtype)
        self.values[layer, self.rows, :, self.places] = v[:, :, 0].to(self.keys.dtype)
        return self.keys[layer], self.values[layer]


def decode(
    model: TransformerLM,
    keys: Float[Tensor, "layers batch n_kv_heads n_keys d_head"],
    values: Float[Tensor, "layers batch n_kv_heads n_keys d_head"],
    tokens: Int[Tensor, "batch"],
    places: Int[Tensor, "batch"] | int,
) -> Float[Tensor, "batch vocab"]:
    """Logits after each row's next token; its keys and values are written to the row's place.

    The model's own parts, with a rotation (batch, 1, 1, d_head / 2) and a mask (batch, 1, 1, n_keys) of each row's own.
    `places` one number, n_keys - 1: all rows are as long, so there is nothing to mask and the kernels can run.
    """
    if isinstance(places, int):
        mask, rotation, rows = None, model.rotation(slice(places, places + 1)), slice(None)
    else:
        mask = (torch.arange(keys.shape[3], device=places.device) <= places[:, None])[:, None, None]
        rotation, rows = model.rotation(places[:, None, None]), torch.arange(len(places), device=places.device)
    x = residual_type(model.token_embeddings(tokens[:, None]))
    x = model.blocks(x, mask, rotation, Places(keys, values, rows, places))
    return model.head(model.ln_final(x))[:, 0]


@cache
def compiled_decode(on_gpu: bool) -> Callable[..., Tensor]:
    """`decode` under torch.compile, once a process: importing the compiler takes seconds."""
    # A product with few rows is then written as a sum that reads the weights at full speed.
    options: dict[str, Any] = {"coordinate_descent_tuning": True} if on_gpu else {}
    return torch.compile(decode, dynamic=False, fullgraph=True, options=options)


_proof: dict[Any, bool] = {}


class CompiledDecode:
    """`decode` over the whole of one cache, compiled; one kernel where kernels.decode knows the model.

    `limit`: the ids from there on are never chosen. Made before the cache is filled: the kernel's proof writes to it.
    """

    def __init__(self, model: TransformerLM, cache: KVCache, limit: int | None = None):
        self.model, self.cache, self.limit = model, cache, limit
        self.keys, self.values = cache.keys, cache.values
        self.device, self.batch, self.length = self.keys.device, self.keys.shape[1], self.keys.shape[3]
        on_gpu = self.keys.is_cuda
        # Tokens, places and the sum of the logits side by side: one transfer brings them to the host.
        self.state = torch.zeros(2 * self.batch + 1, dtype=torch.long, device=self.device)
        self.inputs, self.total = self.state[:-1].view(2, self.batch), self.state.view(torch.float64)[-1]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.greedy_graph: torch.cuda.CUDAGraph | None = None
        # Two steps can be under way, so results land in turn in one of two places on the host.
        slots = torch.zeros(2, len(self.state), dtype=torch.long, pin_memory=on_gpu)
        self.slots = slots.unbind()
        self.ids, self.totals = slots.numpy()[:, : self.batch], slots.view(torch.float64).numpy()[:, -1]
        self.arrived = [torch.cuda.Event(), torch.cuda.Event()] if on_gpu else None
        self.turn = 0
        self.ahead: tuple[int, list[int], list[int]] | None = None
        self.kernel = self._proven_kernel() if one_kernel.takes(model, self.keys) else None

    def _proven_kernel(self) -> one_kernel.DecodeKernel | None:
        """The step as one kernel, where it came out right on this device and shape."""
        kernel = one_kernel.DecodeKernel(self.model, self.keys, self.values, self.state, self.limit)

        @torch.no_grad()
        def check() -> bool:
            plain = decode(self.model, self.keys, self.values, *self.inputs)
            kernel.run()
            return agree(kernel.logits, plain, within=0.05)  # through all layers

        key = self.device, *kernel.sizes.items()
        return kernel if proven(_proof, key, "a token in one kernel", "the compiled step", check) else None

    def __call__(self, tokens: Sequence[int], places: Sequence[int]) -> Float[Tensor, "batch vocab"]:
        """Logits after each row's token at the row's place; overwritten by the next call."""
        self.ahead = None
        self._give(tokens, places)
        if self.device.type != "cuda":
            return self._run()
        if self.graph is None:
            self.graph, self.logits = self._record(self._run)
            self._give(tokens, places)  # warming up may have moved on
        assert self.logits is not None
        self.graph.replay()
        return self.logits

    def greedy(self, tokens: Sequence[int], places: Sequence[int]) -> list[int]:
        """The likeliest id after each row's token; of equal ones the lowest. Raises UserError for logits not finite.

        A row with place -1 is done: it rides along anywhere in its part of the cache, and its id means nothing.

        `ahead` is what the step under way was given on the device: the ids returned last, one place on, in a cache
        without a prefill since. If that is what is asked now, its result is awaited; else it was in vain and the step
        starts anew. A step in vain does no harm. It wrote to the one place after the tokens held (a row that is done:
        somewhere in its own part), and a place is read only by steps at it or after it, the first of which writes it,
        or after a prefill that ends beyond it. All of them come later on the same stream.
        """
        if self.arrived is not None:
            self.arrived[self.turn].wait()  # nothing to wait for, unless the caller has changed streams
        foreseen, self.ahead = self._foreseen(tokens, places), None
        if not foreseen:
            self._give(tokens, places)
            if self.device.type == "cuda" and self.greedy_graph is None:
                self.greedy_graph, _ = self._record(self._advance)
                self._give(tokens, places)  # warming up has moved on
            self._launch()
        awaited, prefills = self.turn, self.cache.prefills
        goes_on = max(places) + 1 < self.length
        if goes_on:
            self._launch()
        if self.arrived is not None:
            self.arrived[awaited].synchronize()
        check_finite(self.totals[awaited])
        ids = self.ids[awaited].tolist()
        if goes_on:
            self.ahead = prefills, ids, [place + 1 if place >= 0 else -1 for place in places]
        return ids.copy()  # the caller may change its own

    def _foreseen(self, tokens: Sequence[int], places: Sequence[int]) -> bool:
        if self.ahead is None or self.ahead[0] != self.cache.prefills:
            return False
        asked, given = zip(tokens, places, strict=True), zip(*self.ahead[1:], strict=True)
        return all(row[1] < 0 or row == told for row, told in zip(asked, given, strict=True))

    def _give(self, tokens: Sequence[int], places: Sequence[int]) -> None:
        self.inputs.copy_(torch.tensor([tokens, [max(place, 0) for place in places]]))

    def _launch(self) -> None:
        """One more step and its result's way to the host; a CPU has done it on return."""
        self.turn = 1 - self.turn
        if self.greedy_graph is not None:
            self.greedy_graph.replay()
        else:
            self._advance()
        # Not in the graph, whose addresses are fixed. This way the memory outlives a generation that is given up, too.
        self.slots[self.turn].copy_(self.state, non_blocking=True)
        if self.arrived is not None:
            self.arrived[self.turn].record()

    def _run(self) -> Tensor:
        """Logits of `inputs`: the one place where they are made."""
        if self.kernel is not None:
            self.kernel.run()
            return self.kernel.logits
        # Every model and batch size is a compilation of its own; the compiler's limit would end a process' ninth.
        with torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            step = compiled_decode(self.keys.is_cuda)
            return step(self.model, self.keys, self.values, *self.inputs)

    def _advance(self) -> None:
        """A step, its choice and the inputs of the next one."""
        if self.kernel is not None:
            self.kernel.run()  # leaves all of it in `state`
            return
        logits = self._run()[:, : self.limit]
        torch.argmax(logits, -1, out=self.inputs[0])
        torch.sum(logits, (0, 1), dtype=torch.float64, out=self.total)
        self.inputs[1].add_(1).clamp_(max=self.length - 1)  # a row that is done comes to the end and stays there

    def _record(self, body: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """Compile and warm up aside, as recording needs it; that writes nowhere but to places from the inputs' on."""
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(3):
                body()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = body()
        return graph, result
