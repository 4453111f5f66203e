"""A whole training step beside a plain PyTorch GPT's, on one GPU: tokens a second, memory, and equal losses.

    python benchmarks/train_h200.py OUT [section ...]        sections: 124m 350m 1.5b memory losses

The peer is GPT-2's shape as most trainers write it: torch.nn layers, SDPA's flash attention, torch.compile of the whole
model, bf16 autocast, fused AdamW, full logits. Ours has the same parameters and FLOPs to 2% and the same batch of
random tokens. Each model runs in a process of its own; 20 steps after 8, back to back as in training, an event after
each: the median. OUT gets train.json.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
CONTEXT, VOCAB = 1024, 50304
SIZES = {"124m": ("gpt2-124m", 32), "350m": ("gpt2-350m", 16), "1.5b": ("gpt2-1.5b", 8)}
VARIANTS = {
    "plain GPT": None,
    "ours": {"attention_deterministic": False},
    "ours, deterministic": {},
    "ours, all kernels": {"attention_deterministic": False, "kernels": "triton"},
    "ours, loss kernel only": {"attention_deterministic": False, "kernels": "loss"},
    "ours, sdpa": {"attention": "sdpa"},
    "reference": {"attention": "reference", "kernels": "reference"},
}


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


def step_row(size: str, variant: str, context: int = CONTEXT, batch: int = 0, compiled: bool = True) -> dict:
    """Time, tokens a second and memory of one model's training step."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from groundup.config import size as named
    from groundup.model import TransformerLM, count_parameters
    from groundup.optim import AdamW

    name, usual = SIZES[size]
    batch = batch or usual
    config = replace(named(name), vocab_size=VOCAB, context_length=context)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    options = VARIANTS[variant]
    if options is None:
        model = plain_gpt(config.d_model, config.n_layers, config.n_heads).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    else:
        model = TransformerLM(replace(config, **options).resolve()).cuda()
        optimizer = AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    forward = torch.compile(model) if compiled else model
    ids = torch.randint(VOCAB, (batch, context + 1), device="cuda")
    marks = []
    for index in range(29):
        if index == 8:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss = forward(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in pairwise(marks[8:]))
    parameters = count_parameters(model)
    attention = 6 * config.n_layers * context * config.d_model  # 2 products, forward + 2 × backward, causal half
    flops = 6 * (parameters - (context * config.d_model if options is None else 0)) + attention
    return {
        "size": size, "variant": variant, "context": context, "batch": batch, "compiled": compiled, "ms": ms,
        "tokens_per_second": batch * context / ms * 1e3, "parameters": parameters,
        "mfu": flops * batch * context / ms * 1e3 / 989e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": float(loss.detach()),
    }  # fmt: skip


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
        if section in SIZES:
            for variant in [name for name in VARIANTS if name != "reference"]:
                yield "step_row", [section, variant]
        elif section == "memory":
            for context, batch in ((512, 32), (1024, 16), (2048, 8)):
                for variant in ("reference", "ours, all kernels"):
                    yield "step_row", ["124m", variant, context, batch, False]
        elif section == "losses":
            for variant in ("reference", "kernels", "kernels, fast backward"):
                yield "losses_row", [variant]


def main() -> None:
    if sys.argv[1] == "--job":
        print("ROW " + json.dumps(globals()[sys.argv[2]](*json.loads(sys.argv[3]))), flush=True)
        return
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for function, arguments in jobs(sys.argv[2:] or ["124m", "350m", "memory", "losses"]):
        command = [sys.executable, __file__, "--job", function, json.dumps(arguments)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=150)
            lines = [line[4:] for line in run.stdout.splitlines() if line.startswith("ROW ")]
            error = (run.stderr.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            lines, error = [], "over 150 s"
        rows.append(json.loads(lines[0]) if lines else {"job": arguments, "FAILED": error})
        print(rows[-1], flush=True)
        (out / "train.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
