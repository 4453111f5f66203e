"""Opening a token directory: what is damaged is refused in one line; reading leaves memory flat."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import EOT, byte_tokenizer

from groundup.data import TokenData, WindowSampler, tokenize_corpus, validation_windows
from groundup.data.npy import NpyWriter, open_npy
from groundup.errors import UserError


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "a.txt").write_text(EOT.join(f"document number {i}" for i in range(100)))
    tokenize_corpus([tmp_path / "a.txt"], None, byte_tokenizer(), tmp_path / "tokens", 0.1)
    return tmp_path / "tokens"


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("sizes", [[], [1], [5, 0, 1000], [12345] * 3])
def test_a_streamed_npy_is_numpys_own_format(tmp_path, dtype, sizes):
    parts = [np.random.default_rng(n).integers(0, 60000, n).astype(dtype) for n in sizes]
    with NpyWriter(tmp_path / "a.npy", np.dtype(dtype)) as writer:
        for part in parts:
            writer.append(part)
    whole = np.concatenate([np.empty(0, dtype), *parts])
    assert np.array_equal(np.load(tmp_path / "a.npy"), whole)
    assert np.load(tmp_path / "a.npy").dtype == dtype
    with open(tmp_path / "a.npy", "rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == (whole.shape, False, np.dtype(dtype))
        assert file.tell() == 128
    if len(whole):
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
        assert isinstance(mapped, np.memmap)
        assert np.array_equal(mapped, whole)
        assert np.array_equal(open_npy(tmp_path / "a.npy", dtype, len(whole)), whole)


def test_opens_what_was_written(directory):
    data = TokenData.open(directory)
    assert isinstance(data.train, np.memmap)
    assert data.fingerprint == byte_tokenizer().fingerprint == data.tokenizer().fingerprint
    assert data.vocab_size == 257
    data.check_tokenizer(byte_tokenizer())
    with pytest.raises(ValueError, match="read-only"):
        data.train[0] = 1


def test_the_digest_tells_data_apart(directory, tmp_path):
    data = TokenData.open(directory)
    shutil.copytree(directory, tmp_path / "copy")
    assert TokenData.open(tmp_path / "copy").digest == data.digest
    tokenize_corpus([tmp_path / "a.txt"], None, byte_tokenizer(), tmp_path / "other", 0.2)
    assert TokenData.open(tmp_path / "other").digest != data.digest


def test_another_tokenizer_is_refused(directory):
    byte_tokenizer(EOT, "<|more|>").save(directory.parent / "other")
    shutil.copy(directory.parent / "other" / "tokenizer.json", directory / "tokenizer.json")
    data = TokenData.open(directory)
    with pytest.raises(UserError, match=r"tokenizer\.json does not match the tokens"):
        data.tokenizer()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="missing"):
        data.tokenizer()
    with pytest.raises(UserError, match="the run's tokenizer does not match"):
        data.check_tokenizer(byte_tokenizer("<|x|>"), "the run's tokenizer")


def edit(change):
    def damage(directory):
        path = directory / "meta.json"
        meta = json.loads(path.read_text())
        change(meta)
        path.write_text(json.dumps(meta))

    return damage


def save(name, array):
    return lambda directory: np.save(directory / name, array)


DAMAGES = {
    "no meta": (lambda d: (d / "meta.json").unlink(), "meta.json is missing"),
    "meta cut": (lambda d: os.truncate(d / "meta.json", 20), "cannot be read as JSON"),
    "meta foreign": (lambda d: (d / "meta.json").write_text("[]"), "not a token directory of the format"),
    "meta without split": (edit(lambda m: m["splits"].pop("valid")), "'valid' is missing"),
    "meta without count": (edit(lambda m: m["splits"]["train"].pop("tokens")), "'tokens' is missing"),
    "meta with text": (edit(lambda m: m["splits"]["train"].update(tokens="9")), "wrong kind"),
    "meta other dtype": (edit(lambda m: m.update(dtype="uint32")), "dtype uint32 does not fit vocab_size 257"),
    "meta other count": (edit(lambda m: m["splits"]["train"].update(tokens=9)), "but meta.json says 9"),
    "meta other eot": (edit(lambda m: m.update(eot_id=7)), "disagree"),
    "no tokens": (lambda d: (d / "train.npy").unlink(), "train.npy: the file is missing"),
    "tokens cut": (lambda d: os.truncate(d / "train.npy", 300), "train.npy: not a complete .npy file"),
    "header cut": (lambda d: os.truncate(d / "valid.npy", 50), "valid.npy: not a complete .npy file"),
    "empty": (lambda d: os.truncate(d / "valid.npy", 0), "valid.npy: not a complete .npy file"),
    "not npy": (lambda d: (d / "train.npy").write_bytes(b"x" * 500), "train.npy: not a complete .npy file"),
    "pickle": (save("train.npy", np.array([None, 1])), "train.npy: not a complete .npy file"),
    "npz": (lambda d: (np.savez(d / "a.npz", 1), os.replace(d / "a.npz", d / "train.npy")), "not a one-dim"),
    "2-D": (save("train.npy", np.zeros((2, 3), np.uint16)), "train.npy: not a one-dimensional array of uint16"),
    "other dtype": (save("train.npy", np.zeros(6, np.int64)), "train.npy: not a one-dimensional array of uint16"),
    "docs other": (save("valid.docs.npy", np.arange(10, dtype=np.uint64) + 9**9), "offsets disagree"),
    "docs late": (save("valid.docs.npy", np.arange(1, 11, dtype=np.uint64)), "offsets disagree"),
    "docs short": (save("valid.docs.npy", np.zeros(1, np.uint64)), "holds 1 items, but meta.json says 10"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_line(directory, name):
    damage, message = DAMAGES[name]
    damage(directory)
    with pytest.raises(UserError, match=message) as error:
        TokenData.open(directory)
    assert "\n" not in str(error.value)
    assert "groundup tokenize" in str(error.value)


def test_no_directory(tmp_path):
    with pytest.raises(UserError, match="no such token directory"):
        TokenData.open(tmp_path / "nothing")


def test_mapped_batches_are_those_of_memory(directory):
    data = TokenData.open(directory)
    held = np.array(data.train)
    for order in ("shuffled", "random"):
        sampler = WindowSampler(len(held), 13, 9, seed=3, order=order)
        for step in range(20):
            for a, b in zip(sampler.batch(data.train, step), sampler.batch(held, step), strict=True):
                assert np.array_equal(a, b)
    mapped, plain = (list(validation_windows(tokens, 13, 4)) for tokens in (data.train, held))
    assert all(np.array_equal(a[i], b[i]) for a, b in zip(mapped, plain, strict=True) for i in (0, 1))


RESIDENT = """
import numpy as np, sys
from groundup.data import WindowSampler, validation_windows
from groundup.data.npy import open_npy
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
count = int(sys.argv[2])
tokens = open_npy(sys.argv[1], "uint16", count)
sampler = WindowSampler(count, 1024, 32)
sampler.batch(tokens, 0)
before = resident()
peak = before
for step in range(int(sys.argv[3])):
    sampler.batch(tokens, step)
    peak = max(peak, resident())
for number, _ in zip(range(int(sys.argv[3])), validation_windows(tokens, 1024, 32)):
    peak = max(peak, resident())
print(peak - before)
"""


def growth(path: Path, count: int, steps: int) -> float:
    """Largest growth of resident memory, in MB, over training and evaluation batches of a sparse file."""
    with NpyWriter(path, np.dtype(np.uint16)) as writer:
        writer.count = count
    os.truncate(path, 128 + 2 * count)
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, path, str(count), str(steps)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_stays_flat(tmp_path):
    """A 200 MB file read through: a plain memory map would grow by nearly that much."""
    assert growth(tmp_path / "a.npy", 100_000_000, 400) < 10


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_stays_flat_over_a_file_of_4_gb(tmp_path):
    assert growth(tmp_path / "a.npy", 2_000_000_000, 5_000) < 10
