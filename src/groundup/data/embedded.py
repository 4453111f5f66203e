"""The corpus that every machine already has: the source of the running Python's standard library.

The quickstart trains on it, so that the whole path runs without a download. Each `.py` file is a document. Left out
are site-packages (not the library), the tests (three times the size of the library itself, and repetitive), and two
packages of generated tables, `encodings` and `pydoc_data`. Files come in the order of a hash of their path: any
first part of the corpus is a fair mixture, the same on every machine with this Python version.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from groundup.data.corpus import SEPARATOR
from groundup.errors import UserError
from groundup.files import write_atomic

MAX_BYTES = 8_000_000
_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddedCorpus:
    """What `write_embedded_corpus` wrote."""

    path: Path
    documents: int
    bytes: int
    """UTF-8 bytes of the documents, separators not counted."""
    skipped: int
    """Files that are not UTF-8 text."""


def library_files(root: Path | None = None) -> list[Path]:
    """The library's `.py` files in the corpus' order. root: the library's folder (None: the running Python's)."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    return [root / p for p in sorted(paths, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest())]


def write_embedded_corpus(out: Path, max_bytes: int = MAX_BYTES, root: Path | None = None) -> EmbeddedCorpus:
    """Write the documents to the text file `out`, `<|endoftext|>` between them, up to `max_bytes` of text.

    The file records what a run was trained on, whatever Python resumes it. Raises UserError where the library is
    not there as source.
    """
    texts: list[bytes] = []
    total = skipped = 0
    for path in library_files(root):
        try:
            data = path.read_bytes()
            blank = not data.decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        if blank:
            continue
        if total + len(data) > max_bytes:
            break
        texts.append(data)
        total += len(data)
    if len(texts) < 2:
        raise UserError("this Python has no standard library in source form; name a text file with --corpus")
    write_atomic(out, SEPARATOR.encode().join(texts))
    return EmbeddedCorpus(out, len(texts), total, skipped)
