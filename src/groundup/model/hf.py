"""A model as Hugging Face's `LlamaForCausalLM` keeps it, and back: names, shapes, the order of rows, config.json.

With QK-norm it is a `Qwen3ForCausalLM`: the same with a norm's gain each for queries and keys, in the order of a head.

The architectures are the same function; three things differ on disk. Names and the fields of config.json: two tables
below. And RoPE: here the neighbours (2i, 2i + 1) of a head turn together, there the elements i and i + d_head / 2. A
score is a sum over a head's elements, so their order is free as long as queries and keys agree: the rows of each
head's q and k projections are permuted, even ones first (`split_pairs`), and nothing else changes. A permutation moves
bits and rounds nothing, so a model that goes there and back is bit-equal.

What one side has and the other has not is refused by name: a field of `ModelConfig` that is not in `_FIELDS` must have
its default, unless it only says how the model is computed (`HOW`), and a config.json must not ask for biases, scaled
RoPE, another activation, or another model.
Rejected: a custom `modeling_*.py` beside the weights, which would hold every option and run nowhere but here.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from groundup.config import ModelConfig
from groundup.config.model import HOW
from groundup.errors import UserError
from groundup.model.transformer import TransformerLM

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""model_type of config.json → the architecture's name."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Field of ModelConfig → key of config.json."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_COMMON: dict[str, Any] = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What transformers takes where config.json is silent; Llama's num_key_value_heads follows num_attention_heads."""

_AROUND = {"token_embeddings": "model.embed_tokens", "ln_final": "model.norm", "lm_head": "lm_head"}
_IN_LAYER = {
    "ln1": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ln2": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
"""Module here → module there; every one holds a `weight` alone."""


# Rows


def split_pairs(weight: Float[Tensor, "rows ..."], d_head: int) -> Float[Tensor, "rows ..."]:
    """Each head's rows 0, 1, 2, 3, … in the order 0, 2, …, 1, 3, …: RoPE's pairs (2i, 2i + 1) become (i, i + d/2)."""
    return weight.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def join_pairs(weight: Float[Tensor, "rows ..."], d_head: int) -> Float[Tensor, "rows ..."]:
    """The inverse of `split_pairs`."""
    return weight.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2).contiguous()


# Tensors


def hf_name(name: str) -> str:
    """`layers.3.ffn.w1.weight` → `model.layers.3.mlp.gate_proj.weight`."""
    module = name.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{_AROUND[module]}.weight"
    _, index, inside = module.split(".", 2)
    return f"model.layers.{index}.{_IN_LAYER[inside]}.weight"


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A model's state dict under the names and in the row order of Hugging Face's model. `config`: resolved."""
    return {hf_name(name): split_pairs(w, config.d_head) if _is_turned(name) else w for name, w in tensors.items()}


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig, where: Path) -> dict[str, Tensor]:
    """The inverse of `to_hf`, in float32. Raises UserError for a tensor that is missing, foreign or misshapen."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in TransformerLM(config).state_dict().items()}
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    found = {}
    for name, shape in expected.items():
        weight = left.pop(hf_name(name), None)
        if weight is None or weight.shape != shape:
            has = f"no {hf_name(name)}" if weight is None else f"{hf_name(name)} of shape {tuple(weight.shape)}"
            raise UserError(f"{where} has {has}, but its {CONFIG} asks for one of shape {tuple(shape)}")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"{where}: {hf_name(name)} holds {weight.dtype}; only float32, bfloat16 and float16 are read"
            )
        found[name] = (join_pairs(weight, config.d_head) if _is_turned(name) else weight.contiguous()).float()
    if config.tie_embeddings and "lm_head.weight" in left:
        head = left.pop("lm_head.weight")
        if not torch.equal(head.float(), found["token_embeddings.weight"]):
            raise UserError(f"{where}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")
    if left:
        raise UserError(f"{where} has {min(left)}, for which groundup's model has no place")
    return found


def _is_turned(name: str) -> bool:
    """Whether RoPE turns what this weight makes."""
    return name.endswith(tuple(f"attn.{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm")))


# config.json


def hf_kind(config: ModelConfig) -> str:
    """The model_type that holds this model."""
    return "qwen3" if config.qk_norm else "llama"


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The architecture's part of config.json. Raises UserError naming an option that the architecture lacks."""
    kind = hf_kind(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in (*_FIELDS, *HOW, "qk_norm") and value != field.default:
            raise UserError(
                f"model.{field.name} = {value!r} has no place in Hugging Face's {ARCHITECTURES[kind]}; "
                f"only models with model.{field.name} = {field.default!r} can be exported"
            )
    table = {key: getattr(config, name) for name, key in _FIELDS.items()}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **table,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "attention_bias": False,
        **({"mlp_bias": False} if kind == "llama" else {"use_sliding_window": False}),
        # transformers 5 reads rope_parameters, 4 the rope_theta above.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def from_hf_config(table: Mapping[str, Any], where: Path) -> ModelConfig:
    """The shape that a config.json describes, resolved. Raises UserError naming what groundup's model lacks."""
    _refuse_foreign(table, where)
    rope = table.get("rope_parameters") or {}
    kind = str(table["model_type"])
    given: dict[str, Any] = {"num_key_value_heads": table.get("num_attention_heads")} | _COMMON | _DEFAULTS[kind]
    given |= {key: value for key, value in table.items() if value is not None}
    given["rope_theta"] = rope.get("rope_theta", given["rope_theta"])
    values: dict[str, Any] = {"qk_norm": kind == "qwen3"}
    for field in fields(ModelConfig):
        if field.name not in _FIELDS:
            continue
        key = _FIELDS[field.name]
        value = float(given[key]) if type(field.default) is float and type(given.get(key)) is int else given.get(key)
        if type(value) is not type(field.default):
            raise UserError(f"{where}: {key} is {value!r}; it must be of type {type(field.default).__name__}")
        values[field.name] = value
    config = ModelConfig(**values).resolve()
    if given.get("head_dim") not in (None, config.d_head):
        raise UserError(
            f"{where}: head_dim is {given['head_dim']}; groundup's model has hidden_size / num_attention_heads = "
            f"{config.d_head}"
        )
    return config


def _refuse_foreign(table: Mapping[str, Any], where: Path) -> None:
    """Raise UserError for what config.json asks and no ModelConfig can say."""
    known = ARCHITECTURES.get(str(table.get("model_type")))
    kinds = table.get("architectures") or [known]
    if known is None or kinds != [known]:
        raise UserError(
            f"{where} describes {kinds} of type {table.get('model_type')!r}; only "
            f"{' and '.join(ARCHITECTURES.values())} can be imported"
        )
    rope = {**(table.get("rope_scaling") or {}), **(table.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = {
        "hidden_act": (table.get("hidden_act", "silu"), ("silu", "swish")),
        "attention_bias": (table.get("attention_bias", False), (False,)),
        "mlp_bias": (table.get("mlp_bias", False), (False,)),
        "use_sliding_window": (table.get("use_sliding_window", False), (False,)),
        "quantization_config": (table.get("quantization_config"), (None,)),
        "rope_type": (kind, ("default",)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", table.get("partial_rotary_factor", 1)), (1,)),
    }
    for key, (value, legal) in plain.items():
        if value not in legal:
            raise UserError(f"{where}: {key} is {value!r}; groundup's model has only {key} = {legal[0]!r}")


# Files


def read_hf(directory: Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, str]]:
    """(shape, state dict in float32, metadata of the weights' file) of a Hugging Face directory. Raises UserError."""
    path = directory / CONFIG
    table = read_json(path)
    config = from_hf_config(table, path)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name in _weight_files(directory):
        try:
            with safe_open(directory / name, framework="pt") as file:
                metadata |= file.metadata() or {}
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as error:
            raise UserError(f"{directory / name} cannot be read: {error}") from None
    return config, from_hf(tensors, config, directory), metadata


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError where there is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; give a directory in Hugging Face's format") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} is not a JSON object")
    return table


def _weight_files(directory: Path) -> list[str]:
    """The one file, or the shards that the index names."""
    if (directory / WEIGHTS).exists():
        return [WEIGHTS]
    if (directory / INDEX).exists():
        shards = read_json(directory / INDEX).get("weight_map")
        if isinstance(shards, dict) and all(isinstance(name, str) for name in shards.values()):
            return sorted(set(shards.values()))
        raise UserError(f"{directory / INDEX} has no weight_map of file names")
    raise UserError(f"{directory} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors")
