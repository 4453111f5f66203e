"""Where a run computes and in which precision; what is applied to the model from outside.

mode         weights, gradients   matrix products   optimizer state     loss scaled
fp32         float32              float32           float32             no
tf32         float32              TF32 (GPU)        float32             no
bf16-mixed   float32              bfloat16          float32             no
fp16-mixed   float32              float16           float32             yes (LossScaler)
bf16-pure    bfloat16             bfloat16          see optim/base.py   no

The mixed modes use autocast; the few products that stay in float32 there may use TF32. Under fp32, TF32 is off. Norms,
softmax and loss are computed in float32 at least in every mode; the residual stream between them is bfloat16 in both
bf16 modes (model/transformer.py), float32 in the others.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from groundup.config import TrainConfig
from groundup.errors import UserError

Precision = Literal["auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-pure"]
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
AMPERE = 8
"""Major compute capability of the first GPUs with TF32."""
GROWTH, BACKOFF, LARGEST = 2.0, 0.5, 2.0**24
"""Of the loss scale."""


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device that exists. Raises UserError when there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device is "cuda", but PyTorch sees no CUDA device here; use "cpu" or "auto"')
    return torch.device(name)


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """`auto` as bf16-mixed on a GPU with bfloat16 units, else fp32; other names as they are.

    Raises UserError for tf32 where no unit computes in it: the name would promise what does not happen.
    """
    if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE):
        raise UserError('train.precision is "tf32", which needs a GPU of compute capability 8.0; use "fp32" or "auto"')
    if name != "auto":
        return name
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "fp32"


def concrete(train: TrainConfig, world_size: int = 1) -> TrainConfig:
    """The same configuration with `auto` replaced by what this machine gives, so that the saved one reproduces it."""
    device = choose_device(train.device)
    kind = "cuda" if device.type == "cuda" else "cpu"
    unit = train.compile_unit
    if unit == "auto":
        unit = "model" if world_size == 1 else "blocks"
    return replace(train, device=kind, precision=choose_precision(train.precision, device), compile_unit=unit)


def is_recorded(train: TrainConfig, device: torch.device, world_size: int) -> bool:
    """Whether steps are recorded as CUDA graphs: auto means those of a compiled run on one GPU.

    Raises UserError where that is asked for and cannot be.
    """
    here = f"{world_size} processes" if world_size > 1 else "" if device.type == "cuda" else "the CPU"
    if here and train.cuda_graph == "on":
        raise UserError(f'train.cuda_graph "on" records the steps of one GPU, and this run is on {here}; use "auto"')
    return not here and (train.cuda_graph == "on" or (train.cuda_graph == "auto" and train.compile))


def set_matmul_precision(precision: str) -> None:
    """Set this process's policy for float32 products (see the module's docstring)."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


@contextmanager
def matmul_precision_kept() -> Generator[None]:
    """The policy for float32 products at the end is that of the beginning: a call does not change its caller's."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context of a forward pass: products in half precision under the mixed modes, no change under the others."""
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def cast_weights(model: nn.Module, precision: str) -> None:
    """Give the model the weights of the mode: bfloat16 under bf16-pure, as they are under the others."""
    if precision == "bf16-pure":
        model.to(torch.bfloat16)


def compiled_unit(train: TrainConfig, world_size: int) -> str:
    """What is compiled at once; "" where nothing is. With several processes it is always blocks: compiled as a whole,
    backward would give all gradients at its end and no communication could overlap.
    """
    return "" if not train.compile else "blocks" if world_size > 1 else train.compile_unit


def prepared(model: nn.Module, unit: str) -> Callable[..., Any]:
    """What the training step calls: the model, compiled as `unit` (compiled_unit) says.

    The compiled code shares the model's parameters. Saving, loading and evaluating use the model itself, so no
    `_orig_mod.` enters a checkpoint and an evaluation's shapes never compile a second time.
    """
    if not unit:
        return model
    if unit != "blocks":
        return torch.compile(model)
    for block in cast(nn.ModuleList, model.layers):
        _compile_training(block)
    return model


def _compile_training(block: nn.Module) -> None:
    """Compile a block's forward where gradients are recorded; without them (evaluation, sampling) it stays plain.

    All blocks run one function, whose weights are inputs of the compiled graph, so they share one compilation. Hooks
    around the block (FSDP's) stay outside of it.
    """
    plain, compiled = block.forward, torch.compile(block.forward)
    block.forward = lambda *args: (compiled if torch.is_grad_enabled() else plain)(*args)


def describe(device: torch.device) -> str:
    """The device's name for people."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2); not `enabled`, no method does anything.

    float16 ends at 65504 and below 6e-8: small gradients of activations would vanish. So the loss is multiplied by a
    large scale before backward and the gradients divided by it afterwards. A step whose gradients are not finite is
    skipped (guards.py) and halves the scale; `growth_interval` sound steps in a row double it. Scale and count live on
    the device, so nothing waits for them. Powers of two: scaling loses no bit.
    """

    def __init__(
        self, enabled: bool, device: torch.device | str = "cpu", scale: float = 2.0**16, growth_interval: int = 2000
    ):
        self.enabled, self.growth_interval = enabled, growth_interval
        self.scale = torch.tensor(scale, device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Sound steps since the scale last changed."""

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss * self.scale if self.enabled else loss

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, in place; before they are clipped."""
        if self.enabled:
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, sound: Tensor) -> None:
        """`sound`: a scalar, non-zero where every gradient of the step was finite (on all ranks)."""
        if not self.enabled:
            return
        sound = sound.to(self.scale.device).bool()
        self.streak = torch.where(sound, self.streak + 1, 0)
        grown = self.streak >= self.growth_interval
        factor = torch.where(sound, torch.where(grown, GROWTH, 1.0), BACKOFF)
        # In place: a recorded graph reads the scale where it lay.
        self.scale.mul_(factor).clamp_(1.0, LARGEST)
        self.streak.masked_fill_(grown, 0)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it."""
        return {"scale": self.scale.item(), "streak": int(self.streak.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict gave."""
        self.scale.fill_(state["scale"])
        self.streak.fill_(state["streak"])


@contextmanager
def deterministic(enabled: bool) -> Generator[None]:
    """Inside, if `enabled`, the same bits each time, compiled and on a GPU too; not timed yet on a GPU.

    Without it a compiled run on a GPU may differ in last bits from process to process: kernels are chosen by timing
    them, and sums in an order that is not fixed (atomics; the embedding's gradient is the one in a language model) are
    rounded as they come. With it torch takes an algorithm with a fixed order or refuses (the embedding's gradient is
    sorted by id first), cuBLAS gets a workspace of its own, and inductor takes no decision by the clock. Torch would
    also fill every new tensor with NaN, to show what reads memory that nobody wrote; that is off, as it changes no
    result and costs a pass. The settings before come back at the end.

    Enter it before the first matrix product on a GPU: cuBLAS reads its workspace from the environment once.
    """
    if not enabled:
        yield
        return
    import torch._inductor.config as inductor  # costs a second, which only such a run pays

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # a module with a property, which a type checker cannot see
    enabled_before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    before = cudnn.benchmark, inductor.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory, cudnn.benchmark, inductor.deterministic = False, False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled_before)
        memory.fill_uninitialized_memory = filled
        cudnn.benchmark, inductor.deterministic = before
