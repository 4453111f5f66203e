"""Tables for people and one flat document for machines, from the account's functions."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from groundup.account.device import Costs
from groundup.account.explain import (
    MEMORY,
    Line,
    explain_flops,
    explain_memory,
    explain_params,
    explain_throughput,
)
from groundup.account.flops import flops, matrix_products
from groundup.account.hardware import Gpu
from groundup.account.memory import Setting, Step, memory, trace
from groundup.account.params import parameters, ungated
from groundup.account.throughput import max_batch, throughput
from groundup.config import ModelConfig

UNITS = {
    "parameters": "numbers",
    "flops": "FLOP; a multiply-add (MAC) is two",
    "memory": "bytes; GiB is 2**30, GB is 10**9",
    "time": "milliseconds",
    "tokens_per_second": "tokens a second, all GPUs",
    "mfu": "share of the GPU's peak in this precision, convention FLOP",
    "cost": "in the currency of the price an hour",
}


@dataclass(frozen=True)
class Table:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Report:
    """`document` is the JSON; `tables` and `lines` (formulas, on request) are for people."""

    document: dict[str, Any]
    tables: list[Table]
    lines: list[Line] = field(default_factory=list)

    def text(self, explain: bool) -> str:
        """The tables, and with `explain` the formulas, as plain text."""
        from tabulate import tabulate

        parts = []
        for table in self.tables:
            body = tabulate(table.rows, table.headers, tablefmt="simple", disable_numparse=True, colalign=_align(table))
            parts.append(f"{table.title}\n\n{body}")
        if explain:
            parts.append("\n".join(map(str, self.lines)))
        return "\n\n".join(parts)


def _align(table: Table) -> list[str]:
    numeric = [all(str(row[i])[:1].isdigit() or row[i] == "" for row in table.rows) for i in range(len(table.headers))]
    return ["right" if n and i else "left" for i, n in enumerate(numeric)]


def _document(command: str, config: ModelConfig, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {key.split(".")[0] for key in values}
    units = {name: unit for name, unit in UNITS.items() if name in groups}
    return {"command": f"account {command}", "config": asdict(config), "units": units, **values, **more}


def _prefixed(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in table.items()}


def _shape_of(config: ModelConfig) -> str:
    tied = ", tied embeddings" if config.tie_embeddings else ""
    return (
        f"d_model {config.d_model}, {config.n_layers} layers, {config.n_heads} heads ({config.n_kv_heads} key-value), "
        f"d_ff {config.d_ff}, vocabulary {config.vocab_size}{tied}"
    )


def _conditions(setting: Setting) -> str:
    pieces = f", checkpoint every {setting.checkpoint_every}" if setting.checkpoint_every else ""
    return (
        f"{setting.mode}, batch {setting.batch}, context {setting.context}, {setting.precision}, "
        f"{setting.attention} attention, kernels {setting.kernels}{pieces}"
    )


# Parameters -----------------------------------------------------------------------------------------------------


def params_report(config: ModelConfig) -> Report:
    """Parameters by component, gated and ungated."""
    table, two = parameters(config), parameters(ungated(config))
    parts = ("embeddings", "attention.q", "attention.k", "attention.v", "attention.output", "ffn", "norms", "head")
    listed = (*parts, "total", "non_embedding", "layer", "tied")
    rows = [(k, f"{table[k]:,}", _percent(table[k] / table["total"]), f"{two[k]:,}") for k in listed]
    headers = ("component", "parameters", "share", "with an ungated ffn")
    values = _prefixed("parameters", table) | {"parameters.ungated.total": two["total"]}
    return Report(
        _document("params", config, values),
        [Table(f"Parameters: {_shape_of(config)}", headers, rows)],
        explain_params(config),
    )


# FLOPs ----------------------------------------------------------------------------------------------------------


def flops_report(config: ModelConfig, setting: Setting) -> Report:
    """Every matrix product with its shape; executed and conventional counts; gated and ungated."""
    setting = setting.checked(config)
    args = (config, setting.batch, setting.context)
    products = matrix_products(*args, setting.attention, kernels=setting.kernels)
    table = flops(*args, setting.attention, setting.checkpoint_every, kernels=setting.kernels)
    rows = [
        (
            *(p.name, p.count, p.batch, f"{p.m} × {p.k} × {p.n}"),
            *(_giga(p.forward_flops), _giga(p.backward_flops), _percent(p.forward_flops / table["forward"])),
        )
        for p in products
    ]
    headers = ("product", "count", "batch", "m × k × n", "forward, GFLOP", "backward, GFLOP", "share")
    totals = [
        ("forward", "executed", _giga(table["forward"])),
        ("backward", "executed", _giga(table["backward"])),
        ("recompute", "executed (activation checkpointing)", _giga(table["recompute"])),
        ("step", "executed: forward + backward + recompute", _giga(table["total"])),
        ("step", "convention: tokens · (6·N + 12·L·d·T)", _giga(table["convention"])),
        ("forward, ungated ffn", "executed, same d_ff", _giga(table["ungated.forward"])),
    ]
    counts = parameters(config)
    values = {"parameters.total": counts["total"], "parameters.matrix": counts["matrix"]} | _prefixed("flops", table)
    listed = [asdict(p) | {"forward_flops": p.forward_flops, "backward_flops": p.backward_flops} for p in products]
    title = f"Matrix products: {_shape_of(config)}; {_conditions(setting)}\nFLOP: a multiply-add (MAC) is two."
    return Report(
        _document("flops", config, values, setting=asdict(setting), products=listed),
        [Table(title, headers, rows), Table("Totals of one step", ("figure", "counted as", "GFLOP"), totals)],
        explain_flops(config, setting),
    )


# Memory ---------------------------------------------------------------------------------------------------------


def memory_report(config: ModelConfig, setting: Setting) -> Report:
    """What a step holds, what autograd keeps, where the peak is."""
    setting = setting.checked(config)
    step = trace(config, setting)
    table = memory(config, step)
    rows = [(f"memory.{k}", *_both(table[k]), text) for k, text in MEMORY.items() if k in table]
    title = f"Memory: {_shape_of(config)}; {_conditions(setting)}\nGiB is 2**30 bytes, GB is 10**9."
    shown = ("end", "peak", "at_peak", "peak_tensor")
    phases = {name: {key: getattr(phase, key) for key in shown} for name, phase in step.phases.items()}
    document = _document(
        "memory",
        config,
        {"parameters.total": parameters(config)["total"]} | _prefixed("memory", table),
        setting=asdict(setting),
        saved=[asdict(t) for t in step.saved],
        phases=phases,
    )
    tables = [Table(title, ("figure", "GiB", "GB", "what it is"), rows)]
    if step.saved:
        tables += [_layers_table(step), _saved_table(step)]
    return Report(document, tables, explain_memory(config, step, table))


def _layers_table(step: Step) -> Table:
    """Activations by part of the model; equal blocks share a row."""
    sums: dict[str, int] = {}
    for t in step.saved:
        words = t.name.split(".")
        part = ".".join(words[:2]) if words[0] == "layers" else words[0]
        sums[part] = sums.get(part, 0) + t.bytes
    rows: list[tuple[str, ...]] = []
    group: list[str] = []
    for part, nbytes in [*sums.items(), ("", -1)]:
        if group and sums[group[0]] != nbytes:
            label = group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}, each"
            rows.append((label, *_both(sums[group[0]]), _percent(sums[group[0]] / sum(sums.values()))))
            group = []
        group.append(part)
    return Table("Activations kept for backward, by part", ("part", "GiB", "GB", "share"), rows)


def _saved_table(step: Step) -> Table:
    """Every piece of memory that autograd keeps of the first block and of what lies outside the blocks."""
    shown = [t for t in step.saved if not t.name.startswith("layers.") or t.name.startswith("layers.0.")]
    rows = [
        (t.name, " × ".join(map(str, t.shape)) or "1", t.dtype, f"{t.bytes:,}", f"{t.bytes / 2**20:.3f}", t.saved_by)
        for t in shown
    ]
    title = "Tensors kept for backward: the first block and what lies outside the blocks (MiB is 2**20 bytes)"
    return Table(title, ("made by", "shape", "dtype", "bytes", "MiB", "kept by"), rows)


# Throughput -----------------------------------------------------------------------------------------------------


def throughput_report(
    config: ModelConfig,
    setting: Setting,
    gpu: Gpu,
    costs: Costs,
    tokens: int = 0,
    dollars_per_hour: float = 0.0,
    gpus: int = 1,
) -> Report:
    """Step time, MFU, days and cost, and the largest batch that fits."""
    setting = setting.checked(config)
    step = trace(config, setting)
    table = throughput(config, step, gpu, costs, tokens, dollars_per_hour, gpus)
    fits = max_batch(config, setting, gpu.memory_gib)
    rows = [
        (
            *(name, *(f"{table[f'{name}.{part}']:.3f}" for part in ("matmul", "elementwise", "idle", "launch"))),
            *(f"{table[f'{name}.kernels']}", f"{table[name]:.3f}"),
        )
        for name in ("forward", "backward", "optimizer")
        if name in table
    ]
    rows.append(("step", "", "", "", "", "", f"{table['step']:.3f}"))
    headers = ("phase", "matrix products", "other kernels", "waiting", "host", "kernels", "time, ms")
    figures = [
        ("tokens a second", f"{table['tokens_per_second']:,.0f}"),
        ("MFU", f"{_percent(table['mfu'])} of {gpu.matmul_tflops(setting.precision):g} TFLOP/s"),
        ("largest batch", f"{fits} in {gpu.memory_gib:g} GiB less 1 GiB for CUDA"),
    ]
    if tokens:
        figures += [
            ("tokens in all", f"{tokens:,}"),
            ("steps", f"{table['steps']:,}"),
            ("days", f"{table['days']:.2f} on {gpus} GPU{'s' if gpus > 1 else ''} without communication"),
            ("cost", f"{table['cost']:,.2f} at {dollars_per_hour:g} a GPU hour"),
        ]
    outside = ("tokens_per_second", "mfu", "steps", "days", "gpu_hours", "cost")
    values: dict[str, Any] = {k if k in outside else f"time.{k}": v for k, v in table.items()}
    values |= {"parameters.total": parameters(config)["total"], "memory.max_batch": fits}
    title = (
        f"Step time on {gpu.name}: {_shape_of(config)}; {_conditions(setting)}\nPeaks: {gpu.source}; milliseconds\n"
        f"time = products + others + waiting for the host, which takes {costs.launch_us:g} µs for an operation"
    )
    more = {"gpu": asdict(gpu), **asdict(costs), "setting": asdict(setting)}
    return Report(
        _document("throughput", config, values, **more),
        [Table(title, headers, rows), Table("In all", ("figure", "value"), figures)],
        explain_throughput(step, gpu, costs, table),
    )


def _both(nbytes: int) -> Iterable[str]:
    return f"{nbytes / 2**30:.3f}", f"{nbytes / 1e9:.3f}"


def _giga(flops: float) -> str:
    return f"{flops / 1e9:,.3f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"
