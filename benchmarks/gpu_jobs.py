"""What the scripts for a rented GPU machine share: rows that are on disk at once, the GPUs there are, jobs that end.

A script's results are one file of JSON lines. Every process of it appends its rows itself, so a parent that is killed
loses nothing, a second call with the same file adds to it, and files of several machines are joined by `cat`.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))


def append(path: Path, **row: Any) -> None:
    """A row at the end of `path`, on disk when this returns; several processes may do so at once."""
    line = json.dumps(row).encode() + b"\n"
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":  # whoever wrote last was killed in the middle of a row
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All whole rows of `path`."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return found


def gpus(count: int = 0) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one a GPU: the caller's list, else all; `count`: the first ones."""
    import torch

    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = listed or [*map(str, range(max(1, count, torch.cuda.device_count())))]
    return names[: count or None]


def start(command: list[str], gpu: str, log: Path, **environment: str) -> subprocess.Popen:
    """A process that sees one GPU, its output in `log`. It leads a group of its own, which `stop` ends with it.

    Not a session: those outlive the command that a machine's owner stops.
    """
    variables = os.environ | environment | {"CUDA_VISIBLE_DEVICES": gpu}
    with log.open("ab") as output:  # the process has its own handle
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables, process_group=0)


def stop(process: subprocess.Popen) -> None:
    """Kill a process with what it started and wait, so that the GPU is free when this returns."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as Ctrl-C does, through its `finally` blocks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
