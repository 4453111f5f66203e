"""What a run tells its watcher, and the watcher that shows it to a person.

`Progress` is the protocol: train() calls its methods, each of which does nothing here. `ConsoleProgress` draws one live
line on a terminal, without what a narrow one has no room for; without a terminal (a log file, a batch job) it prints
about twenty plain lines a run.
"""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from groundup.train.evaluate import bits_per_byte
from groundup.train.plan import Plan

PLAIN_LINES = 20


class Progress:
    """A silent watcher. Entered before the first call, left after the last, also when the run fails."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan
        for line in plan.lines():
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
        steps = self._plan.config.train.steps
        every = max(1, steps // PLAIN_LINES)
        if row["step"] % every == 0 or row["step"] in (self._plan.first_step, steps):
            self._print(self._line(self._plan, row))

    def on_eval(self, row: dict[str, Any]) -> None:
        self._valid = f"valid {row['valid_loss']:.4f}"
        self._print(
            f"step {row['step']:,}: validation loss {row['valid_loss']:.4f}, "
            f"{row['valid_bits_per_byte']:.4f} bits per byte"
        )
        if row.get("sample"):
            self._print(f"sample: {' '.join(row['sample'].split())}")

    def _line(self, plan: Plan, row: dict[str, Any], width: int | None = None) -> str:
        """The status line; with a `width`, without its least important parts where it would be longer."""
        loss, norm = row["loss"], row["grad_norm"]
        bits = "" if loss is None else f"{bits_per_byte(loss, plan.train_bytes_per_token):.3f} bits/byte"
        parts = {
            "step": f"step {row['step']:,}/{plan.config.train.steps:,}",
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
