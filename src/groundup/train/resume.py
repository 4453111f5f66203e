"""From a job to a checkpoint and back: what is saved beside the tensors, and what a resume insists on."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from groundup import __version__
from groundup.errors import UserError
from groundup.train.checkpoint import MODEL, OPTIMIZER, Checkpoint, newest_complete, prune_checkpoints, save_checkpoint
from groundup.train.job import Job
from groundup.train.metrics import Row, cut_back
from groundup.train.run_directory import RunDirectory, flat_fields, refuse_edits
from groundup.train.state import load_model, load_optimizer, rng_state, set_rng_state

IMPORTED = "imported"
"""Key in the state.json of a checkpoint that has weights alone (exchange.py)."""


def save(job: Job, run: RunDirectory, step: int) -> None:
    """Write the checkpoint of `step`, then delete those that keep_last no longer covers."""
    facts = {
        "tokens": step * job.tokens_per_step,
        "rng": {str(job.world.rank): rng_state(job.device)},
        "data": _identity(job),
        # Where the data lay is this machine's matter; what they were is `data`.
        "config": {name: value for name, value in flat_fields(job.config).items() if name != "data.path"},
        "versions": _versions(),
    }
    save_checkpoint(run.checkpoints, step, job.model, job.optimizer, facts)
    prune_checkpoints(run.checkpoints, step, job.config.train.keep_last)


def start(job: Job, run: RunDirectory, resume: bool, note: Callable[[str], None]) -> tuple[int, list[Row]]:
    """Begin a run, or put back its newest complete checkpoint; returns the steps done and their rows."""
    checkpoint = newest_complete(run.checkpoints, note) if resume else None
    if checkpoint is None:
        if resume:
            note(f"{run.path} has no complete checkpoint; starting at step 0")
        run.begin(job.config, Path(job.config.data.path) / "tokenizer.json")
        return 0, []
    _restore(job, checkpoint, run, note)
    rows = cut_back(run.metrics, checkpoint.step)
    last = max((row["step"] for row in rows), default=0)
    if last < checkpoint.step:
        note(f"{run.metrics} ends at step {last}; the rows up to step {checkpoint.step} are lost")
    return checkpoint.step, rows


def _restore(job: Job, checkpoint: Checkpoint, run: RunDirectory, note: Callable[[str], None]) -> None:
    """Load a checkpoint into the job. Raises UserError when data, configuration or tensors are not its own."""
    state = checkpoint.state
    if state.get(IMPORTED):
        raise UserError(
            f"{run.path} was imported: it has weights, but no optimizer state to go on from; evaluate, generate, chat "
            "and export take it, training needs a new run with another --out"
        )
    if state["data"] != _identity(job):
        raise UserError(
            f"the token files in {job.config.data.path} (data.path) have changed since {checkpoint.path} was saved; "
            "put the old ones back, or start a new run with another --out"
        )
    refuse_edits(state["config"], job.config, run.path)
    load_model(job.model, checkpoint.path / MODEL)
    load_optimizer(job.model, job.optimizer, checkpoint.path / OPTIMIZER)
    set_rng_state(state["rng"][str(job.world.rank)], job.device)
    before = {"device": state["config"]["train.device"], **state["versions"]}
    now = {"device": job.config.train.device, **_versions()}
    moved = [f"{name} {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if moved:
        note(f"since the checkpoint: {', '.join(moved)}; losses may differ in their last bits")
    note(f"going on from {checkpoint.path}")


def _identity(job: Job) -> dict[str, Any]:
    """What must not change under a run."""
    return {"digest": job.data.digest, "train_tokens": len(job.data.train), "valid_tokens": len(job.data.valid)}


def _versions() -> dict[str, str]:
    return {"groundup": __version__, "torch": torch.__version__, "python": platform.python_version()}
