"""Norms, loss, elementwise kernels and optimizers in kernels_h200.py: all checked, some beside their peers.

The speed of norms, loss and AdamW beside theirs: `groundup bench norm`, `loss` and `optimizer`.
"""

from kernels_timing import DEVICE, TINY, attempt, errors, median_ms, note, of_size, poisoned, race


def rows():
    for width in (50, 257, 1024, 2048, 4096, 8192, 32768):
        for residual in (False, True):
            name = f"rms {width}{' residual' if residual else ''}"
            attempt(name, rms_check, name, of_size(width, min(width, 257)), residual)
    attempt("rms stride-0 gradient", rms_check, "rms stride-0 gradient", 1024, False, True)


def rms_check(name, width, residual, flat=False, n_rows=512):
    """`flat`: the gradient is one number, stride 0, as of a sum."""
    import torch

    from groundup.kernels import rms_norm

    x, r, d_out, d_total = (torch.randn(of_size(n_rows, 8), width, device=DEVICE).bfloat16() for _ in range(4))
    w, flows = torch.randn(width, device=DEVICE), [d_out[:1, :1].expand_as(x) if flat else d_out]
    flows += [d_total] if residual else []
    leaves = [x, r, w] if residual else [x, w]
    leaves = [y.requires_grad_() for y in leaves]
    with poisoned():
        out = rms_norm(x, w, residual=r if residual else None, backend="triton")
        ours = [*out] if residual else [out]
        ours += torch.autograd.grad(ours, leaves, flows)
    # The sum is rounded to bfloat16 before it is normalised; its gradient is that of x and of the residual.
    total, weight = (
        ((x + r) if residual else x).detach().double().requires_grad_(),
        w.detach().double().requires_grad_(),
    )
    outs = [rms_norm(total, weight, backend="torch"), *([total] if residual else [])]
    d_x, d_w = torch.autograd.grad(outs, (total, weight), [flow.double() for flow in flows])
    truth = [*outs, *([d_x] * (len(leaves) - 1)), d_w]
    worst = [errors(a, b)[2] for a, b in zip(ours, truth, strict=True)]
    note(case=name, ok=max(worst[:-1]) < 4e-3 and worst[-1] < 1e-5, out=worst[0], dx=worst[-2], dw=worst[-1])


def loss():
    for vocab, z, cap in ((1000, 0.0, 0.0), (50257, 1e-4, 30.0)):
        attempt(f"loss V={vocab} z={z} cap={cap}", loss_check, vocab, z, cap)
    attempt("loss V=1000 all ignored", loss_check, 1000, 0.0, 0.0, True)


def loss_check(vocab, z, cap, ignored=False):
    import torch

    from groundup.kernels import linear_cross_entropy

    name, vocab = f"loss V={vocab} z={z} cap={cap}", of_size(vocab, 300)
    x, w = torch.randn(600, 256, device=DEVICE).bfloat16(), (torch.randn(vocab, 256, device=DEVICE) / 16).bfloat16()
    t = torch.randint(0, vocab, (600,), device=DEVICE)
    t[:: 1 if ignored else 7] = -100
    found = {}
    for backend, kind in (("triton", torch.bfloat16), ("torch", torch.float64)):
        a, b = x.to(kind).requires_grad_(), w.to(kind).requires_grad_()
        with poisoned():
            value = linear_cross_entropy(a, b, t, None, z, cap, backend)
            found[backend] = [value, *torch.autograd.grad(value, (a, b))]
    if ignored:
        note(case="loss all ignored", ok=not any(bool(y.any()) for y in found["triton"]))
        return
    worst = [errors(a, b)[2] for a, b in zip(found["triton"], found["torch"], strict=True)]
    ok = worst[0] < 1e-3 and max(worst[1:]) < 1e-2
    note(case=name, ok=ok, loss=worst[0], dx=worst[1], dw=worst[2])


def elementwise():
    for width in (2048, 8192):
        attempt(f"swiglu 16384x{width}", swiglu_case, of_size(16384, 16), of_size(width, 64))
    attempt("rope", rope_case, of_size(16, 1), of_size(12, 2), of_size(1024, 32), 64)
    for shape in ((2, 1000, 4, 2, 64), (1, 4096, 4, 4, 64), (1, 2304, 2, 1, 128), (1, 700, 2, 2, 80)):
        for deterministic in (True, False):
            small = (shape[0], of_size(shape[1], shape[1] // 100), *shape[2:])
            attempt(f"rotary {shape} {deterministic}", rotary_check, *small, deterministic)


def compiled(function):
    import torch

    return torch.compile(function, dynamic=False, **({"backend": "aot_eager"} if TINY else {}))


def swiglu_case(n_rows, width):
    import torch

    from groundup.kernels import swiglu

    def leaves():
        return [torch.randn(n_rows, 2 * width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)]

    def plain(both):
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    (a,) = leaves()
    wide, worst = a.detach().double().requires_grad_(), 0.0
    with poisoned():
        ours, truth = swiglu(a, backend="triton"), plain(wide)
        for flow in (torch.randn_like(ours), torch.ones_like(ours[:1, :1]).expand_as(ours)):  # the second as of a sum
            (found,) = torch.autograd.grad(ours, a, flow, retain_graph=True)
            (expected,) = torch.autograd.grad(truth, wide, flow.double(), retain_graph=True)
            worst = max(worst, errors(ours, truth)[2], errors(found, expected)[2])
    note(case=f"swiglu {n_rows}x{width}", ok=worst < 4e-3, frobenius=worst)
    functions = {"ours": lambda x: swiglu(x, "triton"), "eager": plain, "compiled": compiled(plain)}
    size = n_rows * width * 2
    race(f"swiglu {n_rows}x{width}", functions, leaves, torch.randn_like, 3 * size, 5 * size)


def rotary_check(batch, seq, heads, kv_heads, d, deterministic):
    """RoPE and attention of one projection against both apart, in the same kernels' types, on odd and even lengths."""
    import torch

    from groundup.bench.suites.attention import plain_kernels
    from groundup.kernels import rotary_attention
    from groundup.kernels.attention import Rule, reference
    from groundup.kernels.elementwise import turned
    from groundup.kernels.rotary_attention import parts

    qkv = torch.randn(batch, seq, heads + 2 * kv_heads, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    angle = torch.randn(seq, d // 2, device=DEVICE)
    rotation = angle.cos(), angle.sin()
    rotary_attention(
        qkv, rotation, heads, deterministic=deterministic
    ).sum().backward()  # kernels are compared at first
    with poisoned(), plain_kernels() as plain:
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
    note(case=name, ok=max(ratios) < 1.25, out_over_eager=ratios[0], grad_over_eager=ratios[1], plain=sorted(plain))


def rope_case(batch, heads, seq, d):
    import torch

    from groundup.kernels import rope
    from groundup.kernels.elementwise import turned

    angle = torch.randn(seq, d // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()

    def leaves():
        shape = (batch, seq, heads, d)
        make = lambda: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()  # noqa: E731
        return [make(), make()]

    plain = lambda q, k: (turned(q, cos, sin), turned(k, cos, sin))  # noqa: E731
    a = leaves()
    with poisoned():
        ours, theirs = rope(*a, cos, sin, "triton"), plain(*a)
        flows = [torch.randn_like(ours[0]), torch.ones_like(ours[1][:1, :1, :1, :1]).expand_as(ours[1])]  # one of a sum
        pairs = [*zip(ours, theirs, strict=True)]
        pairs += zip(*(torch.autograd.grad(outs, a, flows) for outs in (ours, theirs)), strict=True)
    worst = max(errors(x, y.double())[2] for x, y in pairs)
    note(case="rope", ok=worst < 4e-3, frobenius=worst)
    functions = {"ours": lambda q, k: rope(q, k, cos, sin, "triton"), "compiled": compiled(plain)}
    size = 4 * batch * heads * seq * d * 2
    race("rope", functions, leaves, lambda o: [torch.randn_like(x) for x in o], size, size)


def optimizers():
    attempt("adamw", adamw_check)
    for shape in ((2048, 8192), (1024, 4096), (2048, 2048)):
        attempt(f"newton-schulz {shape}", newton_schulz_case, *(of_size(n, n // 64) for n in shape))


def adamw_check():
    """Three steps of a few odd shapes against torch in float64."""
    import torch

    from groundup.kernels import adamw_step

    few = [(3, 5), (4099,), (64, 70), (1,), (768,)]
    ours = [[torch.randn(s, device=DEVICE) for s in few], *([torch.zeros(s, device=DEVICE) for s in few] for _ in "mv")]
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


def newton_schulz_case(rows_, columns):
    import torch

    from groundup.kernels import newton_schulz_gram
    from groundup.optim.muon import COEFFICIENTS, newton_schulz

    g = torch.randn(rows_, columns, device=DEVICE)
    truth = newton_schulz(g.double(), 5)
    half = g.bfloat16()
    runs = {"plain bf16": lambda: newton_schulz(half, 5), "gram": lambda: newton_schulz_gram(g, 5, COEFFICIENTS)}
    for what, run in runs.items():
        note(case=f"newton-schulz {rows_}x{columns}", what=what, ms=median_ms(run), frobenius=errors(run(), truth)[2])
