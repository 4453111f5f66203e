"""What every kernel promises, in kernels_h200.py: the same bits each time, and more than 2**31 elements."""

from collections.abc import Callable, Sequence
from typing import Any

from kernels_attention import make, run_attention
from kernels_timing import DEVICE, Section, attempt, errors, note, of_size


def forward_and_backward(function: Callable[..., Any], *leaves: Any) -> list:
    """Outputs and gradients of `function`; what flows back is ones, stride 0."""
    import torch

    inputs = [x.detach().requires_grad_() for x in leaves]
    outs = function(*inputs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    flows = [torch.ones((), device=DEVICE, dtype=out.dtype).expand_as(out) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, inputs, flows)]


def half(*shape: int) -> Any:
    import torch

    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def rotation(seq: int, d: int) -> tuple[Any, Any]:
    import torch

    angle = torch.randn(seq, d // 2, device=DEVICE)
    return angle.cos(), angle.sin()


def repeats():
    """All cases at once on one GPU: other processes disturb the order in which programs run, which is the point."""
    cases = {
        "attention d64": (repeat_attention, 64),
        "attention d128": (repeat_attention, 128),
        "rotary attention": (repeat_rotary,),
        "rms residual": (repeat_norm,),
        "loss": (repeat_loss,),
        "swiglu and rope": (repeat_elementwise,),
        "adamw": (repeat_adamw,),
    }
    for name, (case, *arguments) in [*cases.items()][Section.part :: Section.parts]:
        attempt(name, case, f"30 repeats bit-equal: {name}", *arguments)


def repeated(name: str, work: Callable[[], Sequence]) -> None:
    import torch

    first = work()
    same = [torch.equal(a, b) for _ in range(of_size(30, 2)) for a, b in zip(work(), first, strict=True)]
    note(case=name, ok=all(same))


def repeat_attention(name, d):
    import torch

    tensors = make(2, 12, 4, 1000, 1000, d, d, torch.bfloat16)
    repeated(name, lambda: run_attention(tensors, "flash-triton", deterministic=True))


def repeat_rotary(name):
    from groundup.kernels import rotary_attention

    seq = of_size(2304, 40)
    qkv, turn = half(2, seq, 8, 64), rotation(seq, 64)
    repeated(name, lambda: forward_and_backward(lambda x: rotary_attention(x, turn, 4), qkv))


def repeat_norm(name):
    import torch

    from groundup.kernels import rms_norm

    x, r, w = half(of_size(9001, 9), 768), half(of_size(9001, 9), 768), torch.randn(768, device=DEVICE)
    repeated(name, lambda: forward_and_backward(lambda x, w, r: rms_norm(x, w, residual=r, backend="triton"), x, w, r))


def repeat_loss(name):
    import torch

    from groundup.kernels import linear_cross_entropy

    vocab = of_size(50257, 300)
    x, w, t = (
        half(of_size(4000, 40), 256),
        half(vocab, 256) / 16,
        torch.randint(vocab, (of_size(4000, 40),), device=DEVICE),
    )
    repeated(name, lambda: forward_and_backward(lambda x, w: linear_cross_entropy(x, w, t, backend="triton"), x, w))


def repeat_elementwise(name):
    from groundup.kernels import rope, swiglu

    seq = of_size(1000, 10)
    x, q, turn = half(seq, 2 * 2048), half(2, 4, seq, 64), rotation(seq, 64)

    def both(x, q):
        return swiglu(x, "triton"), *rope(q, q * 2, *turn, "triton")

    repeated(name, lambda: forward_and_backward(both, x, q))


def repeat_adamw(name):
    import torch

    tensors = [torch.randn(of_size(1_000_003, 1003), device=DEVICE).abs() for _ in range(4)]
    repeated(name, lambda: adamw_once(tensors))


def adamw_once(tensors: Sequence) -> list:
    """Weight and moments after one step from (weight, gradient, moments)."""
    from groundup.kernels import adamw_step

    p, g, m, v = (x.clone() for x in tensors)
    adamw_step([p], [g], [m], [v], 3, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return [p, m, v]


def huge():
    """Tensors of more than 2**31 elements: their last rows alone must come out the same."""
    for case in (huge_attention, huge_rotary, huge_norm, huge_swiglu, huge_rope, huge_loss, huge_adamw):
        attempt(case.__name__, case)


def last_rows_alike(name: str, function: Callable, whole: Sequence, take: Callable[[Any], Any], outs: int) -> None:
    """The first `outs` results (outputs, then gradients) of `function` on `whole` and on the last rows of it."""
    alone = forward_and_backward(function, *(take(x) for x in whole))
    found = forward_and_backward(function, *whole)
    worst = max(errors(take(a), b.double())[2] for a, b in zip(found[:outs], alone[:outs], strict=True))
    note(case=name, ok=worst < 1e-6, frobenius=worst, elements=max(x.numel() for x in whole))


def over(width: int) -> int:
    """Rows of `width` numbers that are more than 2**31 numbers."""
    return of_size(2**31, 2**12) // width + 8


def huge_attention():
    import torch

    tensors = make(of_size(65, 2), of_size(64, 2), of_size(64, 2), 4096, 4096, 128, 128, torch.bfloat16)
    ours = run_attention(tensors, "flash-triton")
    alone = run_attention([x[-1:] for x in tensors], "flash-triton")
    same = all(torch.equal(a[-1:], b) for a, b in zip(ours, alone, strict=True))
    note(case="more than 2**31: attention", ok=same)


def huge_rotary():
    from groundup.kernels import rotary_attention

    seq = of_size(4096, 32)
    qkv, turn = half(of_size(65, 2), seq, of_size(64, 4), 128), rotation(seq, 128)
    heads = qkv.shape[2] // 2
    last_rows_alike("more than 2**31: rotary", lambda x: rotary_attention(x, turn, heads), [qkv], lambda x: x[-1:], 2)


def huge_norm():
    import torch

    from groundup.kernels import rms_norm

    x, w = half(over(2048), 2048), torch.randn(2048, device=DEVICE)
    # The weight's gradient is a sum over all rows.
    last_rows_alike("more than 2**31: rms", lambda x: rms_norm(x, w, backend="triton"), [x], lambda x: x[-8:], 2)


def huge_swiglu():
    from groundup.kernels import swiglu

    x = half(over(8192), 8192)
    last_rows_alike("more than 2**31: swiglu", lambda x: swiglu(x, "triton"), [x], lambda x: x[-8:], 2)


def huge_rope():
    from groundup.kernels import rope

    turn, (q, k) = rotation(64, 128), (half(over(64 * 32 * 128), 64, n, 128).transpose(1, 2) for n in (32, 1))
    last_rows_alike("more than 2**31: rope", lambda q, k: rope(q, k, *turn, "triton"), [q, k], lambda x: x[-1:], 4)


def huge_loss():
    """The gradient of the last rows; the loss and the weight's gradient are sums over all."""
    import torch

    from groundup.kernels import linear_cross_entropy

    rows = over(2048)
    x, w, targets = half(rows, 2048), half(512, 2048) / 45, torch.arange(rows, device=DEVICE) % 512

    def gradient(x, targets):
        x = x.detach().requires_grad_()
        loss = linear_cross_entropy(x, w, targets, n_valid=8.0, backend="triton")
        return torch.autograd.grad(loss, x)[0]

    worst = errors(gradient(x, targets)[-8:], gradient(x[-8:], targets[-8:]).double())[2]
    note(case="more than 2**31: loss", ok=worst < 1e-2, frobenius=worst, elements=x.numel())


def huge_adamw():
    import torch

    tensors = [torch.randn(over(1), device=DEVICE).abs_() for _ in range(4)]
    alone = adamw_once([x[-1000:] for x in tensors])
    found = adamw_once(tensors)
    same = all(torch.equal(a[-1000:], b) for a, b in zip(found, alone, strict=True))
    note(case="more than 2**31: adamw", ok=same, elements=tensors[0].numel())
