"""Attention in kernels_h200.py: every feature against float64, then beside cuDNN and eager PyTorch."""

from kernels_timing import Section, attempt, errors, note, queued_ms


def make(b, h, kv, n_q, n_k, d, d_v, dtype):
    import torch

    shapes = [(b, h, n_q, d), (b, kv, n_k, d), (b, kv, n_k, d_v), (b, h, n_q, d_v)]
    return [torch.randn(s, device="cuda", dtype=torch.float32).to(dtype) for s in shapes]


def run_attention(tensors, backend, **options):
    """(out, lse, dq, dk, dv)."""
    import torch

    from groundup.kernels import attention

    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out, lse = attention(q, k, v, backend=backend, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def check_case(name, shape, dtype, backend="flash-triton", **options):
    import torch

    tensors = make(*shape, dtype)
    theirs = run_attention(tensors, "reference", **options)
    options_truth = {k: v for k, v in options.items() if k != "deterministic"}
    truth = run_attention([x.double() for x in tensors], "reference", **options_truth)
    ours = run_attention(tensors, backend, **options)
    worst, mean, frobenius = 0.0, 0.0, 0.0
    for i in (0, 2, 3, 4):
        a, b = errors(ours[i], truth[i]), errors(theirs[i], truth[i])
        worst, mean = max(worst, a[0] / max(b[0], 1e-12)), max(mean, a[1] / max(b[1], 1e-12))
        frobenius = max(frobenius, a[2])
    finite = torch.isfinite(truth[1])
    lse = (ours[1].double() - truth[1])[finite].abs().max().item() if finite.any() else 0.0
    empty_ok = bool((ours[1].isinf() == ~finite).all()) and all(
        bool(torch.isfinite(ours[i]).all()) for i in (0, 2, 3, 4)
    )
    limit, usual = (3.0, 1.5) if options.get("softcap") else (2.0, 1.25)
    if dtype == torch.float32:
        limit, usual = (
            2.5,
            2.5,
        )  # three products of tf32 halves: the seventh digit is less sure
        empty_ok = empty_ok and frobenius < 2e-6
    good = worst <= limit and mean <= usual and empty_ok and lse < 2e-2
    note(case=name, backend=backend, ok=good, max_ratio=worst, mean_ratio=mean, frobenius=frobenius, lse=lse)


def attention_cases(backend):
    import torch

    half, single = torch.bfloat16, torch.float32
    ids = torch.arange(1000, device="cuda")[None].div(173, rounding_mode="floor").expand(2, -1).contiguous()
    yield "d64", (2, 4, 4, 1024, 1024, 64, 64), half, {}
    yield "d128", (2, 4, 4, 1024, 1024, 128, 128), half, {}
    yield "odd N", (1, 4, 4, 1001, 1001, 64, 64), half, {}
    yield "odd N d128", (1, 4, 4, 1001, 1001, 128, 128), half, {}
    yield "full odd", (1, 4, 4, 777, 1001, 64, 64), half, {"causal": False}
    yield "gqa d64", (2, 8, 2, 512, 512, 64, 64), half, {}
    yield "gqa d128", (2, 8, 2, 512, 512, 128, 128), half, {}
    yield "fp16", (1, 4, 2, 640, 640, 64, 64), torch.float16, {}
    if backend == "flash-hopper":
        yield "full d128", (1, 4, 4, 1024, 1024, 128, 128), half, {"causal": False}
        yield "long k", (1, 4, 4, 256, 1024, 64, 64), half, {}
        return
    yield "n_q > n_k", (1, 2, 2, 300, 100, 64, 64), half, {}
    yield "window", (1, 4, 4, 1000, 1000, 64, 64), half, {"window": 100}
    yield "documents", (2, 4, 4, 1000, 1000, 64, 64), half, {"documents": ids}
    yield "softcap", (1, 4, 4, 512, 512, 64, 64), half, {"softcap": 20.0}
    yield "d192/128", (1, 4, 4, 512, 512, 192, 128), half, {}
    yield "d256", (1, 4, 4, 500, 500, 256, 256), half, {}
    yield "d80", (1, 4, 4, 512, 512, 80, 80), half, {}
    yield "d16", (1, 4, 4, 512, 512, 16, 16), half, {}
    yield "fp32 d64", (1, 4, 4, 512, 512, 64, 64), single, {}
    yield "fp32 d128", (1, 2, 2, 300, 300, 128, 128), single, {}
    yield "fp32 d256", (1, 2, 2, 200, 200, 256, 256), single, {}
    yield "fp32 documents", (2, 4, 2, 1000, 1000, 64, 64), single, {"documents": ids}


def attention_check(backend="flash-triton"):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = [
        (name, lambda n=name, s=shape, t=dtype, o=options: check_case(n, s, t, backend, **o))
        for name, shape, dtype, options in attention_cases(backend)
    ]
    jobs.append(("repeat", lambda: repeat_case(backend)))
    if backend == "flash-triton":
        jobs += [("more than 2**31", huge_case), ("compile", compile_case)]
    else:
        for d in (64, 128):
            for causal in (True, False):
                name, options = f"fast backward d{d} causal={causal}", {"deterministic": False, "causal": causal}
                shape = (2, 4, 2, 1000, 1000, d, d)
                jobs.append((name, lambda n=name, s=shape, o=options: check_case(n, s, torch.bfloat16, backend, **o)))
    for name, job in jobs[Section.part :: Section.parts]:
        attempt(name, job)


def repeat_case(backend):
    import torch

    tensors = make(2, 12, 12, 1000, 1000, 64, 64, torch.bfloat16)
    first = run_attention(tensors, backend, deterministic=True)
    same = all(
        all(torch.equal(a, b) for a, b in zip(run_attention(tensors, backend, deterministic=True), first, strict=True))
        for _ in range(30)
    )
    note(case="30 repeats bit-equal", backend=backend, ok=same)


def huge_case():
    """More than 2**31 elements a tensor: the last batch entry alone must give the same."""
    import torch

    tensors = [torch.randn(65, 64, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    ours = run_attention(tensors, "flash-triton")
    alone = run_attention([x[-1:] for x in tensors], "flash-triton")
    same = all(torch.equal(a[-1:], b) for a, b in zip(ours, alone, strict=True))
    note(case="more than 2**31 elements", ok=same)


def compile_case():
    import torch

    from groundup.kernels import attention, linear_cross_entropy, rms_norm

    w, head = (
        torch.randn(128, device="cuda", requires_grad=True),
        torch.randn(500, 128, device="cuda", requires_grad=True),
    )
    x = torch.randn(2, 4, 96, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 500, (2, 4, 96), device="cuda")

    def step(x, w, head):
        y = rms_norm(x, w, backend="triton")
        y = attention(y, y, y, backend="flash-triton")
        return linear_cross_entropy(y, head, targets)

    eager = torch.autograd.grad(step(x, w, head), (x, w, head))
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(x, w, head), (x, w, head))
    worst = max(errors(a, b.double())[2] for a, b in zip(compiled, eager, strict=True))
    note(case="torch.compile fullgraph", ok=worst < 1e-2, frobenius=worst)


SHAPES = [
    (32, 12, 1024, 64), (4, 32, 4096, 64), (1, 32, 16384, 64), (1, 16, 16384, 64),
    (16, 16, 1024, 128), (4, 16, 4096, 128), (1, 16, 16384, 128),
]  # fmt: skip


def speed_case(shape, backends, causal=True, dtype=None):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from groundup.kernels import attention

    b, h, n, d = shape
    dtype = dtype or torch.bfloat16
    q, k, v, d_out = make(b, h, h, n, n, d, d, dtype)
    flops = 4 * b * h * n * n * d / (2 if causal else 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    times, outs, grads = {}, {}, {}

    def peer(kind):
        def call():
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    runs = {"cudnn": peer(SDPBackend.CUDNN_ATTENTION)} if dtype != torch.float32 else {}
    if dtype == torch.float32:
        runs["efficient"] = peer(SDPBackend.EFFICIENT_ATTENTION)
        runs["eager"] = lambda: attention(q, k, v, causal=causal, backend="reference")
    for name, backend, deterministic in backends:
        runs[name] = lambda s=backend, t=deterministic: attention(q, k, v, causal=causal, backend=s, deterministic=t)
    for name, call in runs.items():
        try:
            out = call()
            outs[name], grads[name] = out.detach(), torch.autograd.grad(out, leaves, d_out, retain_graph=True)
            with torch.no_grad():
                forward = queued_ms(call)
            backward = queued_ms(lambda out=out: torch.autograd.grad(out, leaves, d_out, retain_graph=True))
            times[name] = (forward, backward)
        except Exception as error:
            note(case=f"speed {shape} {name}", FAILED=f"{type(error).__name__}: {str(error)[:200]}")
    base = next(iter(runs))
    for name, (forward, backward) in times.items():
        apart = [errors(a, b.double())[2] for a, b in zip(grads[name], grads[base], strict=True)]
        note(
            case=f"{b},{h},{n},{d}{'' if causal else ' full'}{' fp32' if dtype == torch.float32 else ''}", what=name,
            fwd=flops / forward / 1e9, bwd=2.5 * flops / backward / 1e9, ms=forward + backward,
            apart=max(*apart, errors(outs[name], outs[base].double())[2]),
        )  # fmt: skip


def attention_speed():
    import torch

    for shape in SHAPES:
        attempt(str(shape), speed_case, shape, [("triton", "flash-triton", True)])
    attempt("full", speed_case, (4, 16, 4096, 128), [("triton", "flash-triton", True)], False)
    attempt("fp32", speed_case, (2, 16, 4096, 64), [("triton", "flash-triton", True)], True, torch.float32)


def no_fallback() -> None:
    """A quiet fallback would check and time the wrong kernel: make its warning an error."""
    import warnings

    warnings.filterwarnings("error", message=".*flash-hopper.*")


def hopper_check():
    from groundup.kernels import flash_hopper

    no_fallback()
    # Checked where they would not be chosen, too.
    flash_hopper.FORWARD_FROM = flash_hopper.BACKWARD_FROM = {64: 0, 128: 0}
    attention_check("flash-hopper")


def hopper_speed():
    no_fallback()
    both = [("hopper fast", "flash-hopper", False)]
    for shape in SHAPES:
        attempt(str(shape), speed_case, shape, both)
    attempt("full", speed_case, (4, 16, 4096, 128), both, False)
