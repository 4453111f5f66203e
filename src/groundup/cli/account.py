"""`groundup account …`: parameters, FLOPs, memory and time of a model, from its configuration alone."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from groundup.cli.output import emit
from groundup.cli.parse import parse
from groundup.config import ModelConfig, RunConfig, load_toml, size
from groundup.errors import UserError


@dataclass(frozen=True)
class ParamsArgs:
    """Parameters by component."""

    size: str = ""
    """A named size: small, medium, large, xl, 2.7b, 10b, gpt2-124m, …, stories-17m."""
    config: Annotated[Path | None, arg(metavar="FILE")] = None
    """A run's TOML file instead; its [model] counts."""
    vocab_size: int = 0
    """Number of token ids; 0: the configuration's."""
    explain: bool = False
    """Print each formula with its numbers and its source."""
    json: Annotated[str, arg(metavar="[PATH]")] = ""
    """Write the result as JSON; without a path, standard output holds only that."""


@dataclass(frozen=True)
class FlopsArgs(ParamsArgs):
    """Floating-point operations: every matrix product with its shape, forward and backward."""

    batch: int = 4
    """Sequences a step."""
    context: int = 0
    """Tokens a sequence; 0: the configuration's context length."""
    attention: Literal["reference", "flash", "config"] = "reference"
    """reference computes all scores; flash skips what the causal mask hides and keeps no scores; config: what the
    configuration means on a GPU."""
    kernels: Literal["reference", "loss", "triton", "config"] = "reference"
    """reference: plain operations; loss: a cross entropy that never holds all logits; triton: kernels for norm, RoPE
    and SwiGLU as well; config: what the configuration means on a GPU."""
    checkpoint_every: int = 0
    """Blocks a checkpointed piece holds (activation checkpointing); 0: the configuration's."""


@dataclass(frozen=True)
class MemoryArgs(FlopsArgs):
    """Memory of a step: what stays, what autograd keeps (by layer and by tensor), the peak of each phase."""

    mode: Literal["forward", "forward-backward", "train-step"] = "train-step"
    """What a step does."""
    precision: Literal["fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-pure"] = "fp32"
    """bf16-mixed, fp16-mixed: float32 weights under autocast. bf16-pure: weights, gradients and state in bf16."""
    grad: bool = False
    """With mode forward: autograd records (the other modes always do)."""
    gpu: str = "h200-measured"
    """GPU of the account's table."""


@dataclass(frozen=True)
class ThroughputArgs(MemoryArgs):
    """Time of an eager step; MFU, tokens a second, days and cost; the largest batch that fits."""

    launch_us: float = 28.0
    """Microseconds the host needs for one operation in eager mode; measured beside an H200, other hosts differ much."""
    kernel_us: float = 4.5
    """Microseconds that each kernel takes on the device beside its work."""
    tokens: float = 0
    """Tokens to train on (1e9 is allowed); 0: none."""
    price: float = 0.0
    """Price of one GPU hour."""
    gpus: int = 1
    """Number of GPUs; communication is not counted."""


def args_of(word: str) -> type[ParamsArgs]:
    """What `account` with this word takes."""
    return {"params": ParamsArgs, "flops": FlopsArgs, "memory": MemoryArgs, "throughput": ThroughputArgs}[word]


def main(argv: list[str], prog: str) -> int:
    args = parse(args_of(prog.split()[-1]), argv, prog)
    report = _report(args)
    emit(report.document, report.text(args.explain), args.json)
    return 0


def _config(args: ParamsArgs) -> ModelConfig:
    """The model that is asked about; `--context` replaces its context length."""
    if bool(args.size) == bool(args.config):
        raise UserError("give exactly one of --size and --config")
    config = load_toml(args.config, RunConfig).model if args.config else size(args.size)
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)
    if not config.vocab_size:
        raise UserError(f"{args.config} leaves model.vocab_size to the tokenizer; give --vocab-size")
    if isinstance(args, FlopsArgs) and args.context:
        config = replace(config, context_length=args.context)
    return config.resolve()


def _report(args: ParamsArgs):
    from groundup.account import report
    from groundup.account.device import Costs
    from groundup.account.hardware import gpu
    from groundup.account.memory import Setting

    config = _config(args)
    if not isinstance(args, FlopsArgs):
        return report.params_report(config)
    asked = {"attention": args.attention, "kernels": args.kernels, "checkpoint_every": args.checkpoint_every}
    given = {name: value for name, value in asked.items() if value not in ("config", 0)}
    setting = Setting.on_gpu(config, batch=args.batch, context=args.context, **given)
    if not isinstance(args, MemoryArgs):
        return report.flops_report(config, setting)
    device = gpu(args.gpu)
    setting = replace(
        setting,
        mode=args.mode,
        precision=args.precision,
        grad=args.grad,
        workspace_mib=device.cublas_workspace_mib,
    )
    if not isinstance(args, ThroughputArgs):
        return report.memory_report(config, setting)
    for name in ("launch_us", "kernel_us", "tokens", "price"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be a number ≥ 0")
    if args.gpus < 1:
        raise UserError(f"--gpus is {args.gpus}; it must be at least 1")
    costs = Costs(args.launch_us, args.kernel_us)
    return report.throughput_report(config, setting, device, costs, int(args.tokens), args.price, args.gpus)
