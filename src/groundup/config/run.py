"""What a training run needs besides the model's shape: data, optimizer, loop."""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from groundup.config.model import ModelConfig
from groundup.config.optim import OptimConfig
from groundup.config.parallel import ParallelConfig
from groundup.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, in which order."""

    path: str = ""
    """Directory written by `groundup tokenize`."""
    order: Literal["shuffled", "random"] = "shuffled"
    """shuffled: each window once per epoch, in a keyed random order. random: uniformly random starts."""


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
    find_micro_batch: bool = False
    """Whether the micro-batch is the largest part of the given global_batch_size that fits into memory: predicted, then
    tried with a step."""
    memory_gib: float = 0.0
    """GiB of a device that find_micro_batch may plan with; 0: nine tenths of what is free there (on a CPU: half)."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: cuda where there is one."""
    precision: Literal["auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-pure"] = "auto"
    """fp32, tf32: float32 throughout, products exact or in TF32. bf16-mixed, fp16-mixed: float32 weights, products in
    half precision (fp16 with loss scaling). bf16-pure: bf16 weights. auto: bf16-mixed on a GPU that has it, else
    fp32."""
    compile: bool = False
    """Whether torch.compile compiles the model."""
    compile_unit: Literal["auto", "model", "blocks"] = "auto"
    """What is compiled at a time; auto: the model on one process, each block under data parallelism."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Whether a step's forward and backward are recorded and replayed as CUDA graphs, which saves the host's time: most
    of a small model's step. One GPU; auto: where the model is compiled."""
    eval_every: int = 200
    """Steps between evaluations on the validation tokens (also after the last step); 0: never."""
    eval_batches: int = 20
    """Validation batches an evaluation reads, the same ones each time; 0: all."""
    save_every: int = 500
    """Steps between checkpoints (also after the last step); 0: only after the last step."""
    keep_last: int = 2
    """Newest checkpoints kept; 0: all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good, beside keep_last; 0: none."""
    keep_best: bool = False
    """Whether the checkpoint of the lowest validation loss is kept, as `best`; early stopping implies it."""
    early_stopping: int = 0
    """Evaluations without a better validation loss after which the run ends; 0: never."""
    min_delta: float = 0.0
    """Nats a token by which a validation loss must be lower to count as better."""
    max_skipped_steps: int = 10
    """Steps in a row that guards may skip; one more ends the run."""
    spike_window: int = 128
    """Steps whose losses say what a usual loss is."""
    spike_threshold: float = 8.0
    """A loss this many robust standard deviations above the window's median is flagged as a spike; 0: none is."""
    skip_spikes: bool = False
    """Whether a step whose loss is a spike leaves the weights as they are."""
    deterministic: bool = False
    """Deterministic algorithms only, no choice by timing: a compiled run on a GPU then repeats bit for bit, slower."""
    peak_tflops: float = 0.0
    """TFLOP/s that MFU is a share of; 0: the GPU's listed dense peak in the run's precision, on a CPU no MFU."""
    sample_prompt: str = ""
    """Text that the model continues after each evaluation, for people to watch; empty: none."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the rows of metrics.jsonl go as well; each needs its package."""

    def resolve(self, context_length: int, world_size: int = 1) -> "TrainConfig":
        """Fill in the missing batch size and the steps. Raises UserError with the nearest legal values."""
        if not 0 <= self.seed < 2**63:
            raise UserError(f"train.seed is {self.seed}; it must be in [0, 2^63)")
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value >= 0:
                raise UserError(f"train.{name} is {value}; it must not be negative")
        if self.spike_threshold and self.spike_window < 8:
            raise UserError(f"train.spike_window is {self.spike_window}; a median needs at least 8 steps")
        if self.skip_spikes and not self.spike_threshold:
            raise UserError("train.skip_spikes needs a train.spike_threshold above 0; nothing is a spike without one")
        if (self.early_stopping or self.keep_best) and not self.eval_every:
            raise UserError("train.early_stopping and train.keep_best need evaluations: set train.eval_every")
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
    if train.find_micro_batch and not micro and not accumulation:
        if not total:
            raise UserError("train.find_micro_batch divides a given batch; set train.global_batch_size")
        _divides(total, world_size, "micro_batch_size 1", world_size)
        return {}  # train/micro_batch.py fills in the other two
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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def resolve(self, vocab_size: int = 0, world_size: int = 1) -> "RunConfig":
        """Every derived field filled in, everything checked. Raises UserError."""
        model = self.model.resolve(vocab_size)
        train = self.train.resolve(model.context_length, world_size)
        return replace(self, model=model, optim=self.optim.resolve(), train=train, parallel=self.parallel.check())
