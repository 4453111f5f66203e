"""One-dimensional `.npy` files: written while their length is unknown, and read without filling memory.

Writing: the header (numpy.lib.format, version 1) has a fixed size and is written again at the end with the final shape.

Reading: a memory map. Its pages can be reclaimed at any time, yet they count as the process's resident memory, which
within an epoch grows to the size of the file: some job schedulers then kill the job. `release_pages` unmaps what a
batch touched (madvise MADV_DONTNEED); the page cache keeps the data, so reading it again costs a minor fault. Cost:
about a microsecond a window. Rejected: a new map for every batch (it needs the path where only the array is at hand).
"""

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np

from groundup.errors import UserError

HEADER_BYTES = 128
# A fault also maps the pages around it that are cached: up to 64 KiB either side (Linux, fault_around_bytes).
_FAULT_BYTES = 1 << 16


def _header(dtype: np.dtype, count: int) -> bytes:
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    prefix = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return prefix + text.ljust(HEADER_BYTES - 11).encode() + b"\n"


class NpyWriter:
    """Appends to a new 1-D `.npy` file; a context manager. `count` items so far, `hexdigest` of their bytes."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.count = 0
        self._hash = hashlib.sha256()
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._file.write(_header(self.dtype, 0))

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype)
        self._file.write(data.data)
        self._hash.update(data.data)
        self.count += len(data)

    def sync(self) -> None:
        """Flush to disk what has been appended. May run beside `append`, so that little is left for the end."""
        os.fsync(self._file.fileno())

    @property
    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        with self._file:
            if exc_type is None:
                self._file.seek(0)
                self._file.write(_header(self.dtype, self.count))


def open_npy(path: Path, dtype: str, count: int) -> np.ndarray:
    """Memory-map the 1-D array at `path`, read-only. Raises UserError unless it holds `count` items of `dtype`."""
    again = "the token directory is damaged: run `groundup tokenize` again"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: the file is missing; {again}") from None
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a complete .npy file ({reason}); {again}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise UserError(f"{path}: not a one-dimensional array of {dtype}; {again}")
    if len(array) != count:
        raise UserError(f"{path}: holds {len(array)} items, but meta.json says {count}; {again}")
    return array


def release_pages(array: np.ndarray, starts: np.ndarray, length: int) -> None:
    """Take array[start : start + length] of each start out of resident memory, where `array` is a memory map.

    The data stays readable. Does nothing for an array in memory, for a view of a map, or where the system has no
    MADV_DONTNEED (Windows).
    """
    mapping = array.base
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or not isinstance(array, np.memmap) or not isinstance(mapping, mmap.mmap):
        return
    if array.mode != "r":  # a copy-on-write map would lose what was written to it
        return
    lead = len(mapping) - array.nbytes  # the map starts at a page boundary before the first item
    firsts = (starts * array.itemsize + lead) // _FAULT_BYTES * _FAULT_BYTES - _FAULT_BYTES
    ends = np.minimum((starts + length) * array.itemsize + lead + _FAULT_BYTES, len(mapping))
    for first, end in zip(np.maximum(firsts, 0).tolist(), ends.tolist(), strict=True):
        mapping.madvise(advice, first, end - first)
