"""The shape of a Transformer."""

from dataclasses import dataclass, replace

from groundup.errors import UserError


def nearest_multiple(value: float, multiple: int) -> int:
    """The multiple of `multiple` closest to `value`, at least one of it."""
    return max(1, round(value / multiple)) * multiple


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder-only Transformer with RMSNorm, RoPE and SwiGLU."""

    vocab_size: int = 0
    """Number of token ids; 0: the tokenizer's."""
    context_length: int = 256
    """Longest sequence in tokens that the model sees at once."""
    d_model: int = 512
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of Transformer blocks."""
    n_heads: int = 16
    """Number of query heads; divides d_model, and d_model / n_heads is even (RoPE turns pairs)."""
    n_kv_heads: int = 0
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads (GQA); 0: n_heads."""
    d_ff: int = 0
    """Width of the feed-forward layer; 0: 8/3 · d_model to the nearest multiple of 64."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Whether the token embedding and the output head are one matrix."""

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    def resolve(self, vocab_size: int = 0) -> "ModelConfig":
        """The same shape with every derived field filled in and checked.

        `vocab_size`: the tokenizer's, used where the field is 0. Raises UserError naming the offending number.
        """
        config = replace(
            self,
            vocab_size=self.vocab_size or vocab_size,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_ff=self.d_ff or nearest_multiple(8 / 3 * self.d_model, 64),
        )
        config._check()
        return config

    def _check(self) -> None:
        for name in ("vocab_size", "context_length", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be positive")
        if self.d_model % self.n_heads:
            legal = nearest_multiple(self.d_model / self.n_heads, 2) * self.n_heads
            raise UserError(
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}; "
                f"the nearest legal d_model is {legal}"
            )
        if self.d_head % 2:
            raise UserError(
                f"model.d_model / model.n_heads is {self.d_head}; RoPE turns pairs, so it must be even: "
                f"the nearest legal d_model is {nearest_multiple(self.d_head, 2) * self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            legal = min(
                (n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0),
                key=lambda n: abs(n - self.n_kv_heads),
            )
            raise UserError(
                f"model.n_kv_heads {self.n_kv_heads} does not divide model.n_heads {self.n_heads}; "
                f"the nearest legal value is {legal}"
            )
