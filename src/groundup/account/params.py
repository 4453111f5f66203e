"""Parameters by component, from the shape alone.

Per block: attention d·(H·dₕ) + 2·d·(Hₖᵥ·dₕ) + (H·dₕ)·d, feed-forward 3·d·d_ff (gated) or 2·d·d_ff (ungated), two
norm gains 2·d (2·dₕ more with QK-norm, none without norms). Around the blocks: embedding V·d, final gain d (pre-norm
only), head V·d (0 when tied). The ungated figures answer a
question about the literature: GPT-2's published sizes have no gate, and both counts circulate under one name.
"""

from dataclasses import replace

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
    d, layers = config.d_model, config.n_layers
    gains = 2 * d * (config.norm != "none") + 2 * config.d_head * config.qk_norm  # of a block
    final = d * (config.norm == "pre")
    d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    table = {
        "embeddings": config.vocab_size * d,
        "attention.q": layers * d * d_q,
        "attention.k": layers * d * d_kv,
        "attention.v": layers * d * d_kv,
        "attention.output": layers * d_q * d,
        "ffn": layers * (3 if config.gated else 2) * d * config.d_ff,
        "norms": layers * gains + final,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
    }
    total = sum(table.values())
    inside = total - table["embeddings"] - table["head"]
    return table | {
        "layer": (inside - final) // layers,
        "tied": config.vocab_size * d if config.tie_embeddings else 0,
        "non_embedding": inside,
        "matrix": inside - table["norms"] + config.vocab_size * d,
        "total": total,
    }


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
