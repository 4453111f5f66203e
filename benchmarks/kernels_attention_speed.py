"""Attention's speed in kernels_h200.py: TFLOP/s of the causal half beside cuDNN and eager PyTorch."""

from functools import partial

from kernels_attention import hopper_everywhere, make, on_its_kernels
from kernels_timing import TINY, attempt, errors, failed, note, queued_ms

SHAPES = [
    (32, 12, 1024, 64), (4, 32, 4096, 64), (1, 32, 16384, 64), (1, 16, 16384, 64),
    (16, 16, 1024, 128), (4, 16, 4096, 128), (1, 16, 16384, 128),
]  # fmt: skip


def peer(kind, q, k, v, causal):
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(kind):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def flex(q, k, v, causal):
    """FlexAttention, compiled for one shape; the mask's blocks are part of the preparation."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], q.device.type)
    torch._dynamo.reset()  # else the ninth shape and mode of a process runs uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, q, k, v, block_mask=blocks if causal else None)


def speed_case(shape, ours, causal=True, dtype=None, with_flex=False):
    """A row for each peer and each of `ours` (name, backend, deterministic) as soon as it is timed; `apart`: from the
    first that ran."""
    import torch
    from torch.nn.attention import SDPBackend

    from groundup.kernels import attention

    b, h, n, d = (min(x, 256) if TINY else x for x in shape)
    b, h = (1, 2) if TINY else (b, h)
    dtype = dtype or torch.bfloat16
    q, k, v, d_out = make(b, h, h, n, n, d, d, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if dtype == torch.float32:
        runs = {"efficient": partial(peer, SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal)}
        runs["eager"] = partial(attention, q, k, v, causal=causal, backend="reference")
    else:
        runs = {"cudnn": partial(peer, SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
    if with_flex and not TINY:
        runs["flex"] = flex(q, k, v, causal)
    kinds = {}
    for name, backend, deterministic in ours:
        runs[name] = partial(attention, q, k, v, causal=causal, backend=backend, deterministic=deterministic)
        kinds[name] = backend, deterministic
    case = f"{b},{h},{n},{d}{'' if causal else ' full'}{' fp32' if dtype == torch.float32 else ''}"
    flops, first = 4 * b * h * n * n * d / (2 if causal else 1), []
    for name, call in runs.items():
        row = {}
        try:
            kept = []

            def whole(call=call, kept=kept):
                kept[:] = [call()]
                return torch.autograd.grad(kept[0], leaves, d_out, retain_graph=True)

            found = [*on_its_kernels(whole, *kinds.get(name, ("",))), kept[0].detach()]
            with torch.no_grad():
                forward = queued_ms(call)
            row["fwd"] = flops / forward / 1e9
            backward = queued_ms(partial(torch.autograd.grad, kept[0], leaves, d_out, retain_graph=True))
            row |= {"bwd": 2.5 * flops / backward / 1e9, "ms": forward + backward}
            first = first or found
            row["apart"] = max(errors(x, y.double())[2] for x, y in zip(found, first, strict=True))
        except Exception as error:
            failed(f"{case} {name}", error)
        finally:
            if row:
                note(case=case, what=name, **row)


def attention_speed():
    import torch

    plain = [("triton", "flash-triton", True)]
    for shape in SHAPES:
        attempt(str(shape), speed_case, shape, plain, True, None, shape[2] >= 4096)
    attempt("full", speed_case, (4, 16, 4096, 128), plain, False)
    attempt("fp32", speed_case, (2, 16, 4096, 64), plain, True, torch.float32)


def hopper_speed():
    hopper_everywhere()
    fast = [("hopper fast", "flash-hopper", False)]
    for shape in SHAPES:
        attempt(str(shape), speed_case, shape, fast)
    attempt("full", speed_case, (4, 16, 4096, 128), fast, False)
