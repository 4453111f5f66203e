"""The ground floor: atomic files, and what an import may bring with it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from groundup.errors import UserError
from groundup.files import directory_written_aside, write_atomic


def write_directory(target: Path, text: str) -> None:
    with directory_written_aside(target) as aside:
        (aside / "a").write_text(text)


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "new" / "file"
    write_atomic(path, "é")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_atomic(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_directory_is_exchanged_only_when_complete(tmp_path: Path):
    target = tmp_path / "d"
    with directory_written_aside(target) as aside:
        (aside / "a").write_text("1")
        assert not target.exists()
    with directory_written_aside(target) as aside:
        (aside / "b").write_text("2")
        assert (target / "a").read_text() == "1"
    assert [p.name for p in target.iterdir()] == ["b"]

    def fails() -> None:
        with directory_written_aside(target) as aside:
            (aside / "c").write_text("3")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems take two renames")
def test_a_reader_finds_the_directory_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names are exchanged in one step, not by renames between which the target is away."""
    write_directory(tmp_path / "d", "1")
    monkeypatch.setattr("os.rename", lambda *_: pytest.fail("the target left its place"))
    write_directory(tmp_path / "d", "2")
    assert (tmp_path / "d" / "a").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_without_an_exchange_the_old_directory_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target, real = tmp_path / "d", os.rename
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # a system without renameat2

    def fails_second(old: Path, new: Path) -> None:
        if new == target and old.suffix == ".tmp":
            raise KeyboardInterrupt
        real(old, new)

    write_directory(target, "1")
    write_directory(target, "2")
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", fails_second)
        with pytest.raises(KeyboardInterrupt):
            write_directory(target, "3")
    assert (target / "a").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_writer_killed_between_its_two_renames_loses_nothing(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old, new = tmp_path / f".d.{dead.pid}.old", tmp_path / f".d.{dead.pid}.tmp"
    write_directory(old, "1")
    new.mkdir()

    def fails() -> None:
        with directory_written_aside(tmp_path / "d"):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fails()
    assert (tmp_path / "d" / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    write_directory(old, "0")  # killed after its second rename: the new one is in place
    write_directory(tmp_path / "d", "2")
    assert (tmp_path / "d" / "a").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_what_killed_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".d.{dead.pid}.tmp", f".d.{os.getppid()}.tmp", f".e.{dead.pid}.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    write_directory(tmp_path / "d", "1")
    assert {p.name for p in tmp_path.iterdir()} == {"d", f".d.{os.getppid()}.tmp", f".e.{dead.pid}.tmp"}


def test_a_link_keeps_leading_to_the_directory_and_a_file_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_directory(tmp_path / "link", "1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "1"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file: is a file; name a directory"):
        write_directory(tmp_path / "file", "2")
    assert (tmp_path / "file").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"real", "link", "file"}


@pytest.mark.parametrize("write", [write_atomic, write_directory])
def test_a_full_disk_is_reported_with_a_name(write: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """write(2) and fsync(2) know no file name, so the system's error has none."""
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space") as caught:
        write(tmp_path / "target", "new")
    assert caught.value.filename == str(tmp_path / "target")


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import groundup, groundup.config", ["torch", "jaxtyping", "numpy", "matplotlib"]),
        ("from groundup import Tokenizer", ["torch", "jaxtyping", "matplotlib"]),
        ("import groundup.data", ["torch", "jaxtyping", "matplotlib"]),
    ],
)
def test_light_rooms_import_nothing_heavy(code: str, forbidden: list[str]):
    program = f"{code}; import sys; sys.exit(', '.join(m for m in {forbidden} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_imports_and_trains_with_triton_hidden():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import groundup, torch\n"
        "from groundup import TransformerLM, ModelConfig\n"
        "import groundup.train, groundup.generate, groundup.cli\n"
        "model = TransformerLM(ModelConfig(vocab_size=9, d_model=8, n_heads=2, n_layers=1, context_length=8))\n"
        "x = torch.zeros(1, 8, dtype=torch.int64); model(x, x).backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
