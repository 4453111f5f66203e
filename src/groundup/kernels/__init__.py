"""Fast paths under the model, each beside its plain reference and behind one function with a `backend` argument.

Importing this package does not import Triton; a kernel's first launch does.
"""

from groundup.kernels.adamw import adamw_step
from groundup.kernels.attention import attention
from groundup.kernels.documents import document_ids
from groundup.kernels.elementwise import rope, swiglu
from groundup.kernels.flash_torch import FlashAttention
from groundup.kernels.flash_triton import FlashAttentionTriton
from groundup.kernels.linear import linear, swiglu_feed_forward
from groundup.kernels.linear_cross_entropy import linear_cross_entropy
from groundup.kernels.newton_schulz import newton_schulz_gram
from groundup.kernels.rms_norm import RMSNorm, RMSNormTriton, rms_norm
from groundup.kernels.rotary_attention import projected_attention, rotary_attention

__all__ = [
    "FlashAttention",
    "FlashAttentionTriton",
    "RMSNorm",
    "RMSNormTriton",
    "adamw_step",
    "attention",
    "document_ids",
    "linear",
    "linear_cross_entropy",
    "newton_schulz_gram",
    "projected_attention",
    "rms_norm",
    "rope",
    "rotary_attention",
    "swiglu",
    "swiglu_feed_forward",
]
