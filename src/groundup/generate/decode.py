"""One step of generation: every row's newest token at the row's own position.

`decode` is the step over any number of keys. `CompiledDecode` runs it over the whole cache: its shapes never change, so
torch.compile sees it once, whatever the prompts' lengths are, and on a GPU it is recorded as one CUDA graph. A replay
costs the host one launch instead of some twenty a layer, which is what a step of a small model waits for otherwise.

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


class CompiledDecode:
    """`decode` over the whole of one cache, compiled; the result is overwritten by the next call."""

    def __init__(self, model: TransformerLM, keys: Tensor, values: Tensor):
        self.cache = keys, values
        self.model, self.device = model, keys.device
        self.decode = compiled_decode(keys.is_cuda)
        self.inputs = torch.zeros(2, keys.shape[1], dtype=torch.long, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def __call__(self, tokens: Sequence[int], places: Sequence[int]) -> Float[Tensor, "batch vocab"]:
        self.inputs.copy_(torch.tensor([tokens, places]))
        if self.device.type != "cuda":
            return self._run()
        if self.graph is None:
            self._record()
        assert self.graph is not None
        assert self.logits is not None
        self.graph.replay()
        return self.logits

    def _run(self) -> Tensor:
        # Every model and batch size is a compilation of its own; the compiler's limit would end a process' ninth.
        with torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            return self.decode(self.model, *self.cache, *self.inputs)

    def _record(self) -> None:
        """Compile and warm up aside, as recording needs it. A step may run twice: it writes the same to its place."""
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._run()
