"""Tokens a second of generation: the prefill of a prompt and the steps after it, beside the memory-bandwidth bound.

Random weights and prompts, greedy, the functions that `groundup generate` runs (engine.py, decode.py). A step is
everything between two tokens of a user, by the host's clock: the model, the draw, the token on the host, and of a step
that ran ahead what was left of it when the token before it had arrived.

A step cannot be faster than memory: it reads every weight that multiplies a token once, and the keys and values of
every token held. The bound is these bytes (account/) over the bandwidth of the account's entry for the GPU;
`bound_fraction` is bound / measured. It counts what must be read, not what this implementation reads. There is no bound
for a device that the account does not know, CPUs among them, unless --hardware names one.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from groundup.account import GPUS, gpu
from groundup.account import parameters as parameter_counts
from groundup.account.memory import kv_cache_bytes
from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, at_least, grid, numbers, shapes, words
from groundup.bench.cells import Parameters
from groundup.bench.check import hardware_of
from groundup.bench.environment import environment
from groundup.bench.harness import summary, time_arrivals, time_steps
from groundup.bench.sweep import resolve_device
from groundup.config import ModelConfig
from groundup.config.model import HOW
from groundup.errors import UserError
from groundup.generate.cache import KVCache
from groundup.generate.decode import CompiledDecode
from groundup.generate.engine import checked_tokens, greedy_step, inference, prefill, step
from groundup.model import TransformerLM

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16-weights": torch.bfloat16}
SHAPE = tuple(field.name for field in fields(ModelConfig) if field.name not in HOW)


@dataclass(frozen=True)
class Options(SweepOptions):
    size: str = "gpt2-124m"
    """Named sizes, e.g. tiny,stories-17m,gpt2-124m; a wrong name lists them all."""
    config: str = ""
    """TOML file of a run whose [model] is measured instead of the named sizes."""
    prompt: str = "512"
    """Tokens of a prompt; the rows of a batch have the same length."""
    batch: str = "1,64"
    """Prompts at once."""
    precision: str = "bf16-weights"
    """fp32, tf32, bf16-weights (the whole model cast to bfloat16, as one does for generation)."""
    compile: str = "no"
    """no, yes: whether the step of one token is compiled (and recorded as a CUDA graph)."""
    warmup: int = 3
    """Untimed prefills, and untimed steps, before the timed ones."""
    prefills: int = 5
    """Timed prefills."""
    steps: int = 50
    """Timed steps."""
    hardware: str = ""
    """GPU of the account's table whose bandwidth is the bound; empty: the one measured on, its measured peak."""


def cells(options: Options) -> list[Parameters]:
    """Every combination; precision and size are the outer loops. Raises UserError for too short a context."""
    for value, flag in ((options.warmup, "--warmup"), (options.prefills, "--prefills"), (options.steps, "--steps")):
        at_least(value, flag, 1)
    if options.hardware:
        gpu(options.hardware)  # refuses an unknown name
    found = []
    fixed = {name: getattr(options, name) for name in ("warmup", "prefills", "steps", "hardware", "seed")}
    for cell in grid(
        fixed | {"device": resolve_device(options.device)},
        compile=words(options.compile, "--compile", ("no", "yes")),
        precision=words(options.precision, "--precision", tuple(DTYPES)),
        shape=shapes(options.size, options.config).items(),
        batch_size=numbers(options.batch, "--batch"),
        prompt_tokens=numbers(options.prompt, "--prompt"),
    ):
        name, shape = cell.pop("shape")
        _check_room(name, shape, cell["prompt_tokens"] + options.warmup + options.steps, options)
        found.append({"size": name} | {field: getattr(shape, field) for field in SHAPE} | cell)
    return found


def _check_room(name: str, shape: ModelConfig, tokens: int, options: Options) -> None:
    if tokens > shape.context_length:
        most = shape.context_length - options.warmup - options.steps
        advice = f"--prompt at most {most}" if most > 0 else "fewer --steps"
        raise UserError(
            f"prompt, warm-up and steps are {tokens} tokens, but {name} has a context of {shape.context_length}: "
            f"give {advice}"
        )


class Subject:
    """The model and its prompts; one place in which to generate."""

    def __init__(self, parameters: Parameters, device: torch.device):
        precision = str(parameters["precision"])
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        given: dict[str, Any] = {name: parameters[name] for name in SHAPE}
        with torch.device(device):
            model = TransformerLM(ModelConfig(**given).resolve())
            model.init_weights(int(parameters["seed"]))
            shape = int(parameters["batch_size"]), int(parameters["prompt_tokens"])
            self.prompts: list[list[int]] = torch.randint(model.config.vocab_size, shape).tolist()
        self.model = model.to(DTYPES[precision]).eval()
        self.modules = list(self.model.modules())
        self.rows = len(self.prompts)
        self.tokens = [0] * self.rows
        self.cache = KVCache(model.config, self.rows, DTYPES[precision], device)
        compiled = parameters["compile"] == "yes"
        self.compiled = CompiledDecode(self.model, self.cache) if compiled else None

    def prefill(self, mark: Callable[[str], None]) -> None:
        """The prompts through the model, and their first tokens."""
        with inference(self.modules):
            self._draw(prefill(self.model, self.cache, range(self.rows), self.prompts))
        mark("prefill")

    def step(self) -> None:
        """One more token for every row."""
        with inference(self.modules):
            if self.compiled is None:
                self._draw(step(self.model, self.cache, self.tokens))
            else:
                self.tokens = greedy_step(self.cache, self.tokens, self.compiled)

    def _draw(self, logits: torch.Tensor) -> None:
        self.tokens = checked_tokens(logits.argmax(-1), logits)


def run(parameters: Parameters, device: torch.device) -> Measurement:
    """Time of a prefill and of a step, tokens a second of both, and the step's share of the bound."""
    subject = Subject(parameters, device)
    warmup, steps = int(parameters["warmup"]), int(parameters["steps"])
    first = time_steps(subject.prefill, warmup, int(parameters["prefills"]), device)
    then = time_arrivals(subject.step, warmup, steps, device)
    metrics: dict[str, Any] = {
        "time.prefill": summary(first.phases["prefill"]),
        "time.step": summary(then.phases["total"]),
        "memory.read_per_step": step_bytes(subject.model.config, parameters, warmup),
        "memory.kv_cache": kv_cache_bytes(
            subject.model.config, subject.rows, subject.model.config.context_length, subject.cache.keys.element_size()
        ),
    }
    tokens = subject.rows * int(parameters["prompt_tokens"])
    metrics["prefill_tokens_per_second"] = tokens / metrics["time.prefill"]["median"] * 1e3
    metrics["tokens_per_second"] = subject.rows / metrics["time.step"]["median"] * 1e3
    metrics["tokens_per_second_per_row"] = 1e3 / metrics["time.step"]["median"]
    name = str(parameters["hardware"]) or hardware_of({"environment": environment(device)})
    bound = metrics["memory.read_per_step"] / GPUS[name].bandwidth_gb_s / 1e6 if name else None
    metrics["time.bound"] = bound
    metrics["bound_fraction"] = None if bound is None else bound / metrics["time.step"]["median"]
    notes = {} if name else {"bound": "the account has no bandwidth for this device; --hardware names one"}
    stamp = {"dtype": str(DTYPES[str(parameters["precision"])]).removeprefix("torch."), "grad_mode": "inference"}
    stamp |= {"step": "steady", "bound_of": name or "none"}
    stamp |= then.stamp | {"method": f"prefill {first.method}; step {then.method}"}
    return Measurement(metrics, stamp, notes)


def step_bytes(config: ModelConfig, cell: Parameters, warmup: int) -> int:
    """Bytes that a timed step must read, mean over the timed steps: every matrix and gain once, each row's embedding,
    and keys and values of the tokens held, the new one included."""
    table, itemsize = parameter_counts(config), DTYPES[str(cell["precision"])].itemsize
    rows = int(cell["batch_size"])
    weights = table["matrix"] + table["norms"] + rows * config.d_model
    held = int(cell["prompt_tokens"]) + warmup + (int(cell["steps"]) + 1) / 2
    return weights * itemsize + round(kv_cache_bytes(config, rows, 1, itemsize) * held)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda cell: (cell["size"], cell["precision"], cell["compile"]),
    columns={
        "prefill, ms": "time.prefill",
        "prefill tokens/s": "prefill_tokens_per_second",
        "step, ms": "time.step",
        "tokens/s": "tokens_per_second",
        "bound, ms": "time.bound",
        "of the bound": "bound_fraction",
    },
    hidden=(*SHAPE, "hardware"),
    plot_x="batch_size",
    plot_y="tokens_per_second",
)
