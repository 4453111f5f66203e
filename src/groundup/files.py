"""Atomic files and directories: written aside, flushed to disk, renamed.

A reader sees the old content or the new, never a mixture, whatever happens in between (a crash, `kill -9`, a
full disk). POSIX: rename(2) replaces atomically within a file system; fsync(2) of the file before it and of the
directory after it makes the order hold across a power failure.
"""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` (str is written as UTF-8)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


@contextmanager
def directory_written_aside(target: Path) -> Generator[Path]:
    """Yield an empty directory beside `target`; when the block ends well, it takes `target`'s place.

    An existing `target` stays until then, and stays for good when the block raises. The exchange is two renames
    (POSIX cannot replace a full directory in one); between them only the old content under a `.old` name and the
    complete new content exist, so nothing is ever half-written.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for path in aside.rglob("*"):
            fsync_path(path)
        fsync_path(aside)
        if target.exists():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
            os.rename(aside, target)
            shutil.rmtree(old)
        else:
            os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_path(target.parent)
