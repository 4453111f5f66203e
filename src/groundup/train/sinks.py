"""Copies of the rows for TensorBoard and Weights & Biases, as train.sinks asks. metrics.jsonl stays the truth.

Their packages are imported only when asked for. A sink that fails in the middle of a run is dropped with one line: a
dashboard must not end a training run. W&B runs offline unless WANDB_MODE says otherwise, because an unattended run must
neither wait for a network nor ask for a login; `wandb sync` uploads it, during the run or later. On a resume both go on
in the same place: TensorBoard hides what it had after the checkpoint's step, W&B resumes the run of the same id.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from typing import Any

from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.rows import Row
from groundup.train.run_directory import RunDirectory, flat_fields


def check_packages(names: Iterable[str]) -> None:
    """Raise UserError for the first sink whose package is not installed."""
    for name in names:
        try:
            import_module(KINDS[name].module)
        except ImportError:
            raise UserError(
                f"train.sinks asks for {name}, which is not installed: pip install {name}, or leave it out"
            ) from None


class Sinks:
    """The sinks `names` of a run, a context; `step` steps are done."""

    def __init__(
        self, names: Iterable[str], config: RunConfig, run: RunDirectory, step: int, note: Callable[[str], None]
    ):
        self._note = note
        self._sinks: dict[str, Any] = {name: KINDS[name](config, run, step) for name in names}

    def write(self, row: Row) -> None:
        """Give the row to every sink; one that fails gets no more."""
        for name in list(self._sinks):
            self._try(name, "write", row)

    def _try(self, name: str, what: str, *args: Any) -> None:
        try:
            getattr(self._sinks[name], what)(*args)
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._note(f"{name} gets no more rows: {reason}; metrics.jsonl has them all")
            with suppress(Exception):
                self._sinks.pop(name).close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._sinks):
            self._try(name, "close")


class TensorBoard:
    """Event files in RUN/tensorboard: one curve a field, by step."""

    module = "torch.utils.tensorboard"  # which needs the package tensorboard

    def __init__(self, config: RunConfig, run: RunDirectory, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)
        self._writer.add_text("config", "\n".join(f"    {k} = {v!r}" for k, v in flat_fields(config).items()), step)

    def write(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if row.get("sample"):
            self._writer.add_text("sample", row["sample"], row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B in RUN/wandb, its id made from the run's path, its fields as metrics by step."""

    module = "wandb"

    def __init__(self, config: RunConfig, run: RunDirectory, step: int):
        wandb: Any = import_module("wandb")
        path = run.path.resolve()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "groundup"),
            name=path.name,
            id=sha256(str(path).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(path),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={name: value for name, value in flat_fields(config).items() if name != "data.path"},
            settings=wandb.Settings(silent=True, disable_git=True, x_disable_meta=True, host="local"),
        )
        # A step of a row is a field: W&B's own counter only grows, and an evaluation comes after its step's row.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log({"step": row["step"], **_numbers(row)})

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def _numbers(row: Row) -> dict[str, float]:
    """What a curve can show of a row; flags as 1."""
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
