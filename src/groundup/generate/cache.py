"""The keys and values of the tokens seen so far, so that the next token costs one position and not all of them.

One allocation for the whole context, of (n_layers, batch, n_kv_heads, context_length, d_head), twice: bytes =
2 · n_layers · batch · n_kv_heads · context_length · d_head · bytes per value. Keys are stored after RoPE has turned
them, so a position is never turned twice. Rejected: growing by concatenation, which copies the whole past at each
token, O(context²) bytes in all.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.config import ModelConfig
from groundup.errors import UserError


class KVCache:
    """Room for `config.context_length` tokens of every layer.

    A forward pass over n new tokens calls `append` once a layer; all layers see the same `length`, and the caller ends
    the pass with `advance(n)`.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """`config`: resolved. `dtype`: of the keys and values (the model's weights', as a rule)."""
        shape = (config.n_layers, batch_size, config.n_kv_heads, config.context_length, config.d_head)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.capacity = config.context_length
        self.length = 0
        """Tokens held; the next token's position."""

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_heads seq d_head"],
        v: Float[Tensor, "batch n_kv_heads seq d_head"],
    ) -> tuple[Float[Tensor, "batch n_kv_heads total d_head"], Float[Tensor, "batch n_kv_heads total d_head"]]:
        """Write k (after RoPE) and v behind the tokens held; return all of the layer's, total = length + seq.

        The results are views into the cache, valid until it is written again. Raises UserError when it is full.
        """
        end = self._end(k.shape[2])
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, n: int) -> None:
        """Count n appended tokens as held. Raises UserError past the capacity."""
        self.length = self._end(n)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = 0

    def _end(self, n: int) -> int:
        end = self.length + n
        if end > self.capacity:
            raise UserError(
                f"the KV cache holds {self.length} of at most {self.capacity} tokens and {n} more do not fit; "
                "give at most model.context_length tokens, or reset the cache and go on from the newest ones"
            )
        return end
