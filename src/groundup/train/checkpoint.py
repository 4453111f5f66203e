"""Checkpoints on disk: checkpoints/step-NNNNNNNN/{model.safetensors, optimizer.safetensors, state.json}.

Under parallel.checkpoint = "dcp" the directories model.dcp and optimizer.dcp hold the same tensors as shards, one file
a rank (parallel/shards.py), and every rank adds the checksums of its own files.

checkpoints/best is a symbolic link to the one with the lowest validation loss, where a run keeps it.

A checkpoint is written aside, flushed, and takes its name by one rename; state.json is written last and holds size and
SHA-256 of the others. So a name that looks like a checkpoint either is complete or was damaged later, and reading
tells the two apart: what does not match is skipped with one line, and the newest complete one is taken. Tensors are
whole and carry the parameters' names, whatever the world size that wrote them.

Cost: one write, one read for the checksum (from the page cache), one fsync a file. Rejected: torch.save (pickle, and
a truncated file is found only when it is unpickled); a `latest` file (a second truth that can disagree).
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError
from groundup.files import directory_written_aside, fsync_path
from groundup.parallel.processes import World

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
BEST = "best"
MARGIN = 64 << 20
"""Bytes that must stay free beside a new checkpoint: rows, logs, and the file system's own."""
SHOWN_WITHIN = 60.0
"""Seconds after which every machine sees what one has made: NFS shows what it remembers for up to as long."""
ALONE = World(0, 1)
"""One process, which asks nobody."""


class IncompleteError(Exception):
    """A directory that cannot be used as a checkpoint; the message says why."""


class NotSavedError(UserError):
    """The disk did not take a checkpoint; `reason` says why."""

    def __init__(self, target: Path, reason: str):
        self.reason = reason
        super().__init__(
            f"cannot save {target}: {reason}; the checkpoints before it are kept: free space, then go on with --resume"
        )


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and what its state.json says."""

    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> Path:
        """Where MODEL or OPTIMIZER lies: a file of whole tensors, or a directory of shards."""
        shards = self.path / _shards_of(name)
        return shards if shards.is_dir() else self.path / name


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return directory / f"step-{step:08d}"


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps that have a directory, ascending; complete or not."""
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def save_checkpoint(
    directory: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    facts: dict[str, Any],
    world: World | None = None,
) -> None:
    """Write the checkpoint of `step` (parallel/state.py names its tensors); `facts` go into state.json.

    world None: this process writes whole tensors. Else every rank writes its own parts as shards; a collective. Rank 0
    makes the directory aside and renames it when all have written, so a rank that dies leaves no checkpoint.
    Raises NotSavedError when the disk does not take it; then nothing of the new checkpoint is left and the ones before
    it are untouched.
    """
    target, ranks = checkpoint_path(directory, step), world or ALONE
    with ExitStack() as stack, _saving(target):

        @_saving(target)
        def begin() -> Path:
            return stack.enter_context(directory_written_aside(target))

        @_saving(target)
        def finish() -> None:
            state = {"step": step, **facts, "files": {name: entry for part in parts for name, entry in part.items()}}
            (aside / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            for path in aside.glob("*.safetensors"):
                shutil.copymode(aside / STATE, path)  # safetensors makes them private whatever the umask
            stack.close()

        aside = ranks.on_rank_zero(begin)
        refuse_unshared(ranks, aside)
        for name, tensors in ((MODEL, weights), (OPTIMIZER, optimizer)):
            if world is None:
                # The format entry is what Hugging Face's loaders ask for.
                save_file(dict(tensors), aside / name, metadata={"format": "pt"})
            else:
                from groundup.parallel.shards import write_shards

                write_shards(tensors, aside / _shards_of(name))
        written = (path for path in sorted(aside.rglob("*")) if path.is_file())
        own = (path for path in written if _writer(path, ranks.size) == ranks.rank)
        parts = ranks.gather({str(path.relative_to(aside)): _size_and_checksum(path) for path in own})
        ranks.on_rank_zero(finish)


def refuse_unshared(world: World, path: Path) -> None:
    """Raise UserError naming a rank that does not see `path`, which rank 0 does; a collective."""
    end = time.monotonic() + SHOWN_WITHIN
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)
    unseen = [rank for rank, there in enumerate(world.gather(path.exists())) if not there]
    if unseen:
        raise UserError(
            f"rank {unseen[0]} does not see {path}, where rank 0 writes: to resume, and for parallel.checkpoint dcp, "
            "the run's directory must lie on a file system that all machines share"
        )


def _shards_of(name: str) -> str:
    return f"{_part(name)}.dcp"


def _part(name: str) -> str:
    """What a file of a checkpoint belongs to: model or optimizer."""
    return name.partition(".")[0]


def _writer(path: Path, world_size: int) -> int:
    """The rank that reads a file of shards for its checksum: the one that has just written it."""
    named = re.match(r"__(\d+)_", path.name)
    return int(named[1]) % world_size if named else 0


@contextmanager
def _saving(target: Path) -> Generator[None]:
    """The disk's refusal as one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NotSavedError(target, reason) from None


def read_checkpoint(
    path: Path, contents: Iterable[str] = (MODEL, OPTIMIZER), rank: int = 0, world_size: int = 1
) -> Checkpoint:
    """Check a checkpoint: sizes of all files, checksums of this rank's share of `contents`. Raises IncompleteError with
    the reason.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        step = int(state["step"])
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in state["files"].items()}
        if not {_part(MODEL), _part(OPTIMIZER)} <= {_part(name) for name in expected}:
            raise KeyError(MODEL, OPTIMIZER)
    except FileNotFoundError:
        raise IncompleteError(f"it has no {STATE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise IncompleteError(f"its {STATE} is not readable") from None
    for name, (size, _) in expected.items():
        if not (path / name).is_file():
            raise IncompleteError(f"it has no {name}")
        found = (path / name).stat().st_size
        if found != size:
            raise IncompleteError(f"{name} has {found:,} bytes, not {size:,}")
    wanted = {_part(name) for name in contents}
    for name in [name for name in expected if _part(name) in wanted][rank::world_size]:
        try:
            found = _size_and_checksum(path / name)
        except OSError as error:  # a bad disk, or the run deleted it just now
            raise IncompleteError(f"{name} cannot be read: {error.strerror}") from None
        if found["sha256"] != expected[name][1]:
            raise IncompleteError(f"{name} does not match its checksum")
    return Checkpoint(path, step, state)


def newest_complete(
    directory: Path,
    note: Callable[[str], None],
    contents: Iterable[str] = (MODEL, OPTIMIZER),
    world: World = ALONE,
) -> Checkpoint | None:
    """The complete checkpoint of the highest step; `note` gets a line for each newer one that is skipped.

    None where there is no checkpoint at all. A collective of `world`, whose ranks deal out the reading for checksums.
    Raises UserError when there are some, but none that is complete.
    """
    steps = world.on_rank_zero(lambda: checkpoint_steps(directory))
    for step in reversed(steps):
        path = checkpoint_path(directory, step)
        found, reason = None, ""
        try:
            found = read_checkpoint(path, contents, world.rank, world.size)
        except IncompleteError as error:
            reason = str(error)
        said = [(rank, text) for rank, text in enumerate(world.gather(reason)) if text]
        if not said:
            return found
        rank, reason = said[0]
        note(f"skipped {path}: {f'rank {rank}: ' if rank else ''}{reason}")
    if steps:
        raise UserError(
            f"none of the checkpoints in {directory} is complete (of the steps {', '.join(map(str, steps))}); nothing "
            "was changed: put back what is missing, or start a new run with another --out"
        )
    return None


@contextmanager
def opened(path: Path) -> Generator[tuple[dict[str, torch.Size], Callable[[str], Tensor]]]:
    """({name: shape}, what reads one whole tensor) of a safetensors file, or of a directory of shards."""
    if path.is_dir():
        from groundup.parallel.shards import Shards

        shards = Shards(path)
        yield {name: shards.shape(name) for name in shards.keys()}, shards.get_tensor  # noqa: SIM118
        return

    def read(name: str) -> Tensor:
        # A mapping of its own for each tensor: pages that were read would otherwise stay until the file's end, and a
        # resumed run's peak would be above the unbroken one's by up to the file's size.
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    with safe_open(path, framework="pt") as file:
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    yield shapes, read


def check_tensors(expected: Mapping[str, torch.Size], saved: Mapping[str, torch.Size], path: Path) -> None:
    """Raise UserError with the first name, in the model's order, whose shape is not the file's."""
    for name, shape in expected.items():
        if name not in saved:
            raise UserError(
                f"{path} does not match the model: it has no {name} {tuple(shape)}; check [model] in the config"
            )
        if saved[name] != shape:
            raise UserError(
                f"{path} does not match the model: {name} is {tuple(saved[name])} there and {tuple(shape)} in the "
                "model; check [model] in the config"
            )
    for name, shape in saved.items():
        if name not in expected:
            raise UserError(
                f"{path} does not match the model: the model has no {name} {tuple(shape)}; check [model] in the config"
            )


def mark_best(directory: Path, step: int) -> None:
    """Let `best` lead to the checkpoint of `step`, atomically."""
    aside = directory / f".{BEST}.{os.getpid()}.tmp"
    aside.unlink(missing_ok=True)
    os.symlink(checkpoint_path(directory, step).name, aside)
    os.replace(aside, directory / BEST)
    fsync_path(directory)


def best_step(directory: Path) -> int | None:
    """The step that `best` leads to; None where there is no such link."""
    link = directory / BEST
    match = re.fullmatch(r"step-(\d{8,})", os.readlink(link)) if link.is_symlink() else None
    return int(match[1]) if match else None


def lack_of_room(directory: Path, needed: int) -> str | None:
    """What to say when the disk has no room for a checkpoint of `needed` bytes; None when it has.

    The older ones go only after the new one is whole, so room is needed for one more than the run keeps.
    """
    directory.mkdir(exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free >= needed + MARGIN:
        return None
    return f"{free / 1e9:.2f} GB are free at {directory} and a checkpoint needs {(needed + MARGIN) / 1e9:.2f} GB"


def prune_checkpoints(directory: Path, newest: int, keep_last: int, keep_every: int = 0) -> None:
    """Delete all but the `keep_last` newest complete ones up to step `newest`; 0 keeps all.

    Those of steps that `keep_every` divides and the one that `best` leads to stay as well. Complete means here that all
    files have their sizes: reading them all for a checksum would cost too much. A damaged directory goes too, unless
    it is of a later step: then the run, which skipped it, has yet to get there.
    Each goes by a rename first, so that a kill in between leaves no half checkpoint under a checkpoint's name.
    """
    if not keep_last:
        return
    steps = [step for step in checkpoint_steps(directory) if step <= newest]
    complete = [step for step in steps if _has_its_sizes(checkpoint_path(directory, step))]
    kept = {*complete[-keep_last:], best_step(directory), *(s for s in complete if keep_every and s % keep_every == 0)}
    for step in steps:
        if step in kept:
            continue
        path = checkpoint_path(directory, step)
        going = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, going)
        shutil.rmtree(going)


def _has_its_sizes(path: Path) -> bool:
    try:
        read_checkpoint(path, contents=())
    except IncompleteError:
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed save or deletion left aside. Only for the process that holds the run's lock."""
    if directory.is_dir():
        for path in directory.iterdir():
            if re.fullmatch(r"\.step-\d+\.\d+\.(tmp|old)", path.name):
                shutil.rmtree(path)
            elif re.fullmatch(rf"\.{BEST}\.\d+\.tmp", path.name):
                path.unlink()


def _size_and_checksum(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
