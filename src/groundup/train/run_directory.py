"""A run on disk: config.toml, tokenizer.json, metrics.jsonl and checkpoints/ in one directory.

Everything a run needs to be understood, resumed, evaluated or asked to generate lies in it; only resuming and
evaluating also need the token files. One process at a time holds its lock (flock on the directory: it goes with the
process, so a kill leaves nothing to clean up).
"""

import fcntl
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from groundup.config import ParallelConfig, RunConfig, dump_toml, load_toml
from groundup.errors import UserError
from groundup.files import write_atomic
from groundup.tokenizer import Tokenizer
from groundup.train.checkpoint import BEST, remove_leftovers

DERIVED = frozenset(
    {
        *("model.vocab_size", "model.n_kv_heads", "model.d_ff", "optim.muon_lr"),
        *("train.steps", "train.tokens", "train.micro_batch_size", "train.grad_accumulation"),
        *("train.global_batch_size", "train.device", "train.precision", "train.compile_unit"),
    }
)
"""Fields whose default means "derive it": left so on a resume they ask for nothing, so they contradict nothing."""

HARMLESS = frozenset(
    {
        "data.path",
        *("train.device", "train.eval_every", "train.eval_batches", "train.save_every", "train.keep_last"),
        *("train.keep_every", "train.keep_best", "train.early_stopping", "train.max_skipped_steps"),
        *("train.peak_tflops", "train.sample_prompt", "train.sinks", "train.memory_gib"),
        # The same global batch in other pieces: how a run goes on with another number of processes.
        *("train.micro_batch_size", "train.grad_accumulation", "train.compile_unit", "train.cuda_graph"),
        *(f"parallel.{field.name}" for field in fields(ParallelConfig)),
    }
)
"""Fields a user may edit in a run's config.toml between two resumes: they do not change what is learnt."""

OF_THE_MACHINE = ("parallel.", "train.cuda_graph")
"""Fields that a resume takes from its own command line, as it may run elsewhere."""


class RunDirectory:
    """The paths of one run."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.metrics.exists() or self.checkpoints.exists()

    def refuse_second_run(self) -> None:
        """Raise UserError when a run was started here: a new one would overwrite it."""
        if self.holds_run():
            raise UserError(f"{self.path} holds a run; add --resume to go on with it, or give another --out")

    def load_config(self) -> RunConfig:
        """The run's resolved configuration. Raises UserError when this is no run."""
        if not self.config.exists():
            raise UserError(f"{self.path} holds no run (it has no config.toml); give the --out of groundup train")
        return load_toml(self.config, RunConfig)

    def load_tokenizer(self) -> Tokenizer:
        """The run's own copy of the tokenizer."""
        if not self.tokenizer.exists():
            raise UserError(f"{self.path} has no tokenizer.json; copy the one of the token files there")
        return Tokenizer.load(self.tokenizer)

    def begin(self, config: RunConfig, tokenizer_json: Path) -> None:
        """Start the run at step 0: empty metrics, copies of tokenizer and configuration.

        Damaged checkpoints stay until the run writes theirs again.
        """
        write_atomic(self.metrics, b"")
        (self.checkpoints / BEST).unlink(missing_ok=True)
        write_atomic(self.tokenizer, tokenizer_json.read_bytes())
        write_atomic(self.config, dump_toml(config))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the directory against a second process and clear away what a killed one left aside."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {self.path}; wait for it or stop it") from None
            remove_leftovers(self.checkpoints)
            for path in self.path.iterdir():
                if re.fullmatch(r"\.(config\.toml|tokenizer\.json|metrics\.jsonl)\.\d+\.tmp", path.name):
                    path.unlink()
            yield
        finally:
            os.close(handle)


def flat_fields(config: RunConfig) -> dict[str, Any]:
    """`{"model.d_model": 512, …}`; tuples as lists, as JSON gives them back."""
    return {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section, table in asdict(config).items()
        for name, value in table.items()
    }


def changed_fields(saved: RunConfig, given: RunConfig) -> list[tuple[str, Any, Any]]:
    """(name, saved value, given value) of every field that `given` asks to be otherwise than `saved`.

    Fields that `given` leaves to be derived ask for nothing. Paths are compared as places, not as text.
    """
    before, after, default = flat_fields(saved), flat_fields(given), flat_fields(RunConfig())
    changed = []
    for name, value in after.items():
        if value == before[name] or (name in DERIVED and value == default[name]) or name.startswith(OF_THE_MACHINE):
            continue
        if name == "data.path" and Path(value).resolve() == Path(before[name]).resolve():
            continue
        changed.append((name, before[name], value))
    return changed


def refuse_changes(saved: RunConfig, given: RunConfig, out: Path) -> None:
    """Raise UserError naming the first field that a resume was given with another value."""
    changed = changed_fields(saved, given)
    if changed:
        name, before, after = changed[0]
        more = f" (also: {', '.join(other for other, _, _ in changed[1:])})" if changed[1:] else ""
        raise UserError(
            f"{name} is {before!r} in {out / 'config.toml'} and {after!r} was given{more}; a resumed run keeps its "
            "configuration: leave it out, or start a new run with another --out"
        )


def refuse_edits(trained: dict[str, Any], config: RunConfig, out: Path) -> None:
    """Raise UserError when config.toml no longer says what the checkpoint was trained with (`trained`, flat)."""
    trained = {**flat_fields(RunConfig()), **trained}  # a field that is newer than the checkpoint had its default
    for name, value in flat_fields(config).items():
        if name not in HARMLESS and trained[name] != value:
            raise UserError(
                f"{out / 'config.toml'} says {name} = {value!r}, but the checkpoint was trained with "
                f"{trained[name]!r}; put it back, or start a new run with another --out"
            )
