"""One line on a terminal that says how far a long phase is: share, rate, time left. Silent where nobody looks.

Rejected: rich.progress, no shorter with its own columns, and 0.18 s to import for commands that start in 0.2.
"""

import sys
import time
from typing import TextIO

_INTERVAL_SECONDS = 0.2


class ProgressLine:
    """Callable with (phase, done, total), as the tokenizer's training and `tokenize_corpus` tell it: bytes, or merges.

    A context that clears its line.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._visible = self._stream.isatty()
        self._phase = ""
        self._started = self._shown = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible and self._phase:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._started, self._shown = phase, now, 0.0
        if self._visible and now - self._shown >= _INTERVAL_SECONDS:
            self._shown = now
            self._stream.write(f"\r\x1b[K{self.text(done, total, now - self._started)}")
            self._stream.flush()

    def text(self, done: int, total: int, seconds: float) -> str:
        """The line: phase, percent, rate, seconds left."""
        unit, size = ("merges/s", 1.0) if self._phase == "merge" else ("MB/s", 1e6)
        line = f"{self._phase} {done / max(total, 1):4.0%}"
        if not done or not seconds:
            return line
        left = (total - done) * seconds / done
        return f"{line}  {done / seconds / size:,.0f} {unit}  {left:,.0f} s left"
