"""The decoder-only Transformer: embed, n_layers pre-norm blocks, final norm, output head."""

from math import sqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.model.attention import Cache, MultiHeadSelfAttention, causal_mask
from groundup.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from groundup.model.loss import cross_entropy
from groundup.model.rope import RotaryEmbedding, Rotation


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)) (pre-norm: Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.norm_eps)
        self.attn = MultiHeadSelfAttention(config.d_model, config.n_heads, config.n_kv_heads)
        self.ln2 = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config.d_model, config.d_ff)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        mask: Bool[Tensor, "seq keys"],
        rotation: Rotation | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "batch seq d_model"]:
        x = x + self.attn(self.ln1(x), mask, rotation, cache, layer)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Logits of the next token at every position, or the loss when targets are given."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config = config.resolve()
        self.token_embeddings = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.ln_final = RMSNorm(config.d_model, config.norm_eps)
        # Tied: one matrix embeds and unembeds, under one name.
        self.lm_head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size)
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
            if isinstance(module, Linear):
                module.init_weights(generator)
            elif isinstance(module, Embedding):
                module.init_weights(generator, 1 / sqrt(self.config.d_model) if self.lm_head is None else 1.0)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, RotaryEmbedding):
                module.reset(device)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        n_valid: Tensor | float | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits (batch, seq, vocab_size); with `targets`, the scalar loss of loss.cross_entropy.

        With a `cache`, `ids` continue the tokens it holds: positions count from cache.length, and the caller advances
        it afterwards. Raises UserError when the sequence would be longer than context_length.
        """
        past = 0 if cache is None else cache.length
        end = past + ids.shape[-1]
        if end > self.config.context_length:
            raise UserError(
                f"a sequence of {end} tokens is longer than model.context_length {self.config.context_length}; "
                "cut it, or train with a longer context"
            )
        mask = causal_mask(ids.shape[-1], end, ids.device)
        rotation = self.rope(slice(past, end))
        x = self.token_embeddings(ids)
        for index, block in enumerate(self.layers):
            x = block(x, mask, rotation, cache, index)
        x = self.ln_final(x)
        logits = x @ self.token_embeddings.weight.T if self.lm_head is None else self.lm_head(x)
        return logits if targets is None else cross_entropy(logits, targets, n_valid)


def count_parameters(model: nn.Module) -> int:
    """Number of trainable scalars; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
