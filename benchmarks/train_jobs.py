"""The jobs of train_h200.py, each in a process of its own:  train_jobs.py FILE JOB FUNCTION ARGUMENTS-AS-JSON END

Every row goes to FILE as soon as it is measured. END: the time (time.time()) by which the job should be done.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpu_jobs import append, read


class Size(NamedTuple):
    """A named size of the package, and the batch it is trained with here."""

    name: str
    batch: int
    context: int = 1024
    vocab: int = 50304


SIZES = {
    "124m": Size("gpt2-124m", 32), "350m": Size("gpt2-350m", 16), "1.5b": Size("gpt2-1.5b", 8),
    "17m": Size("stories-17m", 64, 256, 10_000), "tiny": Size("tiny", 1, 64, 512),
}  # fmt: skip
VARIANTS = {
    "plain GPT": None,
    "ours": {"attention_deterministic": False},
    "ours, deterministic": {},
    "ours, all kernels": {"attention_deterministic": False, "kernels": "triton"},
    "ours, loss kernel only": {"attention_deterministic": False, "kernels": "loss"},
    "ours, sdpa": {"attention": "sdpa"},
    "reference": {"attention": "reference", "kernels": "reference"},
}


class Form(NamedTuple):
    """A row of a `turns` section."""

    variant: str
    options: dict[str, Any] | None = None
    """Of the compiler."""
    clip: str = ""
    """How gradients are clipped to a norm of 1: in place, or by AdamW as it reads them, as the trainer does."""
    recorded: bool = True
    """Whether forward and backward are replayed as a CUDA graph (train/cuda_graph.py)."""


FORMS = {
    "plain GPT": Form("plain GPT", recorded=False),
    "ours": Form("ours"),
    "ours, not recorded": Form("ours", recorded=False),
    "plain GPT, recorded": Form("plain GPT"),
    "plain GPT, clipped": Form("plain GPT", clip="in place", recorded=False),
    "ours, clipped as the trainer does": Form("ours", clip="by AdamW"),
    "ours, clipped in place": Form("ours", clip="in place"),
    "ours, deterministic": Form("ours, deterministic"),
    "ours, sums of 64 rows": Form("ours", {"triton.mix_order_reduction_split_size": 64}),
    "ours, combo kernels": Form("ours", {"combo_kernels": True}),
}
ROUNDS = 8
LOSSES = {
    "reference": {"attention": "reference", "kernels": "reference"},
    "kernels": {"kernels": "triton"},
    "kernels, fast backward": {"kernels": "triton", "attention_deterministic": False},
}


def plain_gpt(d_model: int, n_layers: int, n_heads: int, vocab: int, context: int) -> Any:
    """GPT-2 (Radford et al. 2019) in torch.nn: LayerNorm, learned positions, GELU, tied head, no biases."""
    import torch
    from torch import nn
    from torch.nn import functional as f

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
            self.qkv, self.proj = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
            self.up = nn.Linear(d_model, 4 * d_model, bias=False)
            self.down = nn.Linear(4 * d_model, d_model, bias=False)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (n_heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(d_model, -1))
            x = x + self.proj(f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
            return x + self.down(f.gelu(self.up(self.ln2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(context, d_model)
            self.blocks, self.ln = nn.ModuleList(Block() for _ in range(n_layers)), nn.LayerNorm(d_model, bias=False)
            for p in self.parameters():
                nn.init.normal_(p, std=0.02) if p.ndim == 2 else None

        def forward(self, ids, targets):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = f.linear(self.ln(x), self.tokens.weight)
            return f.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return GPT()


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def trainer(size: str, form: Form, compiled: bool = True, context: int = 0, batch: int = 0):
    """(model, step): step(clip) is one training step and gives its loss."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from groundup.config import size as named
    from groundup.model import TransformerLM
    from groundup.optim import AdamW
    from groundup.optim.clip import clip_factor, clip_grad_norm
    from groundup.train.cuda_graph import StepGraph

    usual = SIZES[size]
    context = context or usual.context
    config = replace(named(usual.name), vocab_size=usual.vocab, context_length=context)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if VARIANTS[form.variant] is None:
        model = plain_gpt(config.d_model, config.n_layers, config.n_heads, usual.vocab, context).to(device())
        optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)
    else:
        model = TransformerLM(replace(config, **VARIANTS[form.variant]).resolve()).to(device())
        optimizer = AdamW(model.parameters(), **settings)
    in_place = torch.nn.utils.clip_grad_norm_ if VARIANTS[form.variant] is None else clip_grad_norm
    how = {"options": form.options or {}} if device() == "cuda" else {"backend": "aot_eager"}
    forward = torch.compile(model, **how) if compiled else model
    ids = torch.randint(usual.vocab, (batch or usual.batch, context + 1), device=device())
    flash = [SDPBackend.FLASH_ATTENTION] if device() == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    graph = StepGraph(model.parameters()) if form.recorded and device() == "cuda" else None

    def gradients(inputs, targets, _=None):
        with torch.autocast(device(), torch.bfloat16), sdpa_kernel(flash):
            loss = forward(inputs, targets)
        loss.backward()
        return loss.detach()

    def step(clip: str = ""):
        batch = ids[:, :-1], ids[:, 1:]
        loss = gradients(*batch) if graph is None else graph(gradients, *batch, n_valid=1, first=True)
        if clip == "in place":
            in_place(model.parameters(), 1.0)
        elif clip:
            optimizer.factor = clip_factor(clip_grad_norm(model.parameters(), 0.0), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return model, step


def milliseconds(step, untimed: int, timed: int) -> list[float]:
    """Of each of `timed` steps, run back to back after `untimed` ones."""
    import torch

    if device() == "cpu":
        marks = [(step(), time.perf_counter())[1] for _ in range(untimed + timed + 1)]
        return [(b - a) * 1e3 for a, b in pairwise(marks[untimed:])]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(untimed + timed + 1)]
    for mark in marks:
        mark.record()
        step()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks[untimed:])]


def step_row(write: Callable, end: float, size: str, variant: str, context=0, batch=0, compiled=True):
    """Time, tokens a second and memory of one model's training step."""
    import torch

    from groundup.config import size as named
    from groundup.model import count_parameters

    usual, options = SIZES[size], VARIANTS[variant]
    context, batch, config = context or usual.context, batch or usual.batch, named(usual.name)
    form = Form(variant, recorded=compiled and options is not None)  # as the trainer's auto; the peer as it is written
    model, step = trainer(size, form, compiled, context, batch)
    milliseconds(step, 0, 7)
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(milliseconds(step, 0, 20))
    parameters = count_parameters(model)
    attention = 6 * config.n_layers * context * config.d_model  # 2 products, forward + 2 × backward, causal half
    flops = 6 * (parameters - (context * config.d_model if options is None else 0)) + attention
    write(
        size=size, variant=variant, context=context, batch=batch, compiled=compiled, ms=ms,
        tokens_per_second=batch * context / ms * 1e3, parameters=parameters,
        mfu=flops * batch * context / ms * 1e3 / 989e12,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30, loss=float(step()),
    )  # fmt: skip


def profile_row(write: Callable, end: float, size: str, variant: str, steps: int = 5):
    """The kernels of a step, the longest first: milliseconds and launches a step."""
    import torch

    _, step = trainer(size, Form(variant, recorded=False))
    milliseconds(step, 0, 7)
    kind = torch.profiler.ProfilerActivity.CUDA if device() == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as recorded:
        for _ in range(steps):
            step()
        if device() == "cuda":
            torch.cuda.synchronize()
    time_of = "self_device_time_total" if device() == "cuda" else "self_cpu_time_total"
    found = [(getattr(k, time_of) / steps / 1e3, k.count / steps, k.key) for k in recorded.key_averages()]
    kernels = sorted(found, reverse=True)
    listed = [{"ms": round(ms, 3), "launches": n, "name": name[:90]} for ms, n, name in kernels[:50]]
    total, launches = (round(sum(k[i] for k in kernels), 2) for i in (0, 1))
    write(size=size, variant=variant, kernels_ms=total, launches=launches, kernels=listed)


def turns_rows(write: Callable, end: float, size: str, names: list[str]):
    """FORMS by turns in one process, so that heat and clocks are alike: a row a form and round.

    A form that has just been compiled takes one round (below 0) with the first two forms alone, so that something is
    known of it whatever comes; the rounds from 0 are of all. No form is begun after seven tenths of the time.
    """
    import torch

    torch._dynamo.config.recompile_limit = 64
    begun, steps, runs, late = time.time(), {}, {}, False
    for name in names:
        form = FORMS[name]
        key = json.dumps(form._replace(clip=""))
        try:
            if key not in steps:
                if time.time() > begun + 0.7 * (end - begun):
                    raise TimeoutError("no time was left to begin it")
                steps[key] = trainer(size, form)[1]
            run = partial(steps[key], form.clip)
            milliseconds(run, 0, 5)
        except Exception as error:
            write(size=size, form=name, FAILED=f"{type(error).__name__}: {str(error)[:200]}")
            late = late or isinstance(error, TimeoutError)
            continue
        runs[name] = run
        one_round(write, size, runs, [*dict.fromkeys([*[*runs][:2], name])], -len(runs))
    for index in range(ROUNDS if runs else 0):
        if time.time() > end - 10:
            late = True
            break
        order = [*runs]
        one_round(write, size, runs, order[index % len(order) :] + order[: index % len(order)], index)
    if late or not runs:
        raise SystemExit("not all forms and rounds were done: a second call adds to them")


def one_round(write: Callable, size: str, runs: dict[str, Callable], names: list[str], index: int) -> None:
    for name in names:
        try:
            write(size=size, form=name, round=index, ms=statistics.median(milliseconds(runs[name], 2, 10)))
        except Exception as error:
            write(size=size, form=name, FAILED=f"{type(error).__name__}: {str(error)[:200]}")
            del runs[name]


def losses_rows(write: Callable, end: float, size: str, variant: str, tokens: str, steps: int = 500):
    """Loss over training steps on a token directory's windows, the same ones for every variant."""
    import numpy as np
    import torch

    from groundup.config import size as named
    from groundup.model import TransformerLM
    from groundup.optim import AdamW

    ids = np.load(Path(tokens) / "train.npy", mmap_mode="r")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = TransformerLM(replace(named(size), **LOSSES[variant]).resolve())
    model.init_weights(0)
    model.to(device())
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    context, generator, found = model.config.context_length, torch.Generator().manual_seed(1), []
    for number in range(1, steps + 1):
        starts = torch.randint(len(ids) - context, (32,), generator=generator)
        batch = torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts.tolist()]).astype(np.int64))
        batch = batch.to(device()) % model.config.vocab_size  # of a tiny model only is it smaller than the tokenizer's
        with torch.autocast(device(), torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach())
        if number % 50 == 0 or number == steps:
            mean = float(torch.stack(found[-50:]).mean())
            write(variant=variant, text=Path(tokens).name, step=number, mean_loss_of_last_50=mean)


def main() -> None:
    path, job, function, arguments, end = Path(sys.argv[1]), *sys.argv[2:]
    arguments = json.loads(arguments)
    call = time.time()
    if function == "turns_rows":  # what failed before, perhaps with the whole process, comes last
        failed = {row.get("form") for row in read(path) if row.get("job") == job and "FAILED" in row}
        arguments[1].sort(key=lambda name: name in failed)
    globals()[function](partial(append, path, job=job, call=call), float(end), *arguments)
    append(path, job=job, call=call, done=True)


if __name__ == "__main__":
    main()
