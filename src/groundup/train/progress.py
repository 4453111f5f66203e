"""What a run derived and how, said before the first step; what it tells its watcher, and the one for a person.

`Progress` is the protocol: train() calls its methods, each of which does nothing here. `ConsoleProgress` draws one live
line on a terminal, without what a narrow one has no room for; without a terminal (a log file, a batch job) it prints
about twenty plain lines a run.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from groundup.config import RunConfig
from groundup.train.device import compiled_unit, describe
from groundup.train.evaluate import bits_per_byte
from groundup.train.job import Job

PLAIN_LINES = 20


@dataclass(frozen=True)
class Plan:
    """What a person wants to see of a run before it starts."""

    first_step: int
    """The first step that is still to do: 1, or the one after the checkpoint."""
    steps: int
    """Of the whole run."""
    train_bytes_per_token: float
    lines: list[str]
    """One fact a line."""


def make_plan(job: Job, done: int) -> Plan:
    """The plan of a job with `done` steps behind it."""
    config, model, train = job.config, job.config.model, job.config.train
    unit = compiled_unit(train, job.world.size)
    how = (f", compiled ({unit})" if unit else "") + (", steps recorded" if job.graph else "")
    lines = [
        f"model      {job.parameters:,} parameters: {model.n_layers} layers, d_model {model.d_model}, "
        f"{model.n_heads} heads, d_ff {model.d_ff}, context {model.context_length}, vocabulary {model.vocab_size:,}",
        f"device     {describe(job.device)}, {train.precision}{how}",
        f"batch      {train.global_batch_size} sequences = micro-batch {train.micro_batch_size} × accumulation "
        f"{train.grad_accumulation} × world size {job.world.size}; {job.tokens_per_step:,} tokens a step",
        *([f"parallel   {_parallel(job)}"] if job.world.size > 1 else []),
        *([f"           {job.found}"] if job.found else []),
        f"steps      {_steps(job, done + 1)}",
        f"data       {_epochs(job)}",
        f"optimizer  {_schedule(config)}",
        *(f"           {group}" for group in job.groups),
    ]
    return Plan(done + 1, train.steps, job.data.bytes_per_token("train"), lines)


def _parallel(job: Job) -> str:
    parallel = job.config.parallel
    state = "optimizer state sharded" if parallel.optimizer == "zero1" else "optimizer state whole"
    weights = "weights, gradients and state sharded" if "fsdp" in parallel.data else f"weights whole, {state}"
    return f"{job.world.size} processes, {parallel.data}: {weights}"


def _steps(job: Job, first: int) -> str:
    train = job.config.train
    if train.tokens:
        source = f" = {train.tokens:,} tokens / {job.tokens_per_step:,} a step, rounded up"
    else:
        source = f"; {train.steps * job.tokens_per_step:,} tokens"
    rest = f", going on at step {first:,}" if first > 1 else ""
    if first > train.steps:
        rest = ", all of them done"
    return f"{train.steps:,}{source}{rest}"


def _schedule(config: RunConfig) -> str:
    optim, steps = config.optim, config.train.steps
    if optim.warmup_steps >= steps:
        reached = optim.lr * steps / optim.warmup_steps
        return f"lr rising to {reached:g}, no further: the warm-up of {optim.warmup_steps} steps takes the whole run"
    after = {
        "cosine": f"a cosine to {optim.lr * optim.min_lr_ratio:g}",
        "linear": f"a line to {optim.lr * optim.min_lr_ratio:g}",
        "wsd": f"constant, over the last {optim.decay_share:.0%} a line to {optim.lr * optim.min_lr_ratio:g}",
        "constant": "constant",
    }
    return f"peak lr {optim.lr:g} after {optim.warmup_steps} steps, then {after[optim.schedule]}"


def _epochs(job: Job) -> str:
    per_epoch = job.sampler.windows_per_epoch * job.config.model.context_length
    seen = job.config.train.steps * job.tokens_per_step / per_epoch
    order = "epochs" if job.config.data.order == "shuffled" else "times as many drawn at random"
    return (
        f"{len(job.data.train):,} training tokens ({per_epoch:,} an epoch): {seen:.2f} {order}; "
        f"{len(job.data.valid):,} validation tokens"
    )


class Progress:
    """A silent watcher. Entered before the first call, left after the last, also when the run fails."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def on_plan(self, plan: Plan) -> None:
        """Before the first step: what was derived."""

    def on_note(self, line: str) -> None:
        """Something a person should know, one line."""

    def on_step(self, row: dict[str, Any]) -> None:
        """After each optimizer step: its row of metrics.jsonl."""

    def on_eval(self, row: dict[str, Any]) -> None:
        """After each evaluation: its row of metrics.jsonl."""


class ConsoleProgress(Progress):
    """The numbers of the newest row on `console` (standard output where none is given)."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._plan: Plan | None = None
        self._valid = ""

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan
        for line in plan.lines:
            self._print(line)
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()

    def on_note(self, line: str) -> None:
        self._print(line)

    def on_step(self, row: dict[str, Any]) -> None:
        assert self._plan is not None
        if self._live is not None:
            line = self._line(self._plan, row, self.console.width)
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True))
            return
        steps = self._plan.steps
        every = max(1, steps // PLAIN_LINES)
        if row["step"] % every == 0 or row["step"] in (self._plan.first_step, steps):
            self._print(self._line(self._plan, row))

    def on_eval(self, row: dict[str, Any]) -> None:
        self._valid = f"valid {row['valid_loss']:.4f}"
        bits = row["valid_bits_per_byte"]
        told = "" if bits is None else f", {bits:.4f} bits per byte"
        self._print(f"step {row['step']:,}: validation loss {row['valid_loss']:.4f}{told}")
        if row.get("sample"):
            self._print(f"sample: {' '.join(row['sample'].split())}")

    def _line(self, plan: Plan, row: dict[str, Any], width: int | None = None) -> str:
        """The status line; with a `width`, without its least important parts where it would be longer."""
        loss, norm = row["loss"], row["grad_norm"]
        bits = "" if loss is None else f"{bits_per_byte(loss, plan.train_bytes_per_token):.3f} bits/byte"
        parts = {
            "step": f"step {row['step']:,}/{plan.steps:,}",
            "loss": "loss not finite" if loss is None else f"loss {loss:.4f}{' (spike)' if row.get('spike') else ''}",
            "bits": bits,
            "valid": self._valid if self._live is not None else "",
            "skipped": "skipped" if row.get("skipped") else "",
            "lr": f"lr {row['lr']:.2e}",
            "norm": "" if norm is None else f"grad {norm:.3g}",
            "speed": f"{row['tokens_per_second']:,.0f} tokens/s",
            "mfu": f"MFU {row['mfu']:.1%}" if "mfu" in row else "",
            "memory": f"{row['memory_gib']:.2f} GiB",
            "eta": f"ETA {_clock(row['eta_seconds'])}",
        }
        for name in ("", "bits", "memory", "norm", "lr", "valid", "mfu"):
            parts.pop(name, None)
            line = " · ".join(part for part in parts.values() if part)
            if width is None or len(line) <= width:
                break
        return line

    def _print(self, line: str) -> None:
        self.console.print(Text(line))


def _clock(seconds: float) -> str:
    """1:02:03"""
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
