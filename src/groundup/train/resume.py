"""From a job to a checkpoint and back: what is saved beside the tensors, and what a resume insists on.

The schedule is a function of the step and the data order one of (seed, step), so neither has a state. What has one
besides weights and optimizer is `Stateful` and lies in state.json: guards, early stopping, a loss scaler.
"""

import base64
import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from groundup import __version__
from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.parallel.state import load_state, load_weights, local_bytes, whole_state, whole_weights
from groundup.parallel.torch_engines import TorchFSDP2
from groundup.rows import Row
from groundup.train.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    NotSavedError,
    check_tensors,
    lack_of_room,
    newest_complete,
    opened,
    save_checkpoint,
)
from groundup.train.job import Job
from groundup.train.metrics import cut_back
from groundup.train.run_directory import RunDirectory, flat_fields, refuse_edits

IMPORTED = "imported"
"""Key in the state.json of a checkpoint that has weights alone (exchange.py)."""
EDGE = 1 << 16
"""Ids at both ends of a token file that a resume compares."""


class Stateful(Protocol):
    """A part of a run with a small state, as JSON has it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def lack_of_room_for(job: Job, run: RunDirectory) -> str | None:
    """What to say, on every rank, when the disk of rank 0 has no room for a checkpoint of the job."""
    entries = getattr(job.optimizer, "inner", job.optimizer).state.values()
    own = sum(local_bytes(value) for entry in entries for value in entry.values())
    state = sum(job.world.gather(own)) if job.is_sharded else own
    needed = state + job.parameters * next(job.model.parameters()).element_size()
    return job.world.on_rank_zero(lambda: lack_of_room(run.checkpoints, needed))


def save(job: Job, run: RunDirectory, step: int, extra: Mapping[str, Stateful]) -> str | None:
    """Write the checkpoint of `step`, the state of `extra` in it; why the disk did not take it, else None.

    A collective. Where every rank writes shards, a rank whose disk does not take them raises UserError instead.
    """
    facts = {
        "tokens": step * job.tokens_per_step,
        "rng": {str(rank): state for rank, state in enumerate(job.world.gather(rng_state(job.device)))},
        "extra": {name: part.state_dict() for name, part in extra.items()},
        "data": _identity(job),
        # Where the data lay is this machine's matter; what they were is `data`.
        "config": {name: value for name, value in flat_fields(job.config).items() if name != "data.path"},
        "versions": _versions(job.device),
    }
    if job.config.parallel.checkpoint == "dcp" and isinstance(job.engine, TorchFSDP2):
        from groundup.parallel.shards import own_tensors

        tensors = own_tensors(job.engine, job.model, job.optimizer)
        save_checkpoint(run.checkpoints, step, *tensors, facts, job.world)
        return None
    writes = job.world.rank == 0
    weights = whole_weights(job.engine, job.model, writes)
    state = whole_state(job.engine, job.model, job.optimizer, writes)

    def write() -> str | None:
        try:
            save_checkpoint(run.checkpoints, step, weights, state, facts)
        except NotSavedError as error:
            return error.reason
        return None

    return job.world.on_rank_zero(write)


def start(
    job: Job,
    run: RunDirectory,
    resume: bool,
    note: Callable[[str], None],
    extra: Mapping[str, Stateful],
    allow_changed_data: bool = False,
) -> tuple[int, list[Row]]:
    """Begin a run, or put back its newest complete checkpoint; returns the steps done and the rows of evaluations.

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

    def known_rows() -> tuple[int, list[Row]]:
        rows = cut_back(run.metrics, checkpoint.step)
        return max((row["step"] for row in rows), default=0), [row for row in rows if "valid_loss" in row]

    last, evaluations = world.on_rank_zero(known_rows)
    if last < checkpoint.step:
        note(f"{run.metrics} ends at step {last}; the rows up to step {checkpoint.step} are lost")
    return checkpoint.step, evaluations


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
    _load(job, checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER))
    for name, part in extra.items():
        if name in state.get("extra", {}):  # a checkpoint older than the part has none
            part.load_state_dict(state["extra"][name])
    if str(job.world.rank) in state["rng"]:
        set_rng_state(state["rng"][str(job.world.rank)], job.device)
    else:
        note(f"the checkpoint has no random state of rank {job.world.rank}; it starts from train.seed")
    before = {"device": state["config"]["train.device"], **state["versions"]}
    now = {"device": job.config.train.device, **_versions(job.device)}
    moved = [f"{name} {before[name]} → {now[name]}" for name in now if name in before and before[name] != now[name]]
    if moved:
        note(f"since the checkpoint: {', '.join(moved)}; losses may differ in their last bits")
    note(f"going on from {checkpoint.path}")


def _load(job: Job, weights: Path, state: Path) -> None:
    """Each rank reads its own parts of the mapped files or shards. Raises UserError naming the first tensor that is
    missing or has another shape.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in TransformerLM(job.config.model).state_dict().items()}
    own = weights.is_dir() and isinstance(job.engine, TorchFSDP2)
    with opened(weights) as (saved, read):
        check_tensors(shapes, saved, weights)
        if not own:
            load_weights(job.engine, job.model, read)
    with opened(state) as (saved, read):
        check_tensors(_state_shapes(job, shapes, saved), saved, state)
        if not own:
            load_state(job.engine, job.model, job.optimizer, saved, read)
    if own:
        from groundup.parallel.shards import Shards, load_own

        load_own(job.engine, job.model, job.optimizer, Shards(weights), Shards(state))


def _state_shapes(job: Job, shapes: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The optimizer state that there must be. Which kinds there are is the optimizer's matter, by group; what one
    parameter of a group has, all of them must have.
    """
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    expected: dict[str, torch.Size] = {}
    for group in job.optimizer.param_groups:
        members = dict.fromkeys(names[p] for p in group["params"])
        kinds = {full.partition(".")[0]: shape for full, shape in saved.items() if full.partition(".")[2] in members}
        expected |= {
            f"{kind}.{name}": shapes[name] if kinds[kind] else torch.Size() for kind in kinds for name in members
        }
    return expected


def rng_state(device: torch.device) -> dict[str, str]:
    """torch's generators of this rank as base64. Nothing in a run draws from another one."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(tensor.numpy().tobytes()).decode() for name, tensor in state.items()}


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators back; a run that moved to another kind of device keeps that device's fresh one."""
    tensors = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in state.items()
    }
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


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


def _versions(device: torch.device) -> dict[str, str]:
    """What else a loss's last bits depend on."""
    found = {"groundup": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"GPU": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return found
