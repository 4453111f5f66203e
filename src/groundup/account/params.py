"""Parameters by component, from the shape alone.

Per block: attention d·(H·dₕ) + 2·d·(Hₖᵥ·dₕ) + (H·dₕ)·d, feed-forward 3·d·d_ff (gated) or 2·d·d_ff (ungated), two
norm gains 2·d. Around the blocks: embedding V·d, final gain d, head V·d (0 when tied). The ungated figures answer a
question about the literature: GPT-2's published sizes have no gate, and both counts circulate under one name.
"""

from groundup.config import ModelConfig


def parameters(config: ModelConfig, gated: bool = True) -> dict[str, int]:
    """Number of parameters by component; `config` is resolved.

    Keys: embeddings, attention.{q,k,v,output}, ffn, norms, head, layer (one block), tied (the parameters that tying
    saves), non_embedding (total − embeddings − head, what scaling laws count), matrix (those that multiply every
    token: N of 6·N·D), total. `gated=False` counts a feed-forward of two matrices at the same d_ff.
    """
    d, layers = config.d_model, config.n_layers
    d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    table = {
        "embeddings": config.vocab_size * d,
        "attention.q": layers * d * d_q,
        "attention.k": layers * d * d_kv,
        "attention.v": layers * d * d_kv,
        "attention.output": layers * d_q * d,
        "ffn": layers * (3 if gated else 2) * d * config.d_ff,
        "norms": layers * 2 * d + d,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
    }
    total = sum(table.values())
    inside = total - table["embeddings"] - table["head"]
    return table | {
        "layer": (inside - d) // layers,
        "tied": config.vocab_size * d if config.tie_embeddings else 0,
        "non_embedding": inside,
        "matrix": inside - table["norms"] + config.vocab_size * d,
        "total": total,
    }


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its state-dict name, in the model's order."""
    d, d_kv = config.d_model, config.n_kv_heads * config.d_head
    shapes: dict[str, tuple[int, ...]] = {"token_embeddings.weight": (config.vocab_size, d)}
    for i in range(config.n_layers):
        shapes |= {
            f"layers.{i}.ln1.weight": (d,),
            f"layers.{i}.attn.q_proj.weight": (d, d),
            f"layers.{i}.attn.k_proj.weight": (d_kv, d),
            f"layers.{i}.attn.v_proj.weight": (d_kv, d),
            f"layers.{i}.attn.output_proj.weight": (d, d),
            f"layers.{i}.ln2.weight": (d,),
            f"layers.{i}.ffn.w1.weight": (config.d_ff, d),
            f"layers.{i}.ffn.w2.weight": (d, config.d_ff),
            f"layers.{i}.ffn.w3.weight": (config.d_ff, d),
        }
    shapes["ln_final.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes
