"""Floating-point operations, one matrix product at a time.

A product of (m, k) and (k, n) matrices is m·k·n multiply-adds (MAC), counted as 2·m·k·n FLOP, as
torch.utils.flop_counter does. Element-wise work is left out, there and here: it is bound by memory, not arithmetic.
Backward multiplies twice for each product of forward: the gradients of both operands.

Two ways to count attention stand side by side. As executed: the reference kernel computes all N² scores, a causal
kernel (FlashAttention) skips the half above the diagonal and multiplies five times in backward where two would do.
As the convention of MFU has it (Chowdhery et al. 2022, PaLM, appendix B): 6·N + 12·L·d·T a token, without recompute
and without the causal saving, so that numbers of different kernels compare.
"""

from dataclasses import dataclass

from groundup.account.params import parameters, ungated
from groundup.config import ModelConfig


@dataclass(frozen=True)
class MatrixProduct:
    """`count` times `batch` products of (m, k) and (k, n)."""

    name: str
    count: int
    """Times a forward pass runs it: the number of layers, or 1."""
    batch: int
    m: int
    k: int
    n: int
    part: str
    """attention projections, attention scores, feed-forward or head."""
    executed: float = 1.0
    """How much of the full product the kernel runs: 1/2 where it skips what the causal mask hides, 3 where it makes the
    two gradients as well."""
    backward_factor: float = 2.0
    """Backward's work over forward's."""

    @property
    def forward_flops(self) -> int:
        return int(2 * self.count * self.batch * self.m * self.k * self.n * self.executed)

    @property
    def backward_flops(self) -> int:
        return int(self.forward_flops * self.backward_factor)


def matrix_products(
    config: ModelConfig,
    batch: int,
    context: int,
    attention: str = "reference",
    kernels: str = "reference",
) -> list[MatrixProduct]:
    """Every product of one forward pass, in the model's order; `config` is resolved.

    With kernels other than the reference the loss makes its gradients in the forward pass, the head's among them.
    """
    d, layers, heads, d_head = config.d_model, config.n_layers, config.n_heads, config.d_head
    rows = batch * context
    skips = {"executed": 0.5, "backward_factor": 2.5} if attention == "flash" else {}
    in_forward = {} if kernels == "reference" else {"executed": 3.0, "backward_factor": 0.0}
    pairs = (layers, batch * heads, context)
    products = [
        MatrixProduct("attn.qkv", layers, 1, rows, d, (heads + 2 * config.n_kv_heads) * d_head, "projections"),
        MatrixProduct("attn.scores", *pairs, d_head, context, "scores", **skips),
        MatrixProduct("attn.values", *pairs, context, d_head, "scores", **skips),
        MatrixProduct("attn.output", layers, 1, rows, d, d, "projections"),
        MatrixProduct("ffn.w1", layers, 1, rows, d, config.d_ff, "ffn"),
        MatrixProduct("ffn.w3", layers, 1, rows, d, config.d_ff, "ffn"),
        MatrixProduct("ffn.w2", layers, 1, rows, config.d_ff, d, "ffn"),
        MatrixProduct("head", 1, 1, rows, d, config.vocab_size, "head", **in_forward),
    ]
    return products if config.gated else [p for p in products if p.name != "ffn.w3"]


def flops(
    config: ModelConfig,
    batch: int,
    context: int,
    attention: str = "reference",
    checkpoint_every: int = 0,
    kernels: str = "reference",
) -> dict[str, float]:
    """FLOP of one step and their shares.

    Keys: forward, backward, recompute (activation checkpointing: every block again, less the last product of each
    piece), total (executed), {projections,scores,ffn,head} and share.… of forward, convention (6·N + 12·L·d·T a
    token, times the tokens), per_token, ungated.forward.
    """
    products = matrix_products(config, batch, context, attention, kernels)
    table: dict[str, float] = {
        "forward": sum(p.forward_flops for p in products),
        "backward": sum(p.backward_flops for p in products),
        "recompute": recompute_flops(config, products, checkpoint_every),
    }
    table["total"] = table["forward"] + table["backward"] + table["recompute"]
    for part in ("projections", "scores", "ffn", "head"):
        table[part] = sum(p.forward_flops for p in products if p.part == part)
        table[f"share.{part}"] = table[part] / table["forward"]
    tokens = batch * context
    table["convention"] = tokens * convention_per_token(config, context)
    table["per_token"] = table["total"] / tokens
    without_gate = matrix_products(ungated(config), batch, context, attention, kernels)
    table["ungated.forward"] = sum(p.forward_flops for p in without_gate)
    return table


def recompute_flops(config: ModelConfig, products: list[MatrixProduct], every: int) -> int:
    """What activation checkpointing adds to backward.

    torch.utils.checkpoint stops when the last tensor that backward needs is there again, so the last product of each
    piece (w2 of its last block) is not repeated.
    """
    if not every:
        return 0
    pieces = -(-config.n_layers // every)
    again = sum(p.forward_flops for p in products if p.part != "head")
    return again - sum(p.forward_flops // p.count * pieces for p in products if p.name == "ffn.w2")


def convention_per_token(config: ModelConfig, context: int) -> int:
    """6·N + 12·L·d·T FLOP a trained token: N the parameters that multiply every token (no embedding, no gains)."""
    return 6 * parameters(config)["matrix"] + 12 * config.n_layers * config.n_heads * config.d_head * context
