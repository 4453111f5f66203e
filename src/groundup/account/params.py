"""Parameters by component, from the shape alone.

Per block: attention d·(H·dₕ) + 2·d·(Hₖᵥ·dₕ) + (H·dₕ)·d, feed-forward 3·d·d_ff (gated) or 2·d·d_ff (ungated), two
norm gains 2·d (2·dₕ more with QK-norm, none without norms). Around the blocks: embedding V·d, final gain d (pre-norm
only), head V·d (0 when tied). The ungated figures answer a
question about the literature: GPT-2's published sizes have no gate, and both counts circulate under one name.
"""

from dataclasses import replace
from math import prod

from groundup.config import ModelConfig


def ungated(config: ModelConfig) -> ModelConfig:
    """The same shape with a feed-forward of two matrices at the same d_ff; `config` is resolved."""
    return replace(config, ffn="silu")


def parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by component; `config` is resolved.

    Keys: embeddings, attention.{q,k,v,output}, ffn, norms, head, layer (one block), tied (the parameters that tying
    saves), non_embedding (total − embeddings − head, what scaling laws count), matrix (those that multiply every
    token: N of 6·N·D), total.
    """
    attention = [f"attention.{part}" for part in ("q", "k", "v", "output")]
    table = dict.fromkeys(["embeddings", *attention, "ffn", "norms", "head"], 0)
    layer = 0
    for name, shape in parameter_shapes(config).items():
        table[_component(name)] += prod(shape)
        layer += prod(shape) if name.startswith("layers.0.") else 0
    total, logits = sum(table.values()), config.vocab_size * config.d_model
    inside = total - table["embeddings"] - table["head"]
    return table | {
        "layer": layer,
        "tied": logits if config.tie_embeddings else 0,
        "non_embedding": inside,
        "matrix": inside - table["norms"] + logits,
        "total": total,
    }


def _component(name: str) -> str:
    """The key of `parameters` that a parameter's state-dict name counts under."""
    *_, room, part, _ = ("", *name.split("."))
    if part.endswith("_proj"):
        return f"attention.{part.removesuffix('_proj')}"
    return "ffn" if room == "ffn" else {"token_embeddings": "embeddings", "lm_head": "head"}.get(part, "norms")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its state-dict name, in the model's order."""
    d, d_ff, d_kv, d_head = config.d_model, config.d_ff, config.n_kv_heads * config.d_head, config.d_head
    block: dict[str, tuple[int, ...]] = {"ln1": (d,)}
    block |= {"attn.q_proj": (d, d), "attn.k_proj": (d_kv, d), "attn.v_proj": (d_kv, d), "attn.output_proj": (d, d)}
    if config.qk_norm:
        block |= {"attn.q_norm": (d_head,), "attn.k_norm": (d_head,)}
    block |= {"ln2": (d,), "ffn.w1": (d_ff, d), "ffn.w2": (d, d_ff)}
    if config.gated:
        block["ffn.w3"] = (d_ff, d)
    if config.norm == "none":
        del block["ln1"], block["ln2"]
    shapes: dict[str, tuple[int, ...]] = {"token_embeddings.weight": (config.vocab_size, d)}
    shapes |= {f"layers.{i}.{name}.weight": shape for i in range(config.n_layers) for name, shape in block.items()}
    if config.norm == "pre":
        shapes["ln_final.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes
