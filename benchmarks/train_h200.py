"""A whole training step beside a plain PyTorch GPT's, on one GPU: tokens a second, memory, and equal losses.

    python benchmarks/train_h200.py OUT [section ...]
    sections: 124m 350m 1.5b memory losses profile-124m profile-350m turns-124m turns-350m

The peer is GPT-2's shape as most trainers write it: torch.nn layers, SDPA's flash attention, torch.compile of the whole
model, bf16 autocast, fused AdamW, full logits. Ours has the same parameters and FLOPs to 2% and the same batch of
random tokens. Each model runs in a process of its own; 20 steps after 8, back to back as in training, an event after
each: the median. `profile-SIZE` lists the kernels of a step. `turns-SIZE` is for differences of a few percent: one
process, every form compiled, then ten steps of each by turns (FORMS; up to nine minutes a size, most of it compiling).
With several GPUs each has a job of its own. OUT gets train.json. Without a GPU the size
`tiny` tries the script: turns-tiny profile-tiny tiny.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
CONTEXT, VOCAB = (64, 512) if "tiny" in " ".join(sys.argv) else (1024, 50304)
SIZES = {"124m": ("gpt2-124m", 32), "350m": ("gpt2-350m", 16), "1.5b": ("gpt2-1.5b", 8), "tiny": ("tiny", 1)}
VARIANTS = {
    "plain GPT": None,
    "ours": {"attention_deterministic": False},
    "ours, deterministic": {},
    "ours, all kernels": {"attention_deterministic": False, "kernels": "triton"},
    "ours, loss kernel only": {"attention_deterministic": False, "kernels": "loss"},
    "ours, sdpa": {"attention": "sdpa"},
    "reference": {"attention": "reference", "kernels": "reference"},
}
GRAPHS = {"triton.cudagraphs": True}  # what mode="reduce-overhead" sets
FORMS = {
    "plain GPT": ("plain GPT", {}, ""),
    "ours": ("ours", {}, ""),
    "ours, reduce-overhead": ("ours", GRAPHS, ""),
    "plain GPT, reduce-overhead": ("plain GPT", GRAPHS, ""),
    "plain GPT, clipped": ("plain GPT", {}, "in place"),
    "ours, clipped as the trainer does": ("ours", {}, "by AdamW"),
    "ours, clipped in place": ("ours", {}, "in place"),
    "ours, sums of 64 rows": ("ours", {"triton.mix_order_reduction_split_size": 64}, ""),
    "ours, sums autotuned": ("ours", {"triton.mix_order_reduction_autotune_split_size": True}, ""),
    "ours, combo kernels": ("ours", {"combo_kernels": True}, ""),
    "ours, deterministic": ("ours, deterministic", {}, ""),
}
"""Row of a `turns` section → variant, options of the compiler, how gradients are clipped to a norm of 1."""
ROUNDS = 8
COMPILE_SECONDS, JOB_SECONDS = 330, 540
"""No form of a `turns` section is begun after the first; the rounds done by the second are kept."""
SECONDS = {"step_row": 150, "losses_row": 150, "profile_row": 200, "turns_rows": JOB_SECONDS + 30}


def plain_gpt(d_model: int, n_layers: int, n_heads: int):
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
            self.tokens, self.positions = nn.Embedding(VOCAB, d_model), nn.Embedding(CONTEXT, d_model)
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


def trainer(size: str, variant: str, options: dict | None = None, context: int = CONTEXT, batch: int = 0):
    """(model, step): step(clip) is one training step, compiled with `options` (None: eager), and gives its loss."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from groundup.config import size as named
    from groundup.model import TransformerLM
    from groundup.optim import AdamW
    from groundup.optim.clip import clip_factor, clip_grad_norm

    name, usual = SIZES[size]
    config = replace(named(name), vocab_size=VOCAB, context_length=context)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if VARIANTS[variant] is None:
        model = plain_gpt(config.d_model, config.n_layers, config.n_heads).to(device())
        optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)
    else:
        model = TransformerLM(replace(config, **VARIANTS[variant]).resolve()).to(device())
        optimizer = AdamW(model.parameters(), **settings)
    in_place = torch.nn.utils.clip_grad_norm_ if VARIANTS[variant] is None else clip_grad_norm
    how = {"options": options} if device() == "cuda" else {"backend": "aot_eager"}
    forward = model if options is None else torch.compile(model, **how)
    ids = torch.randint(VOCAB, (batch or usual, context + 1), device=device())
    flash = [SDPBackend.FLASH_ATTENTION] if device() == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def step(clip: str = ""):
        with torch.autocast(device(), torch.bfloat16), sdpa_kernel(flash):
            loss = forward(ids[:, :-1], ids[:, 1:])
        loss.backward()
        if clip == "in place":
            in_place(model.parameters(), 1.0)
        elif clip:
            optimizer.factor = clip_factor(clip_grad_norm(model.parameters(), 0.0), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

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


def step_row(size: str, variant: str, context: int = CONTEXT, batch: int = 0, compiled: bool = True) -> dict:
    """Time, tokens a second and memory of one model's training step."""
    import torch

    from groundup.config import size as named
    from groundup.model import count_parameters

    (name, usual), options = SIZES[size], VARIANTS[variant]
    batch, config = batch or usual, named(name)
    model, step = trainer(size, variant, {} if compiled else None, context, batch)
    milliseconds(step, 0, 7)
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(milliseconds(step, 0, 20))
    parameters = count_parameters(model)
    attention = 6 * config.n_layers * context * config.d_model  # 2 products, forward + 2 × backward, causal half
    flops = 6 * (parameters - (context * config.d_model if options is None else 0)) + attention
    return {
        "size": size, "variant": variant, "context": context, "batch": batch, "compiled": compiled, "ms": ms,
        "tokens_per_second": batch * context / ms * 1e3, "parameters": parameters,
        "mfu": flops * batch * context / ms * 1e3 / 989e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": float(step()),
    }  # fmt: skip


def profile_row(size: str, variant: str, steps: int = 5) -> dict:
    """The kernels of a step, the longest first: milliseconds and launches a step."""
    import torch

    _, step = trainer(size, variant, {})
    milliseconds(step, 0, 7)
    kind = torch.profiler.ProfilerActivity.CUDA if device() == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            step()
        if device() == "cuda":
            torch.cuda.synchronize()
    time_of = "self_device_time_total" if device() == "cuda" else "self_cpu_time_total"
    found = [(getattr(k, time_of) / steps / 1e3, k.count / steps, k.key) for k in profile.key_averages()]
    kernels = sorted(found, reverse=True)
    listed = [{"ms": round(ms, 3), "launches": n, "name": name[:90]} for ms, n, name in kernels[:50]]
    total, launches = (round(sum(k[i] for k in kernels), 2) for i in (0, 1))
    return {"size": size, "variant": variant, "kernels_ms": total, "launches": launches, "kernels": listed}


def turns_rows(size: str, names: list[str]):
    """Rows of FORMS, after every round: all forms run by turns in one process, so that heat and clocks are alike."""
    import torch

    torch._dynamo.config.recompile_limit = 64
    started, steps, failed, times = time.time(), {}, [], {}
    for name in names:
        variant, options, clip = FORMS[name]
        key = variant + json.dumps(options)
        try:
            if key not in steps:
                if time.time() - started > COMPILE_SECONDS:
                    raise TimeoutError(f"not begun after {COMPILE_SECONDS} s")
                steps[key] = trainer(size, variant, options)[1]
            run = lambda step=steps[key], clip=clip: step(clip)  # noqa: E731
            milliseconds(run, 0, 5)
            times[name] = run, []
        except Exception as error:
            failed.append({"size": size, "form": name, "FAILED": f"{type(error).__name__}: {str(error)[:200]}"})
    for index in range(ROUNDS):
        if index and time.time() - started > JOB_SECONDS:
            return
        order = [*times.items()]
        for run, rounds in (form for _, form in order[index % len(order) :] + order[: index % len(order)]):
            rounds.append(statistics.median(milliseconds(run, 2, 10)))
        yield [*turned(size, {name: rounds for name, (_, rounds) in times.items()}), *failed]


def turned(size: str, times: dict[str, list[float]]) -> list[dict]:
    """A row a form from its medians, one a round; `x_plain` compares within each round first."""
    plain = times.get("plain GPT")
    rows = []
    for form, rounds in times.items():
        ms = statistics.median(rounds)
        row = {"size": size, "form": form, "ms": ms, "least": min(rounds), "most": max(rounds), "rounds": len(rounds)}
        row["tokens_per_second"] = SIZES[size][1] * CONTEXT / ms * 1e3
        if plain:
            row["x_plain"] = statistics.median(a / b for a, b in zip(plain, rounds, strict=True))
        rows.append(row)
    return rows


def losses_row(variant: str) -> dict:
    """Loss over 500 steps of the stories shape on a fixed Markov text, reference against kernels."""
    import torch

    from groundup.config import size as named
    from groundup.model import TransformerLM
    from groundup.optim import AdamW

    options = {"reference": {"attention": "reference", "kernels": "reference"}, "kernels": {"kernels": "triton"}}
    options["kernels, fast backward"] = {"kernels": "triton", "attention_deterministic": False}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = TransformerLM(replace(named("stories-17m"), **options[variant]).resolve())
    model.init_weights(0)
    model = model.cuda()
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(10_000, (10_000, 8), generator=generator)  # every token has eight successors
    last = []
    for _ in range(500):
        ids = [torch.randint(10_000, (32,), generator=generator)]
        for choice in torch.randint(8, (256, 32), generator=generator):
            ids.append(table[ids[-1], choice])
        ids = torch.stack(ids, 1).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = [*last[-49:], loss.detach()]
    return {"variant": variant, "mean_loss_of_last_50": float(torch.stack(last).mean())}


def jobs(sections: list[str]):
    for section in sections:
        what, _, size = section.rpartition("-")
        if section in SIZES:
            for variant in [name for name in VARIANTS if name != "reference"]:
                yield "step_row", [section, variant]
        elif what == "profile":
            for variant in ("plain GPT", "ours"):
                yield "profile_row", [size, variant]
        elif what == "turns":
            yield "turns_rows", [size, list(FORMS)]
        elif section == "memory":
            for context, batch in ((512, 32), (1024, 16), (2048, 8)):
                for variant in ("reference", "ours, all kernels"):
                    yield "step_row", ["124m", variant, context, batch, False]
        elif section == "losses":
            for variant in ("reference", "kernels", "kernels, fast backward"):
                yield "losses_row", [variant]
        else:
            sys.exit(f"no section {section}")


def run_job(function: str, arguments: list, gpus: Queue) -> list[dict]:
    """The rows of a job in a process of its own on a free GPU; of those it gives several times, the last."""
    command = [sys.executable, __file__, "--job", function, json.dumps(arguments)]
    gpu = gpus.get()
    try:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS[function], env=env)
        shown, error = run.stdout, (run.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired as late:
        shown, error = late.stdout or "", f"over {SECONDS[function]} s"
        shown = shown.decode() if isinstance(shown, bytes) else shown
    finally:
        gpus.put(gpu)
    # A process that was stopped may have been in the middle of a line.
    lines = [line[4:] for line in shown.splitlines(keepends=True) if line.startswith("ROW ") and line.endswith("\n")]
    return json.loads(lines[-1]) if lines else [{"job": [function, *arguments], "FAILED": error}]


def main() -> None:
    if sys.argv[1] == "--job":
        found = globals()[sys.argv[2]](*json.loads(sys.argv[3]))
        for rows in [[found]] if isinstance(found, dict) else found:
            print("ROW " + json.dumps(rows), flush=True)
        return
    import torch

    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus: Queue = Queue()
    for gpu in visible.split(",") if visible else map(str, range(max(1, torch.cuda.device_count()))):
        gpus.put(gpu)
    chosen, rows = [*jobs(sys.argv[2:] or ["124m", "350m", "memory", "losses"])], []
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        for found in pool.map(lambda job: run_job(*job, gpus), chosen):
            rows += found
            print(*found, sep="\n", flush=True)
            (out / "train.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
