"""The shape of a Transformer, and how it is computed."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from groundup.errors import UserError, nearest_name

Norm = Literal["pre", "post", "none"]
Position = Literal["rope", "nope"]
FeedForward = Literal["swiglu", "silu", "relu2"]
Attention = Literal["auto", "reference", "flash-torch", "flash-triton", "flash-hopper", "sdpa"]
Kernels = Literal["auto", "reference", "loss", "triton"]
CHOICES = {"norm": Norm, "position": Position, "ffn": FeedForward, "attention": Attention, "kernels": Kernels}
HOW = ("attention", "attention_deterministic", "kernels", "checkpoint_activations")
"""Fields that say how the model is computed: speed, memory and rounding; they change neither function nor weights."""


def nearest_multiple(value: float, multiple: int) -> int:
    """The multiple of `multiple` closest to `value`, at least one of it."""
    return max(1, round(value / multiple)) * multiple


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer: pre-norm with RMSNorm, RoPE and SwiGLU unless said otherwise."""

    vocab_size: int = 0
    """Number of token ids; 0: the tokenizer's."""
    context_length: int = 256
    """Longest sequence in tokens that the model sees at once."""
    d_model: int = 512
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of Transformer blocks."""
    n_heads: int = 16
    """Number of query heads; divides d_model, and with RoPE d_model / n_heads is even (it turns pairs)."""
    n_kv_heads: int = 0
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads (GQA); 0: n_heads."""
    d_ff: int = 0
    """Width of the feed-forward layer; 0: 4 · d_model, for swiglu 8/3 · d_model to the nearest multiple of 64."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Whether the token embedding and the output head are one matrix."""
    norm: Norm = "pre"
    """Where RMSNorm stands: pre (before attention and feed-forward, and before the head), post (after each residual
    sum), none."""
    position: Position = "rope"
    """rope turns queries and keys by their position; nope: positions are known from the causal mask alone."""
    ffn: FeedForward = "swiglu"
    """swiglu has three matrices; silu and relu2 (ReLU squared) have two, without a gate."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm over the head's width, before RoPE."""
    attention_softcap: float = 0.0
    """Attention scores become cap · tanh(score / cap); 0: they stay."""
    logit_softcap: float = 0.0
    """Logits become cap · tanh(logit / cap); 0: they stay."""
    attention: Attention = "auto"
    """auto: by device, type and width (kernels on a GPU, reference on a CPU). reference holds all scores; flash-torch,
    flash-triton, flash-hopper and sdpa (PyTorch's) do not."""
    attention_deterministic: bool = True
    """Whether attention's backward adds in a fixed order, so that runs repeat bit for bit."""
    kernels: Kernels = "auto"
    """Norm, RoPE, SwiGLU and loss. triton: kernels for all; loss: plain operations, and a cross entropy that never
    holds all logits; reference: plain operations; auto: on a GPU triton, but for the norms of a compiled model (the
    compiler fuses them with their neighbours); on a CPU reference."""
    checkpoint_activations: int = 0
    """Activation checkpointing: blocks a piece holds whose activations are computed again in backward; 0: none."""

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a third matrix, the gate's."""
        return self.ffn == "swiglu"

    def resolve(self, vocab_size: int = 0) -> "ModelConfig":
        """The same shape with every derived field filled in and checked.

        `vocab_size`: the tokenizer's, used where the field is 0. Raises UserError naming the offending number.
        """
        config = replace(
            self,
            vocab_size=self.vocab_size or vocab_size,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_ff=self.d_ff or (nearest_multiple(8 / 3 * self.d_model, 64) if self.gated else 4 * self.d_model),
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
        for name in ("attention_softcap", "logit_softcap", "checkpoint_activations"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be a number ≥ 0 (0: none)")
        for name, kind in CHOICES.items():
            value, legal = getattr(self, name), get_args(kind)
            if value not in legal:
                raise UserError(f'model.{name} cannot be "{value}"{nearest_name(value, legal)}')
        if self.attention_softcap and self.attention in ("flash-torch", "sdpa"):
            raise UserError(
                f'model.attention "{self.attention}" knows no softcap; use "auto", "reference" or "flash-triton", or '
                "set model.attention_softcap to 0"
            )
        if self.d_model % self.n_heads:
            legal = nearest_multiple(self.d_model / self.n_heads, 2) * self.n_heads
            raise UserError(
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}; "
                f"the nearest legal d_model is {legal}"
            )
        if self.d_head % 2 and self.position == "rope":
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
