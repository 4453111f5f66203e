"""Atomic files and directories: written aside, flushed to disk, renamed.

A reader sees the old content or the new, never a mixture, whatever happens in between (a crash, `kill -9`, a
full disk). POSIX: rename(2) replaces atomically within a file system; fsync(2) of the file before it and of the
directory after it makes the order hold across a power failure. A full directory is replaced by exchanging two names,
which Linux does in one step; elsewhere it takes two renames.
"""

import ctypes
import os
import re
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from groundup.errors import UserError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` (str is written as UTF-8). An OSError names the file it is about."""
    with file_written_aside(path) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def file_written_aside(path: Path) -> Generator[Path]:
    """Yield a name beside `path` for a file to write; when the block ends well, that file takes `path`'s place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _named(path):
            yield aside
            fsync_path(aside)
            os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


@contextmanager
def directory_written_aside(target: Path) -> Generator[Path]:
    """Yield an empty directory beside `target`; when the block ends well, it takes `target`'s place.

    An existing `target` stays until then, and stays for good when the block raises; of a symbolic link the directory
    it leads to is replaced. What a killed process left aside for this `target` is deleted first; the old content,
    if it was moved away and nothing took its place, is put back. Raises UserError where `target` is a file; an OSError
    names `target` where the system names nothing.
    """
    target = Path(target).resolve()
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    aside.mkdir()
    try:
        with _named(target):
            yield aside
            for path in aside.rglob("*"):
                fsync_path(path)
            fsync_path(aside)
            if target.exists():
                _exchange(aside, target)
            else:
                os.rename(aside, target)
            fsync_path(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # the old content, or the unfinished new one


def check_replaceable(out: Path, files: Collection[str], maker: str) -> None:
    """Raise UserError unless `out` is free, or a directory with nothing but `files`, the names that `maker` writes.

    The whole directory will be exchanged for a new one, so a stranger's file in it would be lost.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file, not a directory; give another path")
    strangers = sorted(path.name for path in out.iterdir() if path.name not in files)
    if strangers:
        raise UserError(f"--out {out} holds {strangers[0]}, which {maker} did not write; give another directory")


def _exchange(a: Path, b: Path) -> None:
    """Let two directories change names: in one step where the system can (Linux on most file systems), else in three.

    Rejected: rename(2) over `b`, which POSIX allows for an empty directory only.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 and renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return
    between = b.with_name(f".{b.name}.{os.getpid()}.old")
    os.rename(b, between)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(between, b)
        raise
    os.rename(between, a)


def _remove_leftovers(target: Path) -> None:
    """Delete what writers of `target` left beside it when they were killed: their process is gone.

    One that was killed between the two renames of `_exchange` left the old directory as .old alone: it comes back.
    """
    for path in target.parent.iterdir():
        left = re.fullmatch(rf"\.{re.escape(target.name)}\.(\d{{1,9}})\.(tmp|old)", path.name)
        if not left or _is_another(int(left[1])):
            continue
        if left[2] == "old" and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_another(pid: int) -> bool:
    """Whether `pid` is a living process other than this one."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it lives and belongs to someone else
        return True
    return True


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Put `path` into an OSError without a file name, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
