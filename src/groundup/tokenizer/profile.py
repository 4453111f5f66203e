"""Where training spends time and memory: by phase for the Rust core, by function for the pure-Python ladder.

Phases of the core are told apart by the trainer's progress: `count` ends with its last report, then comes `merge`, and
`build` is the rest (the vocabulary and the encoder made of the merges). Memory is sampled every 5 ms by a thread and
counts the process's anonymous pages (Linux), not the memory-mapped text, which the system can take back at any time;
elsewhere all resident pages.

The ladder runs under cProfile, its worker processes too: each call in a worker is profiled there, and the numbers are
added up. cProfile makes Python code about twice as slow, so shares count, not seconds.
"""

import cProfile
import pstats
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from groundup.tokenizer import ladder
from groundup.tokenizer.ladder import parallel, streaming
from groundup.tokenizer.sources import text_files
from groundup.tokenizer.tokenizer import Tokenizer

SAMPLE_SECONDS = 0.005


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; all resident memory where the system does not tell them apart."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        import psutil

        return psutil.Process().memory_info().rss


class Phases:
    """Seconds, work done and peak memory of consecutive phases; a context manager that samples meanwhile."""

    def __init__(self, first: str) -> None:
        self.name = first
        self.rows: dict[str, dict[str, Any]] = {}
        self._since = time.perf_counter()
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())

    def end(self, following: str, done: int = 0) -> None:
        """The present phase is over (or over so far); what comes is `following`."""
        now = time.perf_counter()
        row = self.rows.setdefault(self.name, {"phase": self.name, "seconds": 0.0, "done": 0, "peak_bytes": 0})
        row["seconds"] += now - self._since
        row["done"] = max(row["done"], done)
        row["peak_bytes"] = max(row["peak_bytes"], self._peak, anonymous_bytes())
        self.name, self._since, self._peak = following, now, 0

    def __enter__(self) -> "Phases":
        self._since = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def profile_core(
    files: Sequence[Path], vocab_size: int, special_tokens: Sequence[str], threads: int
) -> tuple[list[dict[str, Any]], Tokenizer]:
    """Train; rows with phase, seconds, done (bytes or merges), peak_bytes and rate (a second)."""
    before = anonymous_bytes()
    with Phases("count") as phases:

        def progress(phase: str, done: int, total: int) -> None:
            # A report about a phase is about time that has passed in it.
            phases.name = phase
            phases.end(phase if done < total else {"count": "merge"}.get(phase, "build"), done)

        tokenizer = Tokenizer.train(files, vocab_size, special_tokens, threads, progress=progress)
        phases.name = "build" if phases.rows.get("merge") else phases.name
        phases.end("")
    rows = list(phases.rows.values())
    for row in rows:
        row["rate"] = row["done"] / row["seconds"] if row["seconds"] else 0.0
        row["peak_bytes"] = max(0, row["peak_bytes"] - before)
    return rows, tokenizer


class Profiled:
    """A function that runs under cProfile, in whatever process, and leaves its numbers in a folder."""

    def __init__(self, function: Callable, folder: Path) -> None:
        self.function = function
        self.folder = folder

    def __call__(self, *arguments: Any) -> Any:
        profile = cProfile.Profile()
        try:
            return profile.runcall(self.function, *arguments)
        finally:
            profile.dump_stats(self.folder / f"{uuid4().hex}.stats")


def profile_ladder(
    step: str, files: Sequence[Path], vocab_size: int, special_tokens: Sequence[str], processes: int, top: int
) -> list[dict[str, Any]]:
    """The `top` functions by their own time: function, calls, own and cumulative seconds, all processes added up."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder)
        for file in text_files(files):
            if step == "parallel":
                worker = Profiled(parallel.count_part, stats)
                arguments = (file, vocab_size, special_tokens, processes, worker)
            elif step == "streaming":
                worker = Profiled(streaming.count_words, stats)
                arguments = (file, vocab_size, special_tokens, processes, streaming.BLOCK_BYTES, worker)
            else:
                arguments = (file, vocab_size, special_tokens)
            Profiled(ladder.STEPS[step], stats)(*arguments)
        total = pstats.Stats(*map(str, stats.glob("*.stats")))
    return _rows(total, top)


def _rows(stats: pstats.Stats, top: int) -> list[dict[str, Any]]:
    table: dict = stats.stats  # pyrefly: ignore[missing-attribute] (not in the stubs)
    rows = [
        {
            "function": name if file == "~" else f"{Path(file).name}:{line} {name}",
            "calls": calls,
            "own_seconds": own,
            "cumulative_seconds": cumulative,
        }
        for (file, line, name), (_, calls, own, cumulative, _) in table.items()
        if "acquire" not in name  # one process waiting for another is no work
    ]
    return sorted(rows, key=lambda row: -row["own_seconds"])[:top]
