"""The training loop.

A run is a pure function of its configuration and its token files: the weights start from train.seed, the batch of a
step from (train.seed, step), the learning rate from the step. So what a checkpoint holds (weights, optimizer state,
step) is all a resumed run needs to go on bit for bit.

The order of things after step k: its row is written; if k is due to be saved it is saved; only then it is evaluated,
so that an evaluation that fails costs nothing.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.optim import clip_grad_norm, cosine_lr
from groundup.train.batches import Batch, prefetched
from groundup.train.evaluate import evaluate
from groundup.train.interrupt import Interrupt
from groundup.train.job import Job, build, make_plan
from groundup.train.metrics import MetricsLog, Row, StepRows
from groundup.train.progress import Progress
from groundup.train.resume import save, start
from groundup.train.run_directory import RunDirectory, refuse_changes


@dataclass(frozen=True)
class TrainResult:
    """Where a call of `train` ended."""

    out: Path
    step: int
    """Optimizer steps done in all."""
    interrupted: bool
    """Whether Ctrl-C or SIGTERM ended it; the step is saved."""
    valid_loss: float | None
    """The newest validation loss of the run, nats a token."""


def training_step(job: Job, batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns the loss (nats a token, mean over the global batch) and the gradient norm.

    Each micro-batch divides its sum of losses by the valid tokens of the whole global batch, so losses and gradients
    simply add up, and no mean of means is taken.
    """
    optimizer, train = job.optimizer, job.config.train
    total = torch.zeros((), device=job.device)
    for inputs, targets in batch.micro_batches(train.micro_batch_size, job.device):
        with job.autocast():
            loss = job.forward(inputs, targets, n_valid=batch.n_valid)
        loss.backward()
        total = total + loss.detach()
    grad_norm = clip_grad_norm(job.model.parameters(), job.config.optim.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def train(config: RunConfig, out: Path, resume: bool = False, progress: Progress | None = None) -> TrainResult:
    """Train `config` into the run directory `out`, or go on with the run that is there.

    Fields that `config` leaves to be derived are; config.toml holds the result. With `resume` the saved configuration
    is taken, which `config` must not contradict. run_directory.py describes what is written.
    Raises UserError for everything a user can cause; checkpoints already written stay valid then.
    """
    run, progress = RunDirectory(out), progress or Progress()
    if not resume:
        run.refuse_second_run()
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{out} is a file; --out names the run's directory")
    if run.config.exists():
        saved = run.load_config()
        refuse_changes(saved, config, run.path)
        config = saved
    job = build(config)
    with run.locked(), progress:
        if not resume:
            run.refuse_second_run()  # another process may have made one since
        step, rows = start(job, run, resume, progress.on_note)
        progress.on_plan(make_plan(job, step))
        with MetricsLog(run.metrics) as log, Interrupt() as interrupt:
            return _Loop(job, run, log, progress, interrupt, step, rows).go()


@dataclass
class _Loop:
    """The loop's state besides the job's tensors: how far it is, and what it has saved and seen."""

    job: Job
    run: RunDirectory
    log: MetricsLog
    progress: Progress
    interrupt: Interrupt
    done: int
    """Optimizer steps done."""
    rows: list[Row]
    """The rows of a resumed run up to `done`."""

    def __post_init__(self) -> None:
        self.train = self.job.config.train
        self.saved = self.done
        self.valid_losses = [row["valid_loss"] for row in self.rows if "valid_loss" in row]

    def go(self) -> TrainResult:
        """Do the steps that are left, with their saves and evaluations."""
        try:
            self._steps()
        except _Stop:
            if self.saved < self.done:
                self._save()
            self.progress.on_note(
                f"interrupted: step {self.done} is saved; go on with: groundup train --out {self.run.path} --resume"
            )
            return self._result(interrupted=True)
        return self._result(interrupted=False)

    def _steps(self) -> None:
        train, optim = self.train, self.job.config.optim
        if self._is_due(self.done, train.eval_every) and not self._is_evaluated(self.done):
            self._evaluate()  # the run was killed between saving and evaluating
        rows = StepRows(self._write, self.job.tokens_per_step, self.job.device)
        for step, batch in prefetched(self.job.read, self.done + 1, train.steps):
            lr = cosine_lr(step, optim.lr, optim.lr * optim.min_lr_ratio, optim.warmup_steps, train.steps)
            loss, grad_norm = training_step(self.job, batch, lr)
            rows.put(step, lr, loss, grad_norm)
            self.done = step
            stop = self.interrupt.requested
            due_save = stop or step == train.steps or self._is_due(step, train.save_every)
            due_eval = self._is_due(step, train.eval_every)
            if due_save or due_eval:
                rows.flush()
            if due_save:
                self._save()
            if stop:
                raise _Stop
            if due_eval:
                self._evaluate()
            if due_save or due_eval:
                rows.restart_clock()

    def _is_due(self, step: int, every: int) -> bool:
        return step > 0 and every > 0 and (step % every == 0 or step == self.train.steps)

    def _is_evaluated(self, step: int) -> bool:
        return any(row["step"] == step and "valid_loss" in row for row in self.rows)

    def _write(self, row: Row) -> None:
        self.log.write(row)
        self.progress.on_step(row)

    def _save(self) -> None:
        self.log.sync()  # a checkpoint must never be newer than its rows
        save(self.job, self.run, self.done)
        self.saved = self.done

    def _evaluate(self) -> None:
        """Write the evaluation row of the last step done. Raises UserError when the loss is not finite."""
        found = evaluate(
            self.job.model,
            self.job.data,
            batch_size=self.train.micro_batch_size,
            batches=self.train.eval_batches,
            forward_context=self.job.autocast,
            before_batch=self._stop_if_asked,
        )
        if not math.isfinite(found.loss):
            raise UserError(
                f"step {self.done}: the validation loss is {found.loss}; the run stopped and its last checkpoint is "
                "kept: try a lower optim.lr"
            )
        row = {"step": self.done, "valid_loss": found.loss, "valid_bits_per_byte": found.bits_per_byte}
        self.log.write(row)
        self.progress.on_eval(row)
        self.valid_losses.append(found.loss)

    def _stop_if_asked(self) -> None:
        if self.interrupt.requested:
            raise _Stop

    def _result(self, interrupted: bool) -> TrainResult:
        return TrainResult(self.run.path, self.done, interrupted, self.valid_losses[-1] if self.valid_losses else None)


class _Stop(Exception):
    """Ctrl-C or SIGTERM: leave the loop, save what is not saved."""
