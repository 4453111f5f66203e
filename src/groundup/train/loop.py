"""The training loop.

A run is a pure function of its configuration and its token files: the weights start from train.seed, the batch of a
step from (train.seed, step), the learning rate from the step. So what a checkpoint holds (weights, optimizer state,
step) is all a resumed run needs to go on bit for bit.

The order of things after step k: its row is written; if k is due to be saved it is saved; only then it is evaluated
and a sample drawn, so that neither can cost anything: where the memory runs out in one of them, the run goes on. A
checkpoint that the disk has no room for is put off, said, and tried again after every step; only the last one and the
one at a signal end the run when they cannot be written.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.generate import generate_text
from groundup.optim import learning_rate, set_learning_rate
from groundup.parallel.processes import joined, this_world
from groundup.rows import Row
from groundup.train.checkpoint import best_step, mark_best, prune_checkpoints, refuse_unshared
from groundup.train.device import choose_device, deterministic, matmul_precision_kept
from groundup.train.evaluate import Evaluation, evaluate
from groundup.train.guards import (
    BestLoss,
    Guards,
    apply_unless,
    foreign_tokens,
    is_out_of_memory,
    least_bits_per_byte,
    to_skip,
)
from groundup.train.interrupt import Interrupt
from groundup.train.job import Batch, Job, build, prefetched
from groundup.train.metrics import MetricsLog, StepRows, flops_per_token, peak_flops
from groundup.train.progress import Progress, make_plan
from groundup.train.resume import Stateful, at_world_size, lack_of_room_for, save, start
from groundup.train.run_directory import RunDirectory, refuse_changes
from groundup.train.sinks import Sinks, check_packages

T = TypeVar("T")

SAMPLE_TOKENS = 64
"""Tokens of a sample that is shown after an evaluation."""


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
    stopped_early: bool = False
    """Whether early stopping ended it."""
    best_loss: float | None = None
    """The lowest validation loss of the run, nats a token."""
    best_step: int | None = None


def training_step(
    job: Job,
    batch: Batch,
    lr: float,
    loss_limit: float = math.inf,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step; returns the loss (nats a token, mean over the global batch), the gradient norm, and whether
    the step was skipped (bool): its loss was above `loss_limit`, or the loss or a gradient was not finite.

    Each micro-batch divides its sum of losses by the valid tokens of the whole global batch, so losses and gradients
    simply add up, over micro-batches and ranks, and no mean of means is taken. A skipped step changes neither weights
    nor optimizer state, on any rank; guards.py says how that is decided.
    `meanwhile`: the host's own work, done when the device is busy with this step and the host would wait for its flag.
    """
    optimizer, train = job.optimizer, job.config.train
    total = torch.zeros((), device=job.device)
    for index, (inputs, targets) in enumerate(batch.micro_batches(train.micro_batch_size, job.device), 1):
        with job.accumulating(last=index == train.grad_accumulation):
            total = total + job.micro_step(inputs, targets, batch.n_valid, first=index == 1)
    grad_norm = job.clip_grad_norm()
    total, unsound = job.world.sum(torch.stack([total, (~torch.isfinite(grad_norm)).to(total)]))
    skip = to_skip(total, unsound, loss_limit)
    job.scaler.update(unsound == 0)
    set_learning_rate(optimizer, lr)
    meanwhile()
    apply_unless(skip, optimizer)
    optimizer.zero_grad(set_to_none=True)
    return total, grad_norm, skip


@matmul_precision_kept()
def train(
    config: RunConfig,
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    allow_changed_data: bool = False,
) -> TrainResult:
    """Train `config` into the run directory `out`, or go on with the run that is there.

    Fields that `config` leaves to be derived are; config.toml holds the result. With `resume` the saved configuration
    is taken, which `config` must not contradict, but for [parallel], and dealt out to the processes that are there.
    run_directory.py describes what is written. `allow_changed_data`: a resume takes token files that are others than
    before. Every process of a world calls it alike; rank 0 alone writes and speaks.
    Raises UserError for everything a user can cause; checkpoints already written stay valid then.
    """
    world, progress = this_world(), progress or Progress()
    if world.rank:
        progress = Progress()  # one process speaks
    kind = choose_device(config.train.device).type
    with joined(world, kind, config.parallel, progress.on_note), ExitStack() as stack:
        # From here on: a job that is told to stop while it loads gigabytes is to be queued again too.
        interrupt = stack.enter_context(Interrupt())
        out, config = world.on_rank_zero(lambda: _begun(config, out, resume, world.size))
        run = RunDirectory(out)
        stack.enter_context(deterministic(config.train.deterministic))
        job = build(config)
        world.on_rank_zero(lambda: stack.enter_context(run.locked()))
        if resume or config.parallel.checkpoint == "dcp":
            refuse_unshared(world, run.path)
        stack.enter_context(progress)
        if not resume:
            world.on_rank_zero(run.refuse_second_run)  # another process may have made one since
        return _Loop(job, run, progress, interrupt).go(resume, allow_changed_data)


def _begun(config: RunConfig, out: Path, resume: bool, world_size: int) -> tuple[Path, RunConfig]:
    """(run directory, configuration): the given one, or that of the run that is there; on rank 0, before anything."""
    run = RunDirectory(out)
    if not resume:
        run.refuse_second_run()
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{out} is a file; --out names the run's directory")
    if run.config.exists():
        saved = at_world_size(run.load_config(), world_size)
        # The command line gives the saved configuration back: its batch is that of the processes of before.
        refuse_changes(saved, at_world_size(config, world_size), run.path)
        here = replace(saved.train, cuda_graph=config.train.cuda_graph)
        config = replace(saved, parallel=config.parallel, train=here)
    check_packages(config.train.sinks)
    return out, config


class _Loop:
    """The loop's state besides the job's tensors: how far it is, and what it has saved and seen."""

    log: MetricsLog
    sinks: Sinks
    done: int
    """Optimizer steps done."""
    evaluations: list[Row]
    """Those of a resumed run up to its first step."""

    def __init__(self, job: Job, run: RunDirectory, progress: Progress, interrupt: Interrupt):
        self.job, self.run, self.progress, self.train = job, run, progress, job.config.train
        self.interrupt = interrupt
        self.guards, self.best = Guards(self.train), BestLoss(self.train.min_delta)
        self.extra: dict[str, Stateful] = {"guards": self.guards, "best": self.best, "scaler": job.scaler}
        """What a checkpoint holds beside weights, optimizer state and random numbers."""
        self.valid_loss: float | None = None
        """The newest one."""
        self.put_off = False
        """Whether a checkpoint is due that the disk had no room for."""

    def go(self, resume: bool, allow_changed_data: bool) -> TrainResult:
        """Begin or go on, and do the steps that are left, with their saves and evaluations."""
        note, writes = self.progress.on_note, self.job.world.rank == 0
        self.done, self.evaluations = start(self.job, self.run, resume, note, self.extra, allow_changed_data)
        self.saved = self.first = self.done
        self.best.replay(self.evaluations)
        if self.evaluations:
            self.valid_loss = self.evaluations[-1]["valid_loss"]
        self.progress.on_plan(make_plan(self.job, self.done))
        self.started = time.monotonic()
        with (
            Sinks(self.train.sinks if writes else (), self.job.config, self.run, self.done, note) as self.sinks,
            MetricsLog(self.run.metrics if writes else None) as self.log,
        ):
            try:
                self._stop_if_asked()
                self._steps()
            except _Stop:
                if self.saved < self.done:
                    self._save(required=True)
                what = f": step {self.done} is saved" if self.done else " before the first step"
                note(f"interrupted{what}; go on with: groundup train --out {self.run.path} --resume")
                return self._result(interrupted=True)
            return self._result(interrupted=False)

    def _steps(self) -> None:
        train, optim, job = self.train, self.job.config.optim, self.job
        if train.eval_every and (line := foreign_tokens(job.data)):
            self.progress.on_note(line)
        if train.eval_every and train.sample_prompt and not job.has_whole_weights:
            self.progress.on_note(f"no samples: with parallel.data {job.config.parallel.data} no process has a model")
        if self._is_due(self.done, train.eval_every) and not self._is_evaluated(self.done):
            self._evaluate()  # the run was killed between saving and evaluating
        peak = peak_flops(job.config, job.device) * job.world.size
        full_mfu = flops_per_token(job.config) / peak if peak else 0.0
        rows = StepRows(self._write, job.tokens_per_step, job.device, full_mfu)
        last = self.done if self._is_over() else train.steps
        for step, batch in prefetched(job.read, self.done + 1, last):
            lr = learning_rate(step, optim, train.steps)
            rows.put(step, lr, *training_step(job, batch, lr, self.guards.device_limit(step), rows.flush))
            self.done = step
            stop = job.world.any(self.interrupt.requested)
            due_save = stop or self.put_off or step == train.steps or self._is_due(step, train.save_every)
            due_eval = self._is_due(step, train.eval_every)
            if due_save or due_eval:
                rows.flush()
            if due_save:
                self._save(required=stop or step == train.steps)
            if stop:
                raise _Stop
            if due_eval:
                self._evaluate()
                if self._is_over():
                    self._save(required=True)
                    return
            if due_save or due_eval:
                rows.restart_clock()

    def _is_due(self, step: int, every: int) -> bool:
        return step > 0 and every > 0 and (step % every == 0 or step == self.train.steps)

    def _is_evaluated(self, step: int) -> bool:
        return any(row["step"] == step for row in self.evaluations)

    def _is_over(self) -> bool:
        """Whether early stopping ends the run here, with a line that says so."""
        if not self.train.early_stopping or self.best.waited < self.train.early_stopping:
            return False
        if self.done < self.train.steps:
            kept = best_step(self.run.checkpoints) == self.best.step  # not where the disk was full at that step
            self.progress.on_note(
                f"stopped early at step {self.done:,}: {self.best.waited} evaluations were no better than "
                f"{self.best.loss:.4f} at step {self.best.step:,}, which "
                f"{'is kept as checkpoints/best' if kept else 'could not be saved: checkpoints/best is an earlier one'}"
            )
        return True

    def _write(self, row: Row) -> None:
        """A step's row, once its numbers are known. Raises UserError when the guards give up."""
        line = self.guards.observe(row)
        per_step = (time.monotonic() - self.started) / (row["step"] - self.first)
        row["eta_seconds"] = round(per_step * (self.train.steps - row["step"]))
        self.log.write(row)
        self.sinks.write(row)
        self.progress.on_step(row)
        if line:
            self.progress.on_note(line)
        self.guards.check(row["step"])

    def _save(self, required: bool) -> None:
        """Save the last step, or put that off where the disk does not take it. Raises UserError if it is `required`."""
        if self.saved == self.done:
            return
        self.job.settle()
        lack = lack_of_room_for(self.job, self.run)
        if lack is None:
            self.log.sync()  # a checkpoint must never be newer than its rows
        if reason := lack or save(self.job, self.run, self.done, self.extra):
            line = f"step {self.done} cannot be saved: {reason}"
            if required:
                raise UserError(f"{line}; the checkpoints before it are kept: free space, then go on with --resume")
            if not self.put_off or self._is_due(self.done, self.train.save_every):
                self.progress.on_note(f"{line}; tried again {'after every step' if lack else 'at the next save'}")
            self.put_off = lack is not None  # to ask for room costs nothing, to write until there is none does
            return
        self.saved, self.put_off = self.done, False
        self.job.world.on_rank_zero(self._prune)

    def _prune(self) -> None:
        """Delete the checkpoints that are no longer to be kept; a failure is said, and the next save tries again."""
        try:
            prune_checkpoints(self.run.checkpoints, self.done, self.train.keep_last, self.train.keep_every)
        except OSError as error:
            self.progress.on_note(f"step {self.done} is saved, but an older checkpoint cannot be deleted: {error}")

    def _evaluate(self) -> None:
        """Write the evaluation row of the last step done. Raises UserError when the loss is not finite."""
        found = self._unless_out_of_memory("evaluation", self._validate)
        if found is None:
            return
        if not math.isfinite(found.loss):
            raise UserError(
                f"step {self.done}: the validation loss is {found.loss}; the run stopped and its last checkpoint is "
                "kept: try a lower optim.lr"
            )
        row: Row = {"step": self.done, "valid_loss": found.loss, "valid_bits_per_byte": found.bits_per_byte}
        if found.bits_per_byte is not None and found.bits_per_byte < self.least_bits:
            row["suspicious"] = True
            self.progress.on_note(
                f"step {self.done:,}: {found.bits_per_byte:.4f} bits per byte are less than this text can be predicted "
                f"with (a tenth of what xz needs is {self.least_bits:.4f}): is the validation text among the training "
                "text, or were the tokens encoded by another tokenizer?"
            )
        if self.best.observe(self.done, found.loss) and (self.train.early_stopping or self.train.keep_best):
            self._save(required=False)
            if self.saved == self.done:
                self.job.world.on_rank_zero(lambda: mark_best(self.run.checkpoints, self.done))
        if self.train.sample_prompt and self.job.has_whole_weights:
            row["sample"] = self._unless_out_of_memory("sampling", self._sample)
        # Last, so that a run killed before it evaluates again and finds `best` as it left it.
        self.log.write(row)
        self.sinks.write(row)
        self.progress.on_eval(row)
        self.valid_loss = found.loss

    @cached_property
    def least_bits(self) -> float:
        """Fewest bits per byte that can be true."""
        return least_bits_per_byte(self.job.data)

    def _validate(self) -> Evaluation:
        self.job.settle()
        sharded = not self.job.has_whole_weights
        try:
            return evaluate(
                self.job.model,
                self.job.data,
                batch_size=self.train.micro_batch_size,
                batches=self.train.eval_batches,
                forward_context=self.job.autocast,
                before_batch=self._stop_if_asked,
                world=self.job.world,
                sharded=sharded,
            )
        except (RuntimeError, MemoryError) as error:
            if not (sharded and is_out_of_memory(error)):
                raise
            raise UserError(  # the other ranks wait for this one's share
                f"step {self.done:,}: out of memory in the evaluation; the last checkpoint is kept: lower "
                "train.micro_batch_size, then go on with --resume"
            ) from error

    def _sample(self) -> str:
        """train.sample_prompt and what follows; a function of weights and step that leaves torch's generators alone."""
        prompt = self.train.sample_prompt
        pieces = generate_text(
            self.job.model,
            self.job.data.tokenizer(),
            prompt,
            SAMPLE_TOKENS,
            temperature=0.8,
            top_p=0.95,
            seed=self.done,
        )
        return prompt + "".join(pieces)

    def _unless_out_of_memory(self, what: str, do: Callable[[], T]) -> T | None:
        """The result of `do`; None, and a line, where it ran out of memory, without that of a recorded step too."""
        for _ in range(2):
            try:
                return do()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Here the traceback, and with it the tensors of the frames that failed, are gone.
            held = self.job.graph is not None and self.job.graph.release()
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()
            if not held:
                break
        self.progress.on_note(f"step {self.done:,}: out of memory in the {what}, which is left out; the run goes on")
        return None

    def _stop_if_asked(self) -> None:
        if self.job.world.any(self.interrupt.requested):
            raise _Stop

    def _result(self, interrupted: bool) -> TrainResult:
        early = not interrupted and self.done < self.train.steps
        best = (self.best.loss, self.best.step) if self.best.step else (None, None)
        return TrainResult(self.run.path, self.done, interrupted, self.valid_loss, early, *best)


class _Stop(Exception):
    """Ctrl-C or SIGTERM: leave the loop, save what is not saved."""
