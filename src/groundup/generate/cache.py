"""The keys and values of the tokens seen so far, so that the next token costs one position and not all of them.

One allocation for all tokens to come, of (n_layers, batch, n_kv_heads, length, d_head), twice: bytes = 2 · n_layers ·
batch · n_kv_heads · length · d_head · bytes per value. Keys are stored after RoPE has turned
them, so a position is never turned twice. A row's tokens lie at the left of its own part, at the positions they would
have alone. Rejected: growing by concatenation, which copies the whole past at each token, O(context²) bytes in all.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.config import ModelConfig


class KVCache:
    """Room for `length` tokens of every layer in each of `batch_size` rows.

    `begin_prefill` says which rows the next forward pass starts anew; `append` is what the model's attention calls
    then. A step of one token is decode.py's.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        length: int | None = None,
    ):
        """`config`: resolved. `dtype`: of the keys and values (the model's weights', as a rule). `length`: None for
        config.context_length.
        """
        shape = (config.n_layers, batch_size, config.n_kv_heads, length or config.context_length, config.d_head)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = [0] * batch_size
        """Tokens held by each row, on the host; the next token's position."""
        self.prefills = 0
        """Prefills begun so far: what was computed ahead of one is void after it."""
        self._rows = torch.arange(batch_size, device=device)

    def begin_prefill(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The next pass starts these rows anew with so many tokens each."""
        self._rows = torch.tensor(rows, device=self.keys.device)
        self.prefills += 1
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def append(
        self, layer: int, k: Float[Tensor, "rows n_kv_heads seq d_head"], v: Float[Tensor, "rows n_kv_heads seq d_head"]
    ) -> tuple[Tensor, Tensor]:
        """Store the k and v of a prefill, after RoPE (in the cache's type, autocast's may differ), and return them."""
        self.keys[layer, self._rows, :, : k.shape[2]] = k.to(self.keys.dtype)
        self.values[layer, self._rows, :, : k.shape[2]] = v.to(self.keys.dtype)
        return k, v

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are counted anew, in this order."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.lengths = [self.lengths[row] for row in rows]
