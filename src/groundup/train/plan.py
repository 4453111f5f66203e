"""What a run derived and how, said before the first step."""

from dataclasses import dataclass, field

from groundup.config import RunConfig
from groundup.train.world import World


@dataclass(frozen=True)
class Plan:
    """The numbers of a run that a person wants to see before it starts."""

    config: RunConfig
    world: World
    parameters: int
    device: str
    train_tokens: int
    valid_tokens: int
    train_bytes_per_token: float
    windows_per_epoch: int
    first_step: int
    """The first step that is still to do: 1, or the one after the checkpoint."""
    groups: list[str] = field(default_factory=list)
    """The optimizer's parameter groups, a line each."""
    found: str = ""
    """How the micro-batch was found, where it was looked for."""

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.model.context_length

    def lines(self) -> list[str]:
        """The plan as text, one fact a line."""
        model, train = self.config.model, self.config.train
        batch = (
            f"{train.global_batch_size} sequences = micro-batch {train.micro_batch_size} × accumulation "
            f"{train.grad_accumulation} × world size {self.world.size}; {self.tokens_per_step:,} tokens a step"
        )
        return [
            f"model      {self.parameters:,} parameters: {model.n_layers} layers, d_model {model.d_model}, "
            f"{model.n_heads} heads, d_ff {model.d_ff}, context {model.context_length}, "
            f"vocabulary {model.vocab_size:,}",
            f"device     {self.device}, {train.precision}{self._compiled()}",
            f"batch      {batch}",
            *([f"parallel   {self._parallel()}"] if self.world.size > 1 else []),
            *([f"           {self.found}"] if self.found else []),
            f"steps      {self._steps()}",
            f"data       {self._epochs()}",
            f"optimizer  {self._schedule()}",
            *(f"           {group}" for group in self.groups),
        ]

    def _compiled(self) -> str:
        train = self.config.train
        return f", compiled ({train.compile_unit})" if train.compile else ""

    def _parallel(self) -> str:
        parallel = self.config.parallel
        state = "optimizer state sharded" if parallel.optimizer == "zero1" else "optimizer state whole"
        weights = "weights, gradients and state sharded" if "fsdp" in parallel.data else f"weights whole, {state}"
        return f"{self.world.size} processes, {parallel.data}: {weights}"

    def _steps(self) -> str:
        train = self.config.train
        total = train.steps * self.tokens_per_step
        if train.tokens:
            source = f" = {train.tokens:,} tokens / {self.tokens_per_step:,} a step, rounded up"
        else:
            source = f"; {total:,} tokens"
        rest = f", going on at step {self.first_step:,}" if self.first_step > 1 else ""
        if self.first_step > train.steps:
            rest = ", all of them done"
        return f"{train.steps:,}{source}{rest}"

    def _schedule(self) -> str:
        optim, steps = self.config.optim, self.config.train.steps
        if optim.warmup_steps > steps:
            reached = optim.lr * steps / optim.warmup_steps
            return f"lr rising to {reached:g} only: the warm-up of {optim.warmup_steps} steps is longer than the run"
        after = {
            "cosine": f"a cosine to {optim.lr * optim.min_lr_ratio:g}",
            "linear": f"a line to {optim.lr * optim.min_lr_ratio:g}",
            "wsd": f"constant, over the last {optim.decay_share:.0%} a line to {optim.lr * optim.min_lr_ratio:g}",
            "constant": "constant",
        }
        return f"peak lr {optim.lr:g} after {optim.warmup_steps} steps, then {after[optim.schedule]}"

    def _epochs(self) -> str:
        config = self.config
        per_epoch = self.windows_per_epoch * config.model.context_length
        seen = config.train.steps * self.tokens_per_step / per_epoch
        order = "epochs" if config.data.order == "shuffled" else "times as many drawn at random"
        return (
            f"{self.train_tokens:,} training tokens ({per_epoch:,} an epoch): {seen:.2f} {order}; "
            f"{self.valid_tokens:,} validation tokens"
        )
