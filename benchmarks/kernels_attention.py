"""Attention's checks in kernels_h200.py: every feature against float64, beside eager PyTorch of the same type."""

from collections.abc import Generator

from kernels_timing import DEVICE, TINY, Section, attempt, errors, note, poisoned


def make(b, h, kv, n_q, n_k, d, d_v, dtype):
    """q, k, v, dO; of a sixteenth of the lengths where the script is only tried."""
    import torch

    n_q, n_k = (-(-n // 16) if TINY else n for n in (n_q, n_k))
    shapes = [(b, h, n_q, d), (b, kv, n_k, d), (b, kv, n_k, d_v), (b, h, n_q, d_v)]
    return [torch.randn(s, device=DEVICE, dtype=torch.float32).to(dtype) for s in shapes]


def run_attention(tensors, backend, flow="", **options):
    """(out, lse, dq, dk, dv). `flow` says what flows back: "lse": into the logsumexp, too; "sum": dO is 1, stride 0."""
    import torch

    from groundup.kernels import attention

    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out, lse = attention(q, k, v, backend=backend, return_lse=True, **options)
    back = [(out, torch.ones_like(out[:1, :1, :1, :1]).expand(out.shape) if flow == "sum" else tensors[3])]
    if flow == "lse":
        back.append((lse, tensors[3].sum(-1).to(lse.dtype)))
    grads = torch.autograd.grad([x for x, _ in back], (q, k, v), [g for _, g in back])
    return [out.detach(), lse.detach(), *grads]


def check_case(name, shape, dtype, backend="flash-triton", **options):
    import torch

    tensors = make(*shape, dtype)
    if "documents" in options:
        ids = torch.arange(tensors[0].shape[2], device=DEVICE).div(173 // (16 if TINY else 1), rounding_mode="floor")
        options["documents"] = ids.expand(shape[0], -1).contiguous()
    theirs = run_attention(tensors, "reference", **options)
    truth = run_attention([x.double() for x in tensors], "reference", **options)
    with poisoned():
        ours = on_its_kernels(
            lambda: run_attention(tensors, backend, **options), backend, options.get("deterministic", True)
        )
    worst, mean, frobenius = 0.0, 0.0, 0.0
    for i in (0, 2, 3, 4):
        a, b = errors(ours[i], truth[i]), errors(theirs[i], truth[i])
        worst, mean = max(worst, a[0] / max(b[0], 1e-12)), max(mean, a[1] / max(b[1], 1e-12))
        frobenius = max(frobenius, a[2])
    finite = torch.isfinite(truth[1])
    lse = (ours[1].double() - truth[1])[finite].abs().max().item() if finite.any() else 0.0
    good = bool((ours[1].isinf() == ~finite).all()) and all(bool(torch.isfinite(ours[i]).all()) for i in (0, 2, 3, 4))
    limit, usual = (3.0, 1.25) if options.get("softcap") else (2.0, 1.25)
    if dtype == torch.float32:  # three products of tf32 halves: the seventh digit is less sure
        limit, usual = 2.5, 2.5
        good = good and frobenius < 2e-6
    good = good and worst <= limit and mean <= usual and lse < 2e-2
    note(case=name, backend=backend, ok=good, max_ratio=worst, mean_ratio=mean, frobenius=frobenius, lse=lse)


def attention_cases(backend) -> Generator[tuple]:
    """(name, shape, type, options)"""
    import torch

    half, single = torch.bfloat16, torch.float32
    yield "d64", (2, 4, 4, 1024, 1024, 64, 64), half, {}
    yield "d128", (2, 4, 4, 1024, 1024, 128, 128), half, {}
    yield "odd N", (1, 4, 4, 1001, 1001, 64, 64), half, {}
    yield "odd N d128", (1, 4, 4, 1001, 1001, 128, 128), half, {}
    yield "full odd", (1, 4, 4, 777, 1001, 64, 64), half, {"causal": False}
    yield "gqa d64", (2, 8, 2, 512, 512, 64, 64), half, {}
    yield "gqa d128", (2, 8, 2, 512, 512, 128, 128), half, {}
    yield "fp16", (1, 4, 2, 640, 640, 64, 64), torch.float16, {}
    for d in (64, 128):
        yield f"d_lse d{d}", (1, 4, 2, 1000, 1000, d, d), half, {"flow": "lse"}
        yield f"stride-0 gradient d{d}", (1, 4, 2, 1000, 1000, d, d), half, {"flow": "sum"}
    if backend == "flash-hopper":
        yield "full d128", (1, 4, 4, 1024, 1024, 128, 128), half, {"causal": False}
        yield "long k", (1, 4, 4, 256, 1024, 64, 64), half, {}
        yield from fast_backward_cases()
        return
    yield "n_q > n_k", (1, 2, 2, 300, 100, 64, 64), half, {}
    yield "window", (1, 4, 4, 1000, 1000, 64, 64), half, {"window": 100}
    yield "documents", (2, 4, 4, 1000, 1000, 64, 64), half, {"documents": True}
    yield "softcap", (1, 4, 4, 512, 512, 64, 64), half, {"softcap": 20.0}
    yield "d192/128", (1, 4, 4, 512, 512, 192, 128), half, {}
    yield "d256", (1, 4, 4, 500, 500, 256, 256), half, {}
    yield "d80", (1, 4, 4, 512, 512, 80, 80), half, {}
    yield "d16", (1, 4, 4, 512, 512, 16, 16), half, {}
    yield "fp32 d64", (1, 4, 4, 512, 512, 64, 64), single, {}
    yield "fp32 d128", (1, 2, 2, 300, 300, 128, 128), single, {}
    yield "fp32 d256", (1, 2, 2, 200, 200, 256, 256), single, {}
    yield "fp32 documents", (2, 4, 2, 1000, 1000, 64, 64), single, {"documents": True}


def fast_backward_cases() -> Generator[tuple]:
    """The backward that adds dQ in any order: lengths on and beside the tiles, n_q < n_k, both types."""
    import torch

    for d in (64, 128):
        for causal in (True, False):
            for n_q, n_k in ((1000, 1000), (2304, 2304), (300, 1000)):
                options = {"deterministic": False, "causal": causal}
                name = f"fast backward d{d} {n_q} over {n_k} causal={causal}"
                yield name, (2, 4, 2, n_q, n_k, d, d), torch.bfloat16, options
        yield f"fast backward d{d} fp16", (1, 4, 4, 1000, 1000, d, d), torch.float16, {"deterministic": False}
        for flow in ("lse", "sum"):
            options = {"deterministic": False, "flow": flow}
            yield f"fast backward d{d} {flow}", (1, 4, 2, 1000, 1000, d, d), torch.bfloat16, options


def attention_check(backend="flash-triton"):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = [
        (name, lambda n=name, s=shape, t=dtype, o=options: check_case(n, s, t, backend, **o))
        for name, shape, dtype, options in attention_cases(backend)
    ]
    if backend == "flash-triton":
        jobs.append(("torch.compile fullgraph", compile_case))
    for name, job in jobs[Section.part :: Section.parts]:
        attempt(name, job)


def hopper_check():
    hopper_everywhere()
    attention_check("flash-hopper")


def hopper_everywhere() -> None:
    """In this process flash-hopper does not leave a call to flash-triton because that one is faster there."""
    from groundup.kernels import flash_hopper

    flash_hopper.FORWARD_FROM = flash_hopper.BACKWARD_FROM = {64: 0, 128: 0}


def on_its_kernels(run, backend, deterministic=True):
    """`run()`. An error where flash-hopper's kernels should do it and others do: those would be checked or timed."""
    from groundup.bench.suites.attention import plain_kernels

    if backend != "flash-hopper" or TINY:  # on a CPU the plain ones stand in, to try the script
        return run()
    run()  # the first one compares the two kernels with each other
    with plain_kernels() as used:
        found = run()
    if used - ({"backward"} if deterministic else set()):
        raise RuntimeError(f"flash-triton did the {' and '.join(sorted(used))}")
    return found


def compile_case():
    import torch

    from groundup.kernels import attention, linear_cross_entropy, rms_norm

    w, head = (torch.randn(*s, device=DEVICE, requires_grad=True) for s in ((128,), (500, 128)))
    x = torch.randn(2, 4, 96, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 500, (2, 4, 96), device=DEVICE)

    def step(x, w, head):
        y = rms_norm(x, w, backend="triton")
        y = attention(y, y, y, backend="flash-triton")
        return linear_cross_entropy(y, head, targets)

    eager = torch.autograd.grad(step(x, w, head), (x, w, head))
    how = {"backend": "aot_eager"} if TINY else {}
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True, **how)(x, w, head), (x, w, head))
    worst = max(errors(a, b.double())[2] for a, b in zip(compiled, eager, strict=True))
    note(case="torch.compile fullgraph", ok=worst < 1e-2, frobenius=worst)
