"""The Transformer, from scratch: of torch.nn only Module, Parameter, Identity, containers and init.

Read in this order: layers.py (linear, embedding, norm, feed-forward), rope.py, attention.py, transformer.py, loss.py.
hf.py is the same model as Hugging Face's LlamaForCausalLM or Qwen3ForCausalLM keeps it on disk.
"""

from groundup.model.attention import MultiHeadSelfAttention, scaled_dot_product_attention, softmax
from groundup.model.layers import Embedding, FeedForward, Linear, RMSNorm, SwiGLU, relu2, silu, soft_cap
from groundup.model.loss import IGNORE, Head, cross_entropy
from groundup.model.rope import RotaryEmbedding, rotate
from groundup.model.transformer import TransformerBlock, TransformerLM, count_parameters

__all__ = [
    "IGNORE",
    "Embedding",
    "FeedForward",
    "Head",
    "Linear",
    "MultiHeadSelfAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "TransformerBlock",
    "TransformerLM",
    "count_parameters",
    "cross_entropy",
    "relu2",
    "rotate",
    "scaled_dot_product_attention",
    "silu",
    "soft_cap",
    "softmax",
]
