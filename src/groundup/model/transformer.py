"""The decoder-only Transformer: embed, n_layers blocks, final norm, output head."""

from functools import partial
from math import sqrt
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.model.attention import Cache, MultiHeadSelfAttention, causal_mask, plain_attention
from groundup.model.layers import Embedding, Linear, RMSNorm, feed_forward
from groundup.model.loss import Head, logits_or_loss
from groundup.model.rope import RotaryEmbedding, Rotation


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)) (pre-norm: Xiong et al. 2020).

    norm "post" normalises the sums instead (Vaswani et al. 2017), "none" nothing.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.post = config.norm == "post"
        self.ln1 = make_norm(config)
        self.attn = MultiHeadSelfAttention(config.d_model, config.n_heads, config.n_kv_heads, config)
        self.ln2 = make_norm(config)
        self.ffn = feed_forward(config.ffn, config.d_model, config.d_ff, config.kernels)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        mask: Bool[Tensor, "... seq keys"] | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "batch seq d_model"]:
        if self.post:
            x = self.ln1(self.attn(x, mask, rotation, cache, layer, residual=x))
            return self.ln2(self.ffn(x, x))
        x = self.attn(self.ln1(x), mask, rotation, cache, layer, residual=x)
        return self.ffn(self.ln2(x), x)


def residual_type(x: Tensor) -> Tensor:
    """The embedded tokens in the type of the residual stream: bf16 under bf16's autocast, else as they are.

    Autocast leaves an embedding in float32, and every sum and norm after it would read and write twice the bytes.
    float16 stays float32 here: sums over many layers leave its range.
    """
    bf16 = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    return x.bfloat16() if bf16 else x


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of a block, or nothing."""
    return nn.Identity() if config.norm == "none" else RMSNorm(config.d_model, config.norm_eps, config.kernels)


class TransformerLM(nn.Module):
    """Logits of the next token at every position, or the loss when targets are given."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config = config.resolve()
        self.token_embeddings = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        # A post-norm block ends in a norm of its own.
        self.ln_final = make_norm(config) if config.norm == "pre" else nn.Identity()
        # Tied: one matrix embeds and unembeds, under one name.
        shape = config.d_model, config.vocab_size
        self.lm_head = None if config.tie_embeddings else Head(*shape, config.logit_softcap, config.kernels)
        self.rope = None
        if config.position == "rope":
            self.rope = RotaryEmbedding(config.d_head, config.context_length, config.rope_theta)
        self.init_weights()

    def init_weights(self, seed: int = 0) -> None:
        """Truncated normal weights and unit gains, the same for the same seed and kind of device.

        A tied embedding starts at variance 1 / d_model: as the output head it must give logits of unit scale, and a
        table of unit variance would start at a loss far above ln(vocab_size).
        """
        device = self.token_embeddings.weight.device
        if device.type == "meta":
            return
        generator = torch.Generator(device).manual_seed(seed)
        for module in self.modules():
            self.init_module(module, generator)

    def init_module(self, module: nn.Module, generator: torch.Generator) -> None:
        """Give one of the model's modules its own first values, on the generator's device."""
        if isinstance(module, Linear):
            module.init_weights(generator)
        elif isinstance(module, Embedding):
            module.init_weights(generator, 1 / sqrt(self.config.d_model) if self.lm_head is None else 1.0)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, RotaryEmbedding):
            module.reset(generator.device)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        n_valid: Tensor | float | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits (batch, seq, vocab_size); with `targets`, the scalar loss of loss.cross_entropy.

        A `cache` takes the keys and values of all layers. Raises UserError when the sequence is longer than
        context_length.
        """
        seq = ids.shape[-1]
        if seq > self.config.context_length:
            raise UserError(
                f"a sequence of {seq} tokens is longer than model.context_length {self.config.context_length}; "
                "cut it, or train with a longer context"
            )
        weight = self.token_embeddings.weight
        mask = causal_mask(seq, seq, ids.device) if plain_attention(self.config.attention, weight) else None
        # No name for the embedded tokens here: it would hold them through all blocks.
        x = self.blocks(residual_type(self.token_embeddings(ids)), mask, self.rotation(slice(seq)), cache)
        x = self.ln_final(x)
        return self.head(x, targets, n_valid)

    def rotation(self, positions: Int[Tensor, "... seq"] | slice) -> Rotation | None:
        """What turns the queries and keys at these positions; None without RoPE."""
        return None if self.rope is None else self.rope(positions)

    def blocks(
        self,
        x: Float[Tensor, "batch seq d_model"],
        mask: Bool[Tensor, "... seq keys"] | None,
        rotation: Rotation | None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """All blocks; in training, pieces of checkpoint_activations blocks keep only what enters them."""
        every = self.config.checkpoint_activations if torch.is_grad_enabled() and cache is None else 0
        n_layers, size = len(self.layers), every or 1

        def piece(x: Tensor, first: int) -> Tensor:
            for index in range(first, min(first + size, n_layers)):
                x = self.layers[index](x, mask, rotation, cache, index)
            return x

        for first in range(0, n_layers, size):
            # The model draws no random numbers, so there is no random state to keep.
            again: Any = partial(checkpoint, piece, use_reentrant=False, preserve_rng_state=False)
            x = again(x, first) if every else piece(x, first)
        return x

    def head(
        self,
        x: Float[Tensor, "batch seq d_model"],
        targets: Int[Tensor, "batch seq"] | None = None,
        n_valid: Tensor | float | None = None,
    ) -> Tensor:
        """Logits, or the loss, from the last block's output after ln_final."""
        if self.lm_head is not None:
            return self.lm_head(x, targets, n_valid)
        config = self.config
        return logits_or_loss(x, self.token_embeddings.weight, targets, n_valid, config.logit_softcap, config.kernels)


def count_parameters(model: nn.Module) -> int:
    """Number of trainable scalars; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
