"""The ground floor: atomic files, and what an import may bring with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from groundup.files import directory_written_aside, write_atomic


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
