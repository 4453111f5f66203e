"""Check every kernel against a float64 truth and time it beside its peers, on one GPU, in about four minutes.

    python benchmarks/kernels_h200.py OUT [section ...]

Sections run each in a process of its own with a time limit, so a kernel that fails or hangs costs its section only.
OUT gets one JSON file a section; the table is printed last. It needs torch and Triton; the package is read from src/.
"""

import json
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
CHECKS = {"attention_check": 7, "hopper_check": 4}
"""Section → processes over which its cases are dealt; all run at once, since most of their time is compiling."""
CHECK_SECONDS = 110
SECTIONS = {
    "attention_speed": 60, "hopper_speed": 60, "rows": 60, "loss": 50, "elementwise": 45, "optimizers": 45,
}  # fmt: skip
"""Section → seconds it may take; one after the other."""
PART, PARTS = 0, 1
ROWS: list[dict] = []
STARTED = time.time()


def note(**row) -> None:
    ROWS.append(row)
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def attempt(name: str, function, *arguments) -> None:
    """Run one case; its failure is a row, not the end."""
    try:
        function(*arguments)
    except Exception as error:
        text = str(error).replace("\n", " ")
        note(case=name, FAILED=f"{type(error).__name__}: {text[:300]}")
        traceback.print_exc()


def median_ms(function, reps: int = 40) -> float:
    import triton

    return triton.testing.do_bench(function, warmup=10, rep=reps, return_mode="median")


def queued_ms(call, calls: int = 10, rounds: int = 5) -> float:
    """Milliseconds a call with the launches hidden: they queue up behind a kernel that waits, then run back to back.

    For what cannot be captured in a graph (cuDNN's attention keeps a random state). Inputs must exceed the L2 cache.
    """
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # cycles, 20 ms or more
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def graph_ms(calls: list) -> float:
    """Milliseconds a call: all `calls` (each on buffers of its own) captured in one CUDA graph and replayed.

    A backward pass runs on the stream of its forward pass: what it walks must come from `beside`.
    """
    import torch

    from groundup.bench.harness import GRAPH_METHOD, time_kernel

    timing = time_kernel(lambda i: calls[i](), len(calls), warmup=2, steps=7, device=torch.device("cuda", 0))
    if timing.method != GRAPH_METHOD:
        raise RuntimeError(f"not captured: {timing.method}")
    return statistics.median(timing.phases["total"])


def beside(work):
    """`work()` on the stream that graphs are captured on."""
    import torch

    from groundup.bench.harness import on_side_stream

    return on_side_stream(work, torch.device("cuda", 0))


def errors(ours, truth) -> tuple[float, float, float]:
    """(largest, mean, relative Frobenius) difference."""
    d = ours.double() - truth
    return d.abs().max().item(), d.abs().mean().item(), (d.norm() / truth.norm().clamp(min=1e-30)).item()


# --- attention ---------------------------------------------------------------------------------------------------


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
    for name, job in jobs[PART::PARTS]:
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


# --- memory-bound kernels ----------------------------------------------------------------------------------------


def rows():
    import torch

    n = 1 << 30
    a, b = torch.empty(n, device="cuda", dtype=torch.int8), torch.empty(n, device="cuda", dtype=torch.int8)
    note(case="copy 1 GiB", gbs=2 * n / median_ms(lambda: b.copy_(a)) / 1e6)
    del a, b
    for width in (1024, 2048, 4096, 8192):
        attempt(f"rms {width}", rms_case, width)
    for width in (50, 32768, 257):
        attempt(f"rms check {width}", rms_check, width)


def rms_check(width, n_rows=512):
    import torch

    from groundup.kernels import rms_norm

    x, d_out, r = (torch.randn(n_rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    w = torch.randn(width, device="cuda")
    found = {}
    for backend, kind in (("triton", torch.bfloat16), ("torch", torch.float64)):
        total = (x + r).to(kind).requires_grad_()
        weight = w.to(torch.float32 if kind == torch.bfloat16 else kind).requires_grad_()
        out = rms_norm(total, weight, backend=backend)
        found[backend] = [out, *torch.autograd.grad(out, (total, weight), d_out.to(kind))]
    worst = [errors(a, b)[2] for a, b in zip(found["triton"], found["torch"], strict=True)]
    note(
        case=f"rms {width}",
        ok=worst[0] < 3e-3 and worst[1] < 4e-3 and worst[2] < 1e-5,
        out=worst[0],
        dx=worst[1],
        dw=worst[2],
    )


def rms_case(width, n_rows=32768):
    import torch
    from torch.nn.functional import layer_norm
    from torch.nn.functional import rms_norm as eager

    from groundup.kernels import rms_norm

    rms_check(width)
    sets = 3
    data = [[torch.randn(n_rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(sets)]
    w = torch.ones(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    copy_to = [torch.empty_like(x) for x, _ in data]
    copy = (
        2
        * n_rows
        * width
        * 2
        / graph_ms([lambda x=x, y=y: y.copy_(x) for (x, _), y in zip(data, copy_to, strict=True)])
        / 1e6
    )
    note(case=f"copy {width}", gbs=copy)
    del copy_to
    torch._functorch.config.donated_buffer = False  # backward is run again and again over one graph
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: eager(x, (width,), w, 1e-5))
    functions = {
        "ours": lambda x, w: rms_norm(x, w, backend="triton"), "eager": lambda x, w: eager(x, (width,), w, 1e-5),
        "compiled": compiled, "layernorm": lambda x, w: layer_norm(x, (width,), w),
    }  # fmt: skip
    for name, function in functions.items():
        leaves = [x.detach().requires_grad_() for x, _ in data]
        with torch.no_grad():
            forward = graph_ms([lambda x=x, f=function: f(x, w) for x in leaves])
        outs = beside(lambda f=function, leaves=leaves: [f(x, w) for x in leaves])
        backward = graph_ms([
            lambda o=o, x=x, g=g: torch.autograd.grad(o, (x, w), g, retain_graph=True)
            for o, x, (_, g) in zip(outs, leaves, data, strict=True)
        ])  # fmt: skip
        size = n_rows * width * 2 / 1e6
        note(case=f"rms {width}", what=name, fwd_gbs=2 * size / forward, bwd_gbs=3 * size / backward,
             fwd_copy=2 * size / forward / copy, bwd_copy=3 * size / backward / copy)  # fmt: skip


def loss():
    attempt("loss check", loss_check)
    for shape in ((16384, 50304, 768), (16384, 50257, 768), (16384, 128256, 2048)):
        attempt(f"loss {shape}", loss_case, *shape)


def loss_check():
    import torch

    from groundup.kernels import linear_cross_entropy

    for vocab, z, cap in ((1000, 0.0, 0.0), (50257, 1e-4, 30.0)):
        x, w = torch.randn(600, 256, device="cuda").bfloat16(), (torch.randn(vocab, 256, device="cuda") / 16).bfloat16()
        t = torch.randint(0, vocab, (600,), device="cuda")
        t[::7] = -100
        found = {}
        for backend, kind in (("triton", torch.bfloat16), ("torch", torch.float64)):
            a, b = x.to(kind).requires_grad_(), w.to(kind).requires_grad_()
            value = linear_cross_entropy(a, b, t, None, z, cap, backend)
            found[backend] = [value, *torch.autograd.grad(value, (a, b))]
        worst = [errors(a, b)[2] for a, b in zip(found["triton"], found["torch"], strict=True)]
        note(
            case=f"loss V={vocab} z={z} cap={cap}",
            ok=worst[0] < 1e-3 and max(worst[1:]) < 1e-2,
            loss=worst[0],
            dx=worst[1],
            dw=worst[2],
        )


def loss_case(n, vocab, width):
    import torch

    from groundup.kernels import linear_cross_entropy

    x = torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(vocab, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    t = torch.randint(0, vocab, (n,), device="cuda")
    eager = lambda: torch.nn.functional.cross_entropy((x @ w.T).float(), t)  # noqa: E731
    functions = {"ours": lambda: linear_cross_entropy(x, w, t), "eager": eager, "compiled": torch.compile(eager)}
    for name, function in functions.items():
        step = lambda f=function: torch.autograd.grad(f(), (x, w))  # noqa: E731
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        beyond = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + w.numel())
        ms = median_ms(step, 150)
        note(case=f"loss {n}x{vocab}x{width}", what=name, ms=ms, beyond_gib=beyond / 2**30)


def elementwise():
    for rows_, width in ((16384, 2048), (16384, 8192)):
        attempt(f"swiglu {rows_}x{width}", swiglu_case, rows_, width)
    attempt("rope", rope_case, 16, 12, 1024, 64)
    for shape in ((2, 1000, 4, 2, 64), (1, 4096, 4, 4, 64), (1, 2304, 2, 1, 128), (1, 700, 2, 2, 80)):
        for deterministic in (True, False):
            attempt(f"rotary {shape}", rotary_check, *shape, deterministic)


def race(name, functions, leaves_of, d_out_of, forward_bytes, backward_bytes) -> None:
    """Forward and backward of each function on three sets of inputs, by graph replay."""
    import torch

    sets = [leaves_of() for _ in range(3)]
    for what, function in functions.items():
        with torch.no_grad():
            forward = graph_ms([lambda s=s, f=function: f(*s) for s in sets])
        outs = beside(lambda f=function: [f(*s) for s in sets])
        flows = [d_out_of(o) for o in outs]
        backward = graph_ms(
            [
                lambda o=o, s=s, g=g: torch.autograd.grad(o, [x for x in s if x.requires_grad], g, retain_graph=True)
                for o, s, g in zip(outs, sets, flows, strict=True)
            ]
        )
        note(case=name, what=what, fwd_gbs=forward_bytes / forward / 1e6, bwd_gbs=backward_bytes / backward / 1e6)


def swiglu_case(n_rows, width):
    import torch

    from groundup.kernels import swiglu

    def leaves():
        return [torch.randn(n_rows, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)]

    def plain(both):
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    (a,) = leaves()
    wide = a.detach().double().requires_grad_()
    ours, truth = swiglu(a, backend="triton"), plain(wide)
    flow = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, a, flow), torch.autograd.grad(truth, wide, flow.double())
    pairs = zip([ours, *grads[0]], [truth, *grads[1]], strict=True)
    worst = max(errors(x, y)[2] for x, y in pairs)
    note(case=f"swiglu {n_rows}x{width}", ok=worst < 4e-3, frobenius=worst)
    functions = {"ours": lambda x: swiglu(x, "triton"), "eager": plain, "compiled": torch.compile(plain)}
    size = n_rows * width * 2
    race(f"swiglu {n_rows}x{width}", functions, leaves, torch.randn_like, 3 * size, 5 * size)


def rotary_check(batch, seq, heads, kv_heads, d, deterministic):
    """RoPE and attention of one projection against both apart, in the same kernels' types, on odd and even lengths."""
    import torch

    from groundup.kernels import rotary_attention
    from groundup.kernels.attention import Rule, reference
    from groundup.kernels.elementwise import turned
    from groundup.kernels.rotary_attention import parts

    qkv = torch.randn(batch, seq, heads + 2 * kv_heads, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    angle = torch.randn(seq, d // 2, device="cuda")
    rotation = angle.cos(), angle.sin()
    ours = rotary_attention(qkv, rotation, heads, deterministic=deterministic)
    flow = torch.randn_like(ours)
    (grad,) = torch.autograd.grad(ours, qkv, flow)

    def apart(x):
        q, k, v = parts(x, heads)
        q, k = turned(q, *rotation), turned(k, *rotation)
        return reference(q, k, v, Rule(True, 0, 0.0, d**-0.5), None)[0].transpose(1, 2)

    wide = qkv.detach().double().requires_grad_()
    truth, eager = apart(wide), apart(qkv)
    (expected,), (theirs,) = torch.autograd.grad(truth, wide, flow.double()), torch.autograd.grad(eager, qkv, flow)
    ratios = [errors(a, t)[2] / errors(e, t)[2] for a, e, t in ((ours, eager, truth), (grad, theirs, expected))]
    name = f"rotary {batch},{seq},{heads},{kv_heads},{d} {'deterministic' if deterministic else 'fastest'}"
    note(case=name, ok=max(ratios) < 1.25, out_over_eager=ratios[0], grad_over_eager=ratios[1])


def rope_case(batch, heads, seq, d):
    import torch

    from groundup.kernels import rope
    from groundup.kernels.elementwise import turned

    angle = torch.randn(seq, d // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()

    def leaves():
        shape = (batch, seq, heads, d)
        make = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()  # noqa: E731
        return [make(), make()]

    plain = lambda q, k: (turned(q, cos, sin), turned(k, cos, sin))  # noqa: E731
    a = leaves()
    worst = max(errors(x, y.double())[2] for x, y in zip(rope(*a, cos, sin, "triton"), plain(*a), strict=True))
    note(case="rope", ok=worst < 1e-3, frobenius=worst)
    functions = {"ours": lambda q, k: rope(q, k, cos, sin, "triton"), "compiled": torch.compile(plain)}
    size = 4 * batch * heads * seq * d * 2
    race("rope", functions, leaves, lambda o: [torch.randn_like(x) for x in o], size, size)


def optimizers():
    for size in ("gpt2-124m", "gpt2-1.5b"):
        attempt(f"adamw {size}", adamw_case, size)
    for shape in ((2048, 8192), (1024, 4096), (2048, 2048)):
        attempt(f"newton-schulz {shape}", newton_schulz_case, *shape)


def adamw_case(size):
    import torch

    from groundup.config import size as named
    from groundup.kernels import adamw_step
    from groundup.model import TransformerLM

    with torch.device("meta"):
        shapes = [p.shape for p in TransformerLM(named(size).resolve()).parameters()]
    # The check: three steps of a few odd shapes against torch in float64.
    few = [(3, 5), (4099,), (64, 70), (1,), (768,)]
    ours = [[torch.randn(s, device="cuda") for s in few], *([torch.zeros(s, device="cuda") for s in few] for _ in "mv")]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in ours[0]]
    truth = [p.double().requires_grad_() for p in ours[0]]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(truth, **settings)
    for step in range(1, 4):
        grads = [torch.randn_like(p) for p in ours[0]]
        for p, g in zip(truth, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        adamw_step(ours[0], grads, *ours[1:], step, **settings, copies=copies)
    worst = max(errors(p, q.detach())[2] for p, q in zip(ours[0], truth, strict=True))
    same = all(torch.equal(c, p.bfloat16()) for c, p in zip(copies, ours[0], strict=True))
    note(case="adamw check", ok=worst < 1e-6 and same, frobenius=worst)

    params = [torch.randn(s, device="cuda").requires_grad_() for s in shapes]
    grads = [torch.randn_like(p) for p in params]
    moments = [[torch.zeros_like(p) for p in params] for _ in "mv"]
    total = sum(p.numel() for p in params)
    with torch.no_grad():
        ms = median_ms(lambda: adamw_step(params, grads, *moments, 5, **settings))
    note(case=f"adamw {size}", what="ours", ms=ms, gbs=28 * total / ms / 1e6)
    del moments
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    fused = torch.optim.AdamW(params, **settings, fused=True)
    fused.step()
    ms = median_ms(fused.step)
    note(case=f"adamw {size}", what="fused", ms=ms, gbs=28 * total / ms / 1e6)


def newton_schulz_case(rows_, columns):
    import torch

    from groundup.kernels import newton_schulz_gram
    from groundup.optim.muon import COEFFICIENTS, newton_schulz

    g = torch.randn(rows_, columns, device="cuda")
    truth = newton_schulz(g.double(), 5)
    half = g.bfloat16()
    runs = {"plain bf16": lambda: newton_schulz(half, 5), "gram": lambda: newton_schulz_gram(g, 5, COEFFICIENTS)}
    for what, run in runs.items():
        note(case=f"newton-schulz {rows_}x{columns}", what=what, ms=median_ms(run), frobenius=errors(run(), truth)[2])


def run_section(name: str, part: str, out: Path) -> None:
    import torch

    global PART, PARTS
    PART, PARTS = (int(x) for x in part.split("/"))
    torch.manual_seed(0)
    try:
        globals()[name]()
    finally:
        (out / f"{name}.{PART}.json").write_text(json.dumps(ROWS, indent=1))


def start(name: str, part: int, parts: int, out: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, str(out), "--section", name, f"{part}/{parts}"]
    with (out / f"{name}.{part}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(name: str, process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(timeout=max(1.0, seconds))
        print(f"{time.time() - STARTED:5.0f} s  {name} ended with {process.returncode}", flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"{time.time() - STARTED:5.0f} s  {name} ran out of time", flush=True)


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 5 and sys.argv[2] == "--section":
        return run_section(sys.argv[3], sys.argv[4], out)
    chosen = sys.argv[2:] or [*CHECKS, *SECTIONS]
    running = [
        (f"{name} {part}", start(name, part, CHECKS[name], out))
        for name in chosen
        if name in CHECKS
        for part in range(CHECKS[name])
    ]
    for name, process in running:
        finish(name, process, CHECK_SECONDS - (time.time() - STARTED))
    for name in chosen:
        if name in SECTIONS:
            finish(name, start(name, 0, 1, out), SECTIONS[name])
    print()
    for name in chosen:
        print(f"== {name}")
        for log in sorted(out.glob(f"{name}.*.log")):
            text = log.read_text(errors="replace")
            lines = [line[5:165] for line in text.splitlines() if line.startswith("case=")]
            print(*(lines or [f"nothing in {log.name}: {text[-500:]}"]), sep="\n")
    return None


if __name__ == "__main__":
    main()
