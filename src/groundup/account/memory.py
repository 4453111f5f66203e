"""Memory of a step: what stays, what autograd keeps, where the peak is.

Everything is read off one or two symbolic steps (tape.py, program.py). Bytes of tensors are exact. Peaks are what
torch.cuda.max_memory_allocated reports in eager mode: the caching allocator's blocks, the temporaries of every
operation, and cuBLAS's workspaces, which are counted on a line of their own.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from groundup.account import program
from groundup.account.allocator import PlainAllocator
from groundup.account.params import parameters
from groundup.account.tape import ITEMSIZE, DType, Kernel, Phase, Tape
from groundup.config import ModelConfig
from groundup.errors import UserError


@dataclass(frozen=True)
class Setting:
    """What a step runs on and how."""

    batch: int = 4
    context: int = 0
    """Tokens a sequence; 0: the model's context length."""
    mode: Literal["forward", "forward-backward", "train-step"] = "train-step"
    precision: str = "fp32"
    """fp32, tf32: float32 tensors. bf16-mixed: float32 weights, bf16 autocast, residual stream in bf16; fp16-mixed:
    counted as bf16-mixed, though its residual stream is float32. bf16-pure: weights and state in bf16."""
    attention: Literal["reference", "flash"] = "reference"
    checkpoint_every: int = 0
    """Blocks a checkpointed piece holds; 0: none."""
    grad: bool = False
    """For mode forward: whether autograd records. The other modes always record."""
    loss: bool = True
    """For mode forward: whether the loss is computed; without it the pass ends with the logits."""
    workspace_mib: float = 32
    """cuBLAS's workspace for each thread that multiplies."""
    kernels: Literal["reference", "loss", "triton"] = "reference"
    """Norm, RoPE, SwiGLU and loss in plain operations; the loss alone without full logits; kernels for all."""
    optimizer: Literal["kernel", "tensors", "lists"] = "kernel"
    """AdamW in one kernel; in plain operations a tensor at a time, as on a CPU; on lists of tensors, as cells measured
    before there was a kernel."""

    @staticmethod
    def on_gpu(config: ModelConfig, **fields: Any) -> "Setting":
        """What `config` itself says of attention, kernels and checkpointing, `auto` as on a GPU; the rest as given."""
        attention = "reference" if config.attention == "reference" else "flash"
        kernels = "triton" if config.kernels == "auto" else config.kernels
        how: dict[str, Any] = {"attention": attention, "kernels": kernels}
        how["checkpoint_every"] = config.checkpoint_activations
        return Setting(**(how | fields))

    def checked(self, config: ModelConfig) -> "Setting":
        """The same with the context filled in. Raises UserError naming the offending number."""
        if self.batch < 1:
            raise UserError(f"batch is {self.batch}; it must be at least 1")
        if not 0 <= self.context <= config.context_length:
            most = f"the model's context length {config.context_length}"
            raise UserError(f"context is {self.context}; it must be between 1 and {most}")
        if not 0 <= self.checkpoint_every <= config.n_layers:
            most = f"the model's {config.n_layers} layers"
            raise UserError(f"checkpoint_every is {self.checkpoint_every}; it must be between 0 (none) and {most}")
        return replace(self, context=self.context or config.context_length)

    @property
    def records(self) -> bool:
        return self.grad or self.mode != "forward"

    @property
    def weights(self) -> DType:
        return "bf16" if self.precision == "bf16-pure" else "fp32"

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number that a matrix product makes: 4, or 2 under autocast and in bf16."""
        return 4 if self.precision.endswith("32") else 2


@dataclass(frozen=True)
class SavedTensor:
    """A piece of memory that autograd keeps from forward to backward."""

    name: str
    """Where it was made: layers.3.ffn.sigmoid."""
    saved_by: str
    """The operations that need it in backward."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Step:
    """One step, traced: phases "init", then of the first and of the steady step.

    forward, backward, optimizer, rest (what remains when the step has returned); the first step's are "first.…".
    """

    setting: Setting
    phases: dict[str, Phase]
    kernels: list[Kernel]
    saved: list[SavedTensor]
    workspace: int
    inputs: int
    buffers: int


def trace(config: ModelConfig, setting: Setting, plain: bool = False, steps: int = 2) -> Step:
    """Run `steps` symbolic steps and report the last.

    Two make the steady state: in the first one the optimizer's state is still to come, and takes the blocks that the
    activations left. `plain`: bytes as asked for instead of the CUDA allocator's blocks.
    """
    setting = setting.checked(config)
    workspace = 0 if plain else int(setting.workspace_mib * 2**20)
    tape = Tape(setting.precision.endswith("mixed"), workspace, PlainAllocator() if plain else None)
    if plain or setting.weights != "fp32":  # what the kernel does not take
        setting = replace(setting, optimizer="tensors")
    model = program.build(tape, config, setting)
    shape = (setting.batch, setting.context)
    ids, targets = (tape.empty(shape, "int64", name, "inputs") for name in ("ids", "targets"))
    optimizer = program.AdamW(model) if setting.mode == "train-step" else None
    saved: list[SavedTensor] = []
    start = 0
    for step in range(steps):
        prefix = "first." if step < steps - 1 else ""
        start = len(tape.kernels)
        model.zero_grad()
        tape.grad_enabled = setting.records
        tape.enter(f"{prefix}forward")
        out = program.forward(model, ids, targets if setting.loss or setting.mode != "forward" else None)
        saved = saved_tensors(tape) if step == steps - 1 else []
        if setting.mode != "forward":
            tape.enter(f"{prefix}backward")
            tape.backward(out)
        if optimizer is not None:
            tape.enter(f"{prefix}optimizer")
            optimizer.step()
        tape.enter(f"{prefix}rest")
        del out
    tape.finish()
    buffers = sum(angles.nbytes for angles in model.angles)
    return Step(
        setting, tape.phases, tape.kernels[start:], saved, tape.live.get("workspace", 0), 2 * ids.nbytes, buffers
    )


def saved_tensors(tape: Tape) -> list[SavedTensor]:
    """What autograd keeps now, each piece of memory once; parameters, buffers and inputs are there anyway."""
    found: dict[int, list] = {}
    for saved in tape.saved():
        tensor = saved.tensor
        if tensor is None or tensor.storage.kind != "activations":
            continue
        row = found.setdefault(id(tensor.storage), [tensor, []])
        by = f"{saved.scope}.{saved.op}" if saved.scope else saved.op
        if by not in row[1]:
            row[1].append(by)
    return [SavedTensor(t.storage.name, ", ".join(by), t.shape, t.dtype, t.storage.nbytes) for t, by in found.values()]


def kv_cache_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """Keys and values of every layer: 2 · L · batch · Hₖᵥ · context · dₕ numbers."""
    return 2 * config.n_layers * batch * config.n_kv_heads * context * config.d_head * itemsize


def memory(config: ModelConfig, step: Step) -> dict[str, int]:
    """The figures of a traced step under flat keys, in bytes; explain.py says what each key means."""
    setting = step.setting
    count = parameters(config)["total"]
    weights = count * ITEMSIZE[setting.weights]
    trains = setting.mode == "train-step"
    table = {
        "parameters": weights,
        "gradients": weights if setting.mode != "forward" else 0,
        "optimizer": 2 * weights if trains else 0,
        "buffers": step.buffers,
        "inputs": step.inputs,
        "activations": sum(t.bytes for t in step.saved),
        "logits": setting.batch * setting.context * config.vocab_size * setting.activation_bytes,
        "kv_cache": kv_cache_bytes(config, setting.batch, setting.context, setting.activation_bytes),
        "workspace": step.workspace,
    }
    table["tensors"] = sum(table[k] for k in ("parameters", "gradients", "optimizer", "buffers", "inputs"))
    table["static"] = step.phases["rest"].end - step.workspace
    table["activations.layer"] = sum(t.bytes for t in step.saved if t.name.startswith("layers.0."))
    table["activations.scores"] = sum(t.bytes for t in step.saved if ".softmax." in t.name)
    table["after_init"] = step.phases["init"].end
    for name in ("forward", "backward", "optimizer"):
        if name in step.phases:
            table[f"after_{name}"] = step.phases[name].end
            table[f"peak_{name}"] = step.phases[name].peak
    table["peak"] = max(p.peak for n, p in step.phases.items() if n in ("forward", "backward", "optimizer"))
    table["peak_first_step"] = max((p.peak for n, p in step.phases.items() if n.startswith("first.")), default=0)
    table["reserved"] = max(p.peak_reserved for p in step.phases.values())
    return table
