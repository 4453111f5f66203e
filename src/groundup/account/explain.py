"""Each figure's formula, with its numbers and its source: what `groundup account … --explain` prints."""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from math import prod

from groundup.account.device import EVEN, FOREACH, UNEVEN, Costs, kernel_ms
from groundup.account.flops import convention_per_token, matrix_products
from groundup.account.hardware import Gpu
from groundup.account.memory import Setting, Step
from groundup.account.params import parameters, ungated
from groundup.account.tape import ITEMSIZE
from groundup.account.throughput import phase_times
from groundup.config import ModelConfig

CODE = "read off the model's code, held to it by test"
MEGATRON = "compare Korthikanti et al. 2022 (arXiv 2205.05198), whose 34·s·b·h + 5·a·s²·b holds for GELU and dropout"
MEMORY = {
    "parameters": "weights",
    "gradients": "after backward",
    "optimizer": "AdamW's two moments",
    "buffers": "rotary angles",
    "inputs": "ids and targets",
    "tensors": "all of the above",
    "static": "held between steps, as the allocator counts it (blocks)",
    "activations": "kept by autograd at the end of forward",
    "activations.layer": "of these, one block",
    "activations.scores": "of these, attention weights",
    "logits": "one tensor of logits",
    "workspace": "cuBLAS's scratch memory",
    "kv_cache": "for generation; not part of the step",
    "peak_forward": "largest during forward",
    "peak_backward": "largest during backward",
    "peak_optimizer": "largest during the optimizer step",
    "peak": "largest of the steady step (max_memory_allocated)",
    "peak_first_step": "the same for the first step",
    "reserved": "held from the device (memory_reserved)",
}
"""What each key of memory.memory means."""


@dataclass(frozen=True)
class Line:
    """quantity = formula = numbers = value."""

    quantity: str
    formula: str
    numbers: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.quantity} = {self.formula}\n    = {self.numbers}\n    = {self.value}   [{self.source}]"


def line(quantity: str, formula: str, value: str, source: str, note: str = "", **symbols: object) -> Line:
    """A line whose numbers are the formula with the symbols' values in it (dₕ is given as dh); `note` explains them."""
    names = re.compile(r"[^\W\d]\w*")
    numbers = names.sub(lambda name: str(symbols.get(unicodedata.normalize("NFKC", name[0]), name[0])), formula)
    return Line(quantity, f"{formula}   ({note})" if note else formula, numbers, value, source)


def explain_params(config: ModelConfig) -> list[Line]:
    p, m, q, gains = parameters(config), 3 if config.gated else 2, 2 if config.qk_norm else 0, config.norm != "none"
    shape = {"V": config.vocab_size, "d": config.d_model, "L": config.n_layers, "d_ff": config.d_ff, "m": m}
    shape |= {"H": config.n_heads, "Hkv": config.n_kv_heads, "dh": config.d_head}
    shape |= {"n": 2 if gains else 0, "q": q, "f": int(config.norm == "pre"), "t": int(not config.tie_embeddings)}
    parts = {name: p[name] for name in ("embeddings", "ffn", "norms", "head")}
    parts["attention"] = sum(value for name, value in p.items() if name.startswith("attention."))
    gpt2 = "GPT-2's feed-forward (Radford et al. 2019) at the same d_ff"
    rows = (
        ("embeddings", "V·d", ""),
        ("attention.q", "L·d·H·dₕ", ""),
        ("attention.k", "L·d·Hₖᵥ·dₕ", ""),
        ("attention.v", "L·d·Hₖᵥ·dₕ", ""),
        ("attention.output", "L·H·dₕ·d", ""),
        ("ffn", "L·m·d·d_ff", "m matrices: 3 with a gate, 2 without"),
        ("norms", "L·(n·d + q·dₕ) + f·d", "gains: n, q of a block and of its QK-norm, f before the head"),
        ("head", "t·V·d", "t: 0 tied to the embeddings, else 1"),
        ("total", "embeddings + attention + ffn + norms + head", ""),
    )
    lines = [line(f"parameters.{k}", text, f"{p[k]:,}", "definition", note, **shape | parts) for k, text, note in rows]
    two, known = parameters(ungated(config))["total"], shape | {"total": p["total"]}
    return [*lines, line("parameters.ungated.total", "total - (m - 2)·L·d·d_ff", f"{two:,}", gpt2, "", **known)]


def explain_flops(config: ModelConfig, setting: Setting) -> list[Line]:
    lines = []
    for p in matrix_products(config, setting.batch, setting.context, setting.attention, setting.kernels):
        part = p.executed != 1
        lines.append(
            line(
                f"flops.forward: {p.name}",
                "2 · count · batch · m · k · n" + " · executed" * part,
                f"{p.forward_flops:,} FLOP = {p.forward_flops // 2:,} MAC; backward {p.backward_factor:g} ×",
                "a multiply-add is two FLOP, as torch.utils.flop_counter has it",
                "executed: the causal half, or 3 with both gradients" * part,
                **vars(p),
            )
        )
    tokens, T = setting.batch * setting.context, setting.context
    convention = line(
        "flops.convention",
        "tokens · (6·N + 12·L·d·T)",
        f"{tokens * convention_per_token(config, T):,} FLOP",
        "Chowdhery et al. 2022 (PaLM), appendix B",
        "N = matrices incl. head, without embedding and gains",
        tokens=tokens,
        N=parameters(config)["matrix"],
        L=config.n_layers,
        d=config.d_model,
        T=T,
    )
    return [*lines, convention]


def explain_memory(config: ModelConfig, step: Step, table: dict[str, int]) -> list[Line]:
    setting = step.setting
    symbols: dict[str, object] = {"P": parameters(config)["total"], "bytes": ITEMSIZE[setting.weights]}
    symbols |= {"L": config.n_layers, "batch": setting.batch, "Hkv": config.n_kv_heads, "T": setting.context}
    symbols |= {"dh": config.d_head, "item": setting.activation_bytes, "size": setting.workspace_mib}
    symbols["threads"] = round(table["workspace"] / 2**20 / max(1, setting.workspace_mib))
    rows = (
        ("parameters", "bytes · P", "definition"),
        ("gradients", "bytes · P" if table["gradients"] else "0", "definition"),
        ("optimizer", "2 · bytes · P" if table["optimizer"] else "0", "AdamW's state"),
        ("kv_cache", "2 · L · batch · Hₖᵥ · T · dₕ · item", "definition"),
        (
            "workspace",
            "threads · size · 2**20",
            "one a thread that multiplies; torch's CUBLAS_WORKSPACE_CONFIG default",
        ),
    )
    lines = [
        line(f"memory.{key}", formula, sizes(table[key]), source, MEMORY[key], **symbols)
        for key, formula, source in rows
    ]
    sum_of = f"Σ count · shape · bytes, each piece of memory once   ({MEMORY['activations']})"
    source, saved = f"{CODE}; {MEGATRON}", " + ".join(_shapes(step)) or "0"
    lines.append(Line("memory.activations", sum_of, saved, sizes(table["activations"]), source))
    name = max((n for n in ("forward", "backward", "optimizer") if n in step.phases), key=lambda n: step.phases[n].peak)
    peak = step.phases[name]
    parts = " + ".join(f"{k} {v / 2**30:.3f}" for k, v in sorted(peak.at_peak.items(), key=lambda kv: -kv[1]) if v)
    lines.append(
        Line(
            "memory.peak",
            f"largest sum of live blocks, in {name}, when {peak.peak_tensor} is allocated",
            f"{parts} GiB",
            sizes(peak.peak),
            "a replay of torch's caching allocator (blocks of 512 B; rests up to 1 MiB stay with a large block)",
        )
    )
    return lines


def _shapes(step: Step) -> list[str]:
    """count · shape · bytes of the saved tensors, the largest first; what keeps a whole tensor counts as that."""
    groups = Counter((t.shape, t.dtype, t.bytes) for t in step.saved)
    rows = sorted(groups.items(), key=lambda item: -item[1] * item[0][2])
    texts = []
    for (shape, dtype, nbytes), n in rows:
        whole = prod(shape) * ITEMSIZE[dtype] != nbytes
        size = nbytes // ITEMSIZE[dtype] if whole else "×".join(map(str, shape)) or "1"
        texts.append(f"{n}·{size}·{ITEMSIZE[dtype]}")
    return texts


def explain_throughput(step: Step, gpu: Gpu, costs: Costs, table: dict[str, float]) -> list[Line]:
    precision = step.setting.precision
    lines = [_kernel_line(step, gpu, costs), *_rate_lines(gpu, precision)]
    for name, time in phase_times(step.kernels, gpu, precision, costs).items():
        parts = {"products": time.matmul, "others": time.elementwise, "waiting": time.idle}
        lines.append(
            line(
                f"time.{name}",
                "products + others + waiting",
                f"{time.total:.3f} ms",
                "two queues, host and device (throughput.py)",
                "kernel by kernel: end = max(end of the one before, issued by the host) + time; "
                f"{time.kernels} kernels, {time.flops:,} FLOP, {time.bytes:,} B; the host issues {time.issued} "
                f"operations in {time.issued} · {costs.launch_us:g} µs = {time.launch:.3f} ms",
                **{key: f"{value:.3f}" for key, value in parts.items()},
            )
        )
    peak = gpu.matmul_tflops(precision)
    return [
        *lines,
        line(
            "mfu",
            "FLOP / step / peak / 1e9",
            f"{table['mfu']:.1%}",
            "Chowdhery et al. 2022 (PaLM), appendix B",
            "FLOP of the convention; step in ms; peak in TFLOP/s",
            FLOP=f"{table['mfu'] * table['step'] * peak * 1e9:.4g}",
            step=f"{table['step']:.3f}",
            peak=f"{peak:g}",
        ),
    ]


def _kernel_line(step: Step, gpu: Gpu, costs: Costs) -> Line:
    """The largest matrix product of the step, as the example."""
    kernel = max(step.kernels, key=lambda k: k.flops)
    batch, m, k, n = kernel.shape
    return Line(
        f"time of one product, e.g. {kernel.scope}.{kernel.name}",
        "fixed time + ⌈batch · ⌈m/128⌉ · ⌈n/128⌉ · parts / multiprocessors⌉ · 2 · 128² · k / parts / (peak / "
        "multiprocessors), the cheapest of 1, 2, 4, 8 parts of k; at least bytes / bandwidth",
        f"{costs.kernel_us:g} µs; batch {batch}, m {m}, k {k}, n {n}; {gpu.multiprocessors} multiprocessors",
        f"{kernel_ms(kernel, gpu, step.setting.precision, costs.kernel_us):.4f} ms",
        "tile and wave quantisation, NVIDIA's Matrix Multiplication Background guide; tile 128 fits an H200's fp32",
    )


def _rate_lines(gpu: Gpu, precision: str) -> list[Line]:
    peak, sms = gpu.matmul_tflops(precision), gpu.multiprocessors
    return [
        line(
            "rate of matrix products",
            "peak / multiprocessors",
            f"{peak / sms:.3f} TFLOP/s a multiprocessor",
            gpu.source,
            f"peak of {precision} in TFLOP/s",
            peak=f"{peak:g}",
            multiprocessors=sms,
        ),
        Line(
            "rate of passes over memory",
            "share · bandwidth (decimal GB/s)",
            f"{EVEN:g} (one shape), {FOREACH:g} (lists of tensors), {UNEVEN:g} (broadcast, reduce, gather) · "
            f"{gpu.bandwidth_gb_s:g}",
            f"{EVEN * gpu.bandwidth_gb_s:.0f}, {FOREACH * gpu.bandwidth_gb_s:.0f}, {UNEVEN * gpu.bandwidth_gb_s:.0f}",
            f"{gpu.source}; shares measured on an H200",
        ),
    ]


def sizes(nbytes: float) -> str:
    """Bytes in both units that circulate: 2**30 and 10**9."""
    return f"{nbytes:,.0f} B = {nbytes / 2**30:.3f} GiB = {nbytes / 1e9:.3f} GB"
