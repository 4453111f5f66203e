"""Running the command line in a test: in this process, or in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groundup.cli import main


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every path below `root` with size and time of change: equal before and after if nothing was written."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))
    }


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must be refused: code 2, one line on standard error, none on standard output."""
    capsys.readouterr()
    code = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.count("\n") == 1, err
    assert err.startswith("groundup: error: ")
    return err.removeprefix("groundup: error: ").rstrip("\n")


def groundup(cwd: Path, *argv: object, **keywords) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "groundup.cli", *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **keywords.pop("env", {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, **keywords)
