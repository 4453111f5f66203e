"""Each figure's formula, with its numbers and its source: what `groundup account … --explain` prints."""

from collections import Counter
from dataclasses import dataclass

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


def explain_params(config: ModelConfig) -> list[Line]:
    p = parameters(config)
    V, d, L, f = config.vocab_size, config.d_model, config.n_layers, config.d_ff
    H, Hkv, dh = config.n_heads, config.n_kv_heads, config.d_head
    rows = [
        ("embeddings", "V·d", f"{V}·{d}"),
        ("attention.q", "L·d·(H·dₕ)", f"{L}·{d}·({H}·{dh})"),
        ("attention.k", "L·d·(Hₖᵥ·dₕ)", f"{L}·{d}·({Hkv}·{dh})"),
        ("attention.v", "L·d·(Hₖᵥ·dₕ)", f"{L}·{d}·({Hkv}·{dh})"),
        ("attention.output", "L·(H·dₕ)·d", f"{L}·({H}·{dh})·{d}"),
        ("ffn", "L·3·d·d_ff (gated: w1, w3, w2)", f"{L}·3·{d}·{f}"),
        ("norms", "L·2·d + d", f"{L}·2·{d} + {d}"),
        ("head", "0 (tied to the embeddings)" if config.tie_embeddings else "V·d", f"{p['head']}"),
        ("total", "sum of the above", " + ".join(f"{p[k]}" for k in ("embeddings", "norms", "head")) + " + matrices"),
    ]
    lines = [Line(f"parameters.{k}", formula, numbers, f"{p[k]:,}", "definition") for k, formula, numbers in rows]
    two = parameters(ungated(config))["total"]
    source = "GPT-2's feed-forward (Radford et al. 2019) at the same d_ff"
    lines.append(
        Line("parameters.ungated.total", "total - L·d·d_ff", f"{p['total']} - {L}·{d}·{f}", f"{two:,}", source)
    )
    return lines


def explain_flops(config: ModelConfig, setting: Setting) -> list[Line]:
    rows = []
    for p in matrix_products(config, setting.batch, setting.context, setting.attention):
        half = " · 1/2 (the causal half)" if p.executed != 1 else ""
        rows.append(
            Line(
                f"flops.forward: {p.name}",
                f"2 · count · batch · m · k · n{half}",
                f"2 · {p.count} · {p.batch} · {p.m} · {p.k} · {p.n}{half}",
                f"{p.forward_flops:,} FLOP = {p.forward_flops // 2:,} MAC; backward {p.backward_factor:g} ×",
                "a multiply-add is two FLOP, as torch.utils.flop_counter has it",
            )
        )
    matrix, tokens = parameters(config)["matrix"], setting.batch * setting.context
    L, d, T = config.n_layers, config.d_model, setting.context
    rows.append(
        Line(
            "flops.convention",
            "tokens · (6·N + 12·L·d·T), N = matrices incl. head, without embedding and gains",
            f"{tokens} · (6·{matrix} + 12·{L}·{d}·{T})",
            f"{tokens * convention_per_token(config, T):,} FLOP",
            "Chowdhery et al. 2022 (PaLM), appendix B",
        )
    )
    return rows


def explain_memory(config: ModelConfig, step: Step, table: dict[str, int]) -> list[Line]:
    setting, P = step.setting, parameters(config)["total"]
    item = ITEMSIZE[setting.weights]
    two = f"2 · {item} · {P}" if table["optimizer"] else "0 (no optimizer in this mode)"
    lines = [
        Line("memory.parameters", "bytes a number · P", f"{item} · {P}", sizes(table["parameters"]), "definition"),
        Line(
            "memory.gradients",
            "as the parameters, after backward",
            f"{item} · {P}" if table["gradients"] else "0 (no backward in this mode)",
            sizes(table["gradients"]),
            "definition",
        ),
        Line("memory.optimizer", "two moments, as the parameters", two, sizes(table["optimizer"]), "AdamW's state"),
        Line(
            "memory.activations",
            "Σ count · shape · bytes, over what autograd keeps, each piece of memory once",
            " + ".join(_shapes(step)),
            sizes(table["activations"]),
            f"{CODE}; {MEGATRON}",
        ),
        Line(
            "memory.kv_cache",
            "2 · L · batch · Hₖᵥ · T · dₕ · bytes (generation; not part of the peak)",
            f"2 · {config.n_layers} · {setting.batch} · {config.n_kv_heads} · {setting.context} · {config.d_head}"
            f" · {2 if setting.precision.startswith('bf16') else 4}",
            sizes(table["kv_cache"]),
            "definition",
        ),
        Line(
            "memory.workspace",
            "cuBLAS, one for each thread that multiplies (forward's, backward's)",
            f"{table['workspace'] / 2**20 / max(1, setting.workspace_mib):.0f} · {setting.workspace_mib} MiB",
            sizes(table["workspace"]),
            "torch's CUBLAS_WORKSPACE_CONFIG default",
        ),
    ]
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
    """count · (shape) · bytes of the saved tensors, the largest group first."""
    groups = Counter((t.shape, t.dtype, t.bytes) for t in step.saved)
    rows = sorted(groups.items(), key=lambda item: -item[1] * item[0][2])
    return [f"{n}·{'×'.join(map(str, shape)) or '1'}·{ITEMSIZE[dtype]}" for (shape, dtype, _), n in rows]


def explain_throughput(step: Step, gpu: Gpu, costs: Costs, table: dict[str, float]) -> list[Line]:
    precision = step.setting.precision
    lines = [_kernel_line(step, gpu, costs), *_rate_lines(gpu, precision)]
    for name, time in phase_times(step.kernels, gpu, precision, costs).items():
        lines.append(
            Line(
                f"time.{name}",
                "Σ time of matrix products + Σ time of the rest + the device's wait for the host, kernel by kernel: "
                "end = max(end of the one before, issued by the host) + time",
                f"{time.matmul:.3f} + {time.elementwise:.3f} + {time.idle:.3f} ms ({time.kernels} kernels, "
                f"{time.flops:,} FLOP, {time.bytes:,} B); the host issues {time.issued} operations in "
                f"{time.issued} · {costs.launch_us:g} µs = {time.launch:.3f} ms",
                f"{time.total:.3f} ms",
                "two queues, host and device (throughput.py)",
            )
        )
    lines.append(
        Line(
            "mfu",
            "convention FLOP of the step / time / peak",
            f"{table['mfu'] * table['step'] * gpu.matmul_tflops(precision) * 1e9:.4g} / {table['step']:.3f} ms / "
            f"{gpu.matmul_tflops(precision):g} TFLOP/s",
            f"{table['mfu']:.1%}",
            "Chowdhery et al. 2022 (PaLM), appendix B",
        )
    )
    return lines


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
    return [
        Line(
            "rate of matrix products",
            "peak of the precision",
            f"{gpu.matmul_tflops(precision):g} TFLOP/s",
            f"{gpu.matmul_tflops(precision) / gpu.multiprocessors:.3f} TFLOP/s a multiprocessor",
            gpu.source,
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
