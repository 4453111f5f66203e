"""The step of one token of one sequence as one kernel: every weight is read once, and nothing is launched between.

A step of a small model by a kernel an operation waits for its launches and not for memory: 158 of them at 124M. Here
the programs of one launch stay and pass each other what they made (decode_gluon.py). Plain truth: generate.decode.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from groundup.kernels import flash_hopper
from groundup.kernels.backend import launch, n_multiprocessors

KEYS = 128
"""Keys that a program takes at a time."""
COLUMNS = 256
"""Columns of a matrix that a warp reads in one row at once, 16 bytes a thread."""
MOST = 1 << 15
"""Elements of a tile of weights: 64 registers a thread. 350M, whose feed-forward needs twice that, spills: 0.80 ms."""
WARPS = 8


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def sizes(config: Any, length: int, programs: int) -> dict[str, Any]:
    """The kernel's constants for a model (ModelConfig) and a cache of `length` positions."""
    d, f, heads, head = config.d_model, config.d_ff, config.n_heads, config.d_head
    d_pieces, f_pieces = (power(-(-n // COLUMNS)) for n in (d, f))
    qkv, rows, hidden = (-(-n // programs) for n in ((heads + 2 * config.n_kv_heads) * head, d, f))
    qkv += qkv % 2  # whole pairs
    splits = max(1, min(programs // heads, -(-length // KEYS)))
    words = (heads + 2 * config.n_kv_heads) * head + splits * heads * (head + 4) + 2 * d + f
    return {
        "LAYERS": config.n_layers, "D": d, "F": f, "V": config.vocab_size, "HEADS": heads,
        "KV_HEADS": config.n_kv_heads, "HEAD": head, "PROGRAMS": programs, "SPLITS": splits, "C": KEYS,
        "DC": d_pieces, "FC": f_pieces, "HP": max(WARPS, power(heads)), "SP": power(splits), "PP": power(programs),
        "QKV_R": max(2 * WARPS, power(qkv)), "QKV_N": qkv, "D_R": max(WARPS, power(rows)), "D_N": rows,
        "F_R": max(WARPS, power(hidden)), "F_N": hidden, "V_R": max(WARPS, min(32, MOST // (d_pieces * COLUMNS))),
        "LINES": power(-(-d // 64)), "ROPE": config.position == "rope", "SOFTCAP": config.logit_softcap > 0,
        "STRIDE": words,
    }  # fmt: skip


def takes(model: nn.Module, keys: Float[Tensor, "layers batch n_kv_heads n_keys d_head"]) -> bool:
    """Whether the kernel is for this model and cache: bf16, one row, Hopper, parts it knows, tiles that fit."""
    c: Any = model.config
    bf16 = keys.is_cuda and keys.dtype == torch.bfloat16 and all(p.dtype == keys.dtype for p in model.parameters())
    known = c.norm == "pre" and c.ffn == "swiglu" and not c.qk_norm and not c.attention_softcap
    if not (bf16 and known and keys.shape[1] == 1 and c.kernels in ("auto", "triton")):
        return False
    if not all(p.is_contiguous() and p.data_ptr() % 16 == 0 for p in model.parameters()):
        return False
    programs = n_multiprocessors(keys.device)
    return fits(c, keys.shape[3], programs) and not flash_hopper.device_obstacle(keys.device.index or 0)


def fits(config: Any, length: int, programs: int) -> bool:
    """Whether shapes are what the kernel can split, and its tiles small enough."""
    s = sizes(config, length, programs)
    tile = s["DC"] * COLUMNS
    small = max(s["QKV_R"], 2 * s["F_R"]) * tile <= MOST and s["D_R"] * s["FC"] * COLUMNS <= MOST
    # The kernel's loop over several pieces of the keys has not run on a GPU: one a program.
    small = small and s["SPLITS"] * KEYS >= length
    even = s["HEAD"] in (32, 64, 128) and s["HEADS"] * s["HEAD"] == s["D"] and s["HP"] * s["HEAD"] == tile
    return small and even and s["F"] % 8 == 0 and s["HEADS"] <= programs and min(s["D"], s["F"], s["V"]) >= programs


class DecodeKernel:
    """The step over one cache of one row.

    `state`: (token, its place, 0), int64, on the device. A run reads token and place, writes `logits` (1, vocab),
    float32, and leaves in `state` the likeliest next token below `limit` (of equal ones the lowest), the place after
    (at most the last one), and as float64 a 0, or NaN where a logit below `limit` was not finite. Changed weights are
    seen; weights that move to other memory are not.
    """

    def __init__(
        self,
        model: Any,
        keys: Float[Tensor, "layers 1 n_kv_heads n_keys d_head"],
        values: Float[Tensor, "layers 1 n_kv_heads n_keys d_head"],
        state: Int[Tensor, "3"],
        limit: int | None = None,
    ):
        self.config, self.cache, self.state, device = model.config, (keys, values), state, keys.device
        self.limit = model.config.vocab_size if limit is None else limit
        self.sizes = sizes(model.config, keys.shape[3], n_multiprocessors(device))
        self.words = torch.zeros(self.sizes["LAYERS"] * self.sizes["STRIDE"], dtype=torch.int32, device=device)
        self.choices = torch.zeros(1 + 3 * self.sizes["PROGRAMS"], dtype=torch.long, device=device)
        self.choices[0] = 1  # the number of the first step; 0 is in all words
        self.logits = torch.empty(1, model.config.vocab_size, device=device)
        # Kept, so that their addresses stay good.
        self.weights = [weight.detach() for block in model.layers for weight in weights_of(block)]
        self.weights.append(model.ln_final.weight.detach())
        self.table = torch.tensor([weight.data_ptr() for weight in self.weights], device=device)
        self.embedding = model.token_embeddings.weight.detach()
        self.head = self.embedding if model.lm_head is None else model.lm_head.weight.detach()
        self.angles = (self.logits, self.logits) if model.rope is None else (model.rope.cos, model.rope.sin)

    def run(self) -> None:
        """One launch; all programs must be there at once."""
        from groundup.kernels.decode_gluon import decode_kernel

        c, (keys, values) = self.config, self.cache
        launch(keys, decode_kernel, self.sizes["PROGRAMS"],
            self.table, self.embedding, self.head, *self.angles, keys, values, self.words, self.choices, self.logits,
            self.state, self.limit, keys.shape[3], c.norm_eps, c.d_head**-0.5, float(c.logit_softcap),
            **self.sizes, num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip


def weights_of(block: Any) -> tuple[Tensor, ...]:
    """A layer's, in the order of the kernel's TABLE."""
    attn, ffn = block.attn, block.ffn
    parts = block.ln1, attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, block.ln2, ffn.w1, ffn.w3, ffn.w2
    return tuple(part.weight for part in parts)
