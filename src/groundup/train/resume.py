"""From a job to a checkpoint and back: what is saved beside the tensors, and what a resume insists on.

The schedule is a function of the step and the data order one of (seed, step), so neither has a state. What has one
besides weights and optimizer is `Stateful` and lies in state.json: guards, early stopping, a loss scaler.
"""

import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open

from groundup import __version__
from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.parallel.shards import Shards, load_own, own_tensors
from groundup.parallel.state import load_state, load_weights, local_bytes, whole_state, whole_weights
from groundup.parallel.torch_engines import TorchFSDP2
from groundup.rows import Row
from groundup.train.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    lack_of_room,
    newest_complete,
    prune_checkpoints,
    save_checkpoint,
    save_shards,
)
from groundup.train.job import Job
from groundup.train.metrics import cut_back
from groundup.train.run_directory import RunDirectory, flat_fields, refuse_edits
from groundup.train.state import (
    check_tensors,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    rng_state,
    set_rng_state,
)

IMPORTED = "imported"
"""Key in the state.json of a checkpoint that has weights alone (exchange.py)."""


EDGE = 1 << 16
"""Ids at both ends of a token file that a resume compares."""


class Stateful(Protocol):
    """A part of a run with a small state, as JSON has it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def lack_of_room_for(job: Job, run: RunDirectory) -> str | None:
    """What to say when the disk has no room for a checkpoint of the job."""
    run.checkpoints.mkdir(exist_ok=True)
    if not job.is_sharded:
        tensors = [*model_tensors(job.model).values(), *optimizer_tensors(job.model, job.optimizer).values()]
        return lack_of_room(run.checkpoints, tensors)
    entries = getattr(job.optimizer, "inner", job.optimizer).state.values()
    own = sum(local_bytes(value) for entry in entries for value in entry.values())
    total = sum(job.world.gather(own)) + job.parameters * next(job.model.parameters()).element_size()
    return lack_of_room(run.checkpoints, [torch.empty(total, dtype=torch.uint8, device="meta")])


def save(job: Job, run: RunDirectory, step: int, extra: Mapping[str, Stateful]) -> None:
    """Write the checkpoint of `step`, the state of `extra` in it, then delete those that are no longer to be kept."""
    facts = {
        "tokens": step * job.tokens_per_step,
        "rng": {str(rank): state for rank, state in enumerate(job.world.gather(rng_state(job.device)))},
        "extra": {name: part.state_dict() for name, part in extra.items()},
        "data": _identity(job),
        # Where the data lay is this machine's matter; what they were is `data`.
        "config": {name: value for name, value in flat_fields(job.config).items() if name != "data.path"},
        "versions": _versions(),
    }
    train = job.config.train

    def prune() -> None:
        prune_checkpoints(run.checkpoints, step, train.keep_last, train.keep_every)

    if job.config.parallel.checkpoint == "dcp" and isinstance(job.engine, TorchFSDP2):
        save_shards(job.world, run.checkpoints, step, *own_tensors(job.engine, job.model, job.optimizer), facts)
        job.world.on_rank_zero(prune)
        return
    writes = job.world.rank == 0
    if job.is_sharded and job.engine is not None:
        weights = whole_weights(job.engine, job.model, writes)
        optimizer = whole_state(job.engine, job.model, job.optimizer, writes)
    elif writes:
        weights, optimizer = model_tensors(job.model), optimizer_tensors(job.model, job.optimizer)

    def write() -> None:
        save_checkpoint(run.checkpoints, step, weights, optimizer, facts)
        prune()

    job.world.on_rank_zero(write)


def start(
    job: Job,
    run: RunDirectory,
    resume: bool,
    note: Callable[[str], None],
    extra: Mapping[str, Stateful],
    allow_changed_data: bool = False,
) -> tuple[int, list[Row]]:
    """Begin a run, or put back its newest complete checkpoint; returns the steps done and their rows.

    `allow_changed_data`: go on with token files that are not the ones of before, if the tokenizer is.
    """
    world = job.world
    checkpoint = newest_complete(run.checkpoints, note, world=world) if resume else None
    if checkpoint is None:
        if resume:
            note(f"{run.path} has no complete checkpoint; starting at step 0")
        world.on_rank_zero(lambda: run.begin(job.config, Path(job.config.data.path) / "tokenizer.json"))
        return 0, []
    _restore(job, checkpoint, run, note, extra, allow_changed_data)
    rows = world.on_rank_zero(lambda: cut_back(run.metrics, checkpoint.step))
    last = max((row["step"] for row in rows), default=0)
    if last < checkpoint.step:
        note(f"{run.metrics} ends at step {last}; the rows up to step {checkpoint.step} are lost")
    return checkpoint.step, rows


def _restore(
    job: Job,
    checkpoint: Checkpoint,
    run: RunDirectory,
    note: Callable[[str], None],
    extra: Mapping[str, Stateful],
    allow_changed_data: bool,
) -> None:
    """Load a checkpoint into the job. Raises UserError when data, configuration or tensors are not its own."""
    state = checkpoint.state
    if state.get(IMPORTED):
        raise UserError(
            f"{run.path} was imported: it has weights, but no optimizer state to go on from; evaluate, generate, chat "
            "and export take it, training needs a new run with another --out"
        )
    _check_data(job, state["data"], checkpoint, run, note, allow_changed_data)
    refuse_edits(state["config"], job.config, run.path)
    if job.is_sharded:
        _load_parts(job, checkpoint)
    else:
        load_model(job.model, checkpoint.tensors(MODEL))
        load_optimizer(job.model, job.optimizer, checkpoint.tensors(OPTIMIZER))
    for name, part in extra.items():
        if name in state.get("extra", {}):  # a checkpoint older than the part has none
            part.load_state_dict(state["extra"][name])
    if str(job.world.rank) in state["rng"]:
        set_rng_state(state["rng"][str(job.world.rank)], job.device)
    else:
        note(f"the checkpoint has no random state of rank {job.world.rank}; it starts from train.seed")
    before = {"device": state["config"]["train.device"], **state["versions"]}
    now = {"device": job.config.train.device, **_versions()}
    moved = [f"{name} {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if moved:
        note(f"since the checkpoint: {', '.join(moved)}; losses may differ in their last bits")
    note(f"going on from {checkpoint.path}")


def _load_parts(job: Job, checkpoint: Checkpoint) -> None:
    """Each rank reads its own parts of the mapped files or shards. Raises UserError as load_model does."""
    assert job.engine is not None
    path, state_path = checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in TransformerLM(job.config.model).state_dict().items()}
    if path.is_dir():
        weights, state = Shards(path), Shards(state_path)
        saved = {name: torch.empty(weights.shape(name), device="meta") for name in weights.keys()}  # noqa: SIM118
        check_tensors(expected, saved, path)
        if isinstance(job.engine, TorchFSDP2):
            load_own(job.engine, job.model, job.optimizer, weights, state)
            return
        load_weights(job.engine, job.model, weights.get_tensor)
        load_state(job.engine, job.model, job.optimizer, state.keys(), state.get_tensor)
        return
    with safe_open(path, framework="pt") as weights, safe_open(state_path, framework="pt") as state:
        saved = {name: torch.empty(weights.get_slice(name).get_shape(), device="meta") for name in weights.keys()}  # noqa: SIM118
        check_tensors(expected, saved, path)
        load_weights(job.engine, job.model, weights.get_tensor)
        load_state(job.engine, job.model, job.optimizer, state.keys(), state.get_tensor)


def at_world_size(config: RunConfig, size: int) -> RunConfig:
    """A saved configuration with its global batch dealt out to `size` processes; the micro-batch as large as before,
    or the next smaller one that divides. Raises UserError when the batch cannot be dealt out evenly.
    """
    train = config.train
    total, micro = train.global_batch_size, train.micro_batch_size
    if not total or not micro or total == micro * train.grad_accumulation * size:
        return config
    if total % size:
        raise UserError(
            f"the run's global batch of {total} sequences cannot be dealt out to {size} processes; start a number of "
            "them that divides it"
        )
    share = total // size
    micro = max(n for n in range(1, min(micro, share) + 1) if share % n == 0)
    return replace(config, train=replace(train, micro_batch_size=micro, grad_accumulation=share // micro))


def _check_data(
    job: Job, saved: dict[str, Any], checkpoint: Checkpoint, run: RunDirectory, note: Callable[[str], None], allow: bool
) -> None:
    """Raise UserError when the token files are not those of the checkpoint, and `allow` does not say that they may."""
    now = _identity(job)
    if all(now[name] == value for name, value in saved.items()):
        return
    path = job.config.data.path
    if not allow:
        raise UserError(
            f"the token files in {path} (data.path) have changed since {checkpoint.path} was saved; put the old ones "
            "back, add --allow-changed-data to go on with these, or start a new run with another --out"
        )
    job.data.check_tokenizer(run.load_tokenizer(), str(run.tokenizer))
    note(f"the token files in {path} have changed since {checkpoint.path}; going on with these, as asked")


def _identity(job: Job) -> dict[str, Any]:
    """What must not change under a run: meta.json's digest, the sizes, and the ids at both ends of the files."""
    edges = hashlib.sha256()
    for tokens in (job.data.train, job.data.valid):
        for part in (tokens[:EDGE], tokens[-EDGE:]):
            edges.update(np.ascontiguousarray(part).data)
    sizes = {"train_tokens": len(job.data.train), "valid_tokens": len(job.data.valid)}
    return {"digest": job.data.digest, **sizes, "edges": edges.hexdigest()}


def _versions() -> dict[str, str]:
    return {"groundup": __version__, "torch": torch.__version__, "python": platform.python_version()}
