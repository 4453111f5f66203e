"""What a training run needs besides the model's shape: data, optimizer, loop."""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from groundup.config.model import ModelConfig
from groundup.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, in which order."""

    path: str = ""
    """Directory written by `groundup tokenize`."""
    order: Literal["shuffled", "random"] = "shuffled"
    """shuffled: each window once per epoch, in a keyed random order. random: uniformly random starts."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warm-up and a cosine decay."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """The learning rate at the last step as a fraction of the peak."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on every matrix (norm gains are not decayed)."""
    grad_clip: float = 1.0
    """Largest global L2 norm of the gradients; 0: no clipping."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 0
    """Optimizer steps. Give exactly one of steps and tokens."""
    tokens: int = 0
    """Training tokens; the steps are derived, rounded up."""
    micro_batch_size: int = 0
    """Sequences a device sees at once; 0: derived from the other two (32 where neither says)."""
    grad_accumulation: int = 0
    """Micro-batches a device sums before a step; 0: derived."""
    global_batch_size: int = 0
    """Sequences a step, over all devices: micro batch × accumulation × world size; 0: derived."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: cuda where there is one."""
    precision: Literal["auto", "fp32", "bf16-mixed"] = "auto"
    """bf16-mixed: fp32 weights, bf16 autocast. auto: bf16-mixed on a GPU that has it, else fp32."""
    compile: bool = False
    """Whether torch.compile compiles the model."""
    eval_every: int = 200
    """Steps between evaluations on the validation tokens (also after the last step); 0: never."""
    eval_batches: int = 20
    """Validation batches an evaluation reads, the same ones each time; 0: all."""
    save_every: int = 500
    """Steps between checkpoints (also after the last step); 0: only after the last step."""
    keep_last: int = 2
    """Newest checkpoints kept; 0: all."""

    def resolve(self, context_length: int, world_size: int = 1) -> "TrainConfig":
        """Fill in the missing batch size and the steps. Raises UserError with the nearest legal values."""
        for name in ("steps", "tokens", "eval_every", "eval_batches", "save_every", "keep_last"):
            if getattr(self, name) < 0:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"train.seed is {self.seed}; it must be in [0, 2^63)")
        config = replace(self, **_resolve_batch(self, world_size))
        if not self.steps and not self.tokens:
            raise UserError("give exactly one of train.steps and train.tokens; neither is given")
        steps = ceil(self.tokens / (config.global_batch_size * context_length)) if self.tokens else self.steps
        # A resolved configuration holds both, in agreement.
        if self.steps and self.steps != steps:
            raise UserError(
                f"give exactly one of train.steps and train.tokens; both are given, and {self.tokens} tokens make "
                f"{steps} steps, not {self.steps}: set the other to 0"
            )
        return replace(config, steps=steps)


def _resolve_batch(train: TrainConfig, world_size: int) -> dict[str, int]:
    """The three batch sizes, the missing ones derived: global = micro × accumulation × world size."""
    micro, accumulation, total = train.micro_batch_size, train.grad_accumulation, train.global_batch_size
    for name in ("micro_batch_size", "grad_accumulation", "global_batch_size"):
        if getattr(train, name) < 0:
            raise UserError(f"train.{name} is {getattr(train, name)}; it must not be negative")
    if not total:
        micro, accumulation = micro or 32, accumulation or 1
        total = micro * accumulation * world_size
    elif micro:
        _divides(total, micro * world_size, f"micro_batch_size {micro}", world_size)
        accumulation = accumulation or total // (micro * world_size)
    else:
        accumulation = accumulation or 1
        _divides(total, accumulation * world_size, f"grad_accumulation {accumulation}", world_size)
        micro = total // (accumulation * world_size)
    if total != micro * accumulation * world_size:
        raise UserError(
            f"train.global_batch_size {total} is not micro_batch_size {micro} × grad_accumulation {accumulation} "
            f"× world size {world_size} = {micro * accumulation * world_size}; leave one of them out"
        )
    return {"micro_batch_size": micro, "grad_accumulation": accumulation, "global_batch_size": total}


def _divides(total: int, part: int, what: str, world_size: int) -> None:
    if total % part == 0:
        return
    below, above = total // part * part, (total // part + 1) * part
    legal = f"{below} and {above}" if below else f"{above}"
    raise UserError(
        f"train.global_batch_size {total} is not divisible by {what} × world size {world_size} = {part}; "
        f"the nearest legal global batch sizes: {legal}"
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything that reproduces a run; `config.toml` in a run's directory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def resolve(self, vocab_size: int = 0, world_size: int = 1) -> "RunConfig":
        """Every derived field filled in, everything checked. Raises UserError."""
        model = self.model.resolve(vocab_size)
        train = self.train.resolve(model.context_length, world_size)
        _check_optim(self.optim)
        return replace(self, model=model, train=train)


def _check_optim(optim: OptimConfig) -> None:
    if not optim.lr > 0:
        raise UserError(f"optim.lr is {optim.lr}; it must be positive")
    for name in ("min_lr_ratio", "warmup_steps", "eps", "weight_decay", "grad_clip"):
        if not getattr(optim, name) >= 0:
            raise UserError(f"optim.{name} is {getattr(optim, name)}; it must not be negative")
    for beta in optim.betas:
        if not 0 <= beta < 1:
            raise UserError(f"optim.betas holds {beta}; each must be in [0, 1)")
