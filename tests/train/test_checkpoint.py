"""Checkpoints: damaged ones are skipped, full disks lose nothing, what does not fit is named."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_runs import Crash, Recorder, crash, drop_a_moment, read_metrics, tiny_config, write_tokens

from groundup.config import dump_toml
from groundup.errors import UserError
from groundup.model.rope import RotaryEmbedding
from groundup.train import load_run, train
from groundup.train.checkpoint import MODEL, OPTIMIZER, STATE, checkpoint_steps

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(tokens), out)
    return out


@pytest.fixture(scope="module")
def crashed_once(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        train(tiny_config(tokens), out, progress=Recorder({8: crash}))
    return out


@pytest.fixture
def crashed(crashed_once: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 3 and 6, dead after step 8."""
    return Path(shutil.copytree(crashed_once, tmp_path / "run"))


def truncate(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, (path / name).stat().st_size - 1)

    return damage


def flip(path: Path) -> None:
    """One bit of the last weight."""
    data = bytearray((path / MODEL).read_bytes())
    data[-1] ^= 1
    (path / MODEL).write_bytes(data)


DAMAGE = {
    "no state": (lambda path: (path / STATE).unlink(), f"it has no {STATE}"),
    "half a state": (lambda path: os.truncate(path / STATE, 100), "not readable"),
    "a state without files": (lambda path: (path / STATE).write_text('{"step": 6}'), "not readable"),
    "no optimizer": (lambda path: (path / OPTIMIZER).unlink(), f"it has no {OPTIMIZER}"),
    "short model": (truncate(MODEL), "bytes, not"),
    "short optimizer": (truncate(OPTIMIZER), "bytes, not"),
    "a flipped bit": (flip, "does not match its checksum"),
    "empty": (lambda path: [file.unlink() for file in path.iterdir()], f"it has no {STATE}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_skipped(kind: str, crashed: Path, tokens: Path, whole: Path):
    damage, reason = DAMAGE[kind]
    damage(crashed / "checkpoints" / "step-00000006")
    watcher = Recorder()
    train(tiny_config(tokens), crashed, resume=True, progress=watcher)
    skipped = [note for note in watcher.notes if "skipped" in note]
    assert len(skipped) == 1
    assert "step-00000006" in skipped[0]
    assert reason in skipped[0]
    assert watcher.plans[0].first_step == 4
    assert read_metrics(crashed) == read_metrics(whole)


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(crashed: Path, tokens: Path):
    for step in (3, 6):
        flip(crashed / "checkpoints" / f"step-0000000{step}")
    before = {path: path.read_bytes() for path in crashed.rglob("*") if path.is_file()}
    watcher = Recorder()
    with pytest.raises(UserError, match=r"none of the checkpoints in .* is complete \(of the steps 3, 6\); nothing"):
        train(tiny_config(tokens), crashed, resume=True, progress=watcher)
    assert sum("does not match its checksum" in note for note in watcher.notes) == 2
    assert {path: path.read_bytes() for path in crashed.rglob("*") if path.is_file()} == before


def test_keep_last_does_not_count_a_damaged_later_checkpoint(crashed: Path, tokens: Path):
    file = crashed / "config.toml"
    file.write_text(dump_toml(tiny_config(tokens, keep_last=1, save_every=2)))
    damaged = crashed / "checkpoints" / "step-00000006"
    shutil.copytree(damaged, crashed / "checkpoints" / "step-00000011")
    flip(crashed / "checkpoints" / "step-00000011")
    flip(damaged)
    with pytest.raises(Crash):
        train(tiny_config(tokens, keep_last=1, save_every=2), crashed, resume=True, progress=Recorder({5: crash}))
    assert checkpoint_steps(crashed / "checkpoints") == [4, 6, 11]


def test_keep_last_counts_complete_checkpoints(crashed: Path, tokens: Path):
    """Step 6 is damaged and skipped; it must not take the place of one that a resume could use."""
    (crashed / "config.toml").write_text(dump_toml(tiny_config(tokens, save_every=4)))
    (crashed / "checkpoints" / "step-00000006" / STATE).unlink()
    with pytest.raises(Crash):
        train(tiny_config(tokens, save_every=4), crashed, resume=True, progress=Recorder({9: crash}))
    assert checkpoint_steps(crashed / "checkpoints") == [4, 8]


def test_an_unreadable_checkpoint_is_skipped(crashed: Path, monkeypatch: pytest.MonkeyPatch):
    """A bad disk: the file is there, its size is right, and reading it fails."""
    real, notes = open, []

    def bad_disk(path: Path, *rest):
        if Path(path) == crashed / "checkpoints" / "step-00000006" / MODEL:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *rest)

    monkeypatch.setattr("groundup.train.checkpoint.open", bad_disk, raising=False)
    assert load_run(crashed, device="cpu", note=notes.append)[3] == 3
    assert len(notes) == 1
    assert f"{MODEL} cannot be read: Input/output error" in notes[0]


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [9, 12]), (0, [3, 6, 9, 12])])
def test_keep_last(keep: int, left: list[int], tokens: Path, tmp_path: Path):
    train(tiny_config(tokens, keep_last=keep), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == left


def test_leftovers_of_killed_saves_are_removed(crashed: Path, tokens: Path):
    (crashed / "checkpoints" / ".step-00000009.4242.tmp").mkdir()
    (crashed / "checkpoints" / ".step-00000009.4242.tmp" / MODEL).write_bytes(b"half")
    (crashed / "checkpoints" / ".step-00000003.4242.old").mkdir()
    (crashed / ".metrics.jsonl.4242.tmp").write_bytes(b"half")
    (crashed / ".mine").write_bytes(b"a stranger's file stays")
    train(tiny_config(tokens), crashed, resume=True)
    assert [path.name for path in crashed.rglob(".*")] == [".mine"]


def full_disk_in_save_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(tensors: dict, path: Path, metadata: dict) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("groundup.train.checkpoint.save_file", save)


def full_disk_in_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("groundup.files.fsync_path", fsync)


@pytest.mark.parametrize("fill", [full_disk_in_save_file, full_disk_in_fsync])
def test_a_full_disk_leaves_the_last_checkpoint(
    fill: Callable, tokens: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk that is full although it said that it had room: the run goes on, but its last step must be saved."""
    watcher = Recorder({7: lambda: fill(patch)})
    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        train(tiny_config(tokens), tmp_path / "run", progress=watcher)
    (note,) = [note for note in watcher.notes if "cannot be saved" in note]
    assert note.startswith("step 9 cannot be saved: ")
    assert note.endswith("; tried again at the next save")
    assert "No space left on device" in note
    assert str(caught.value).startswith("step 12 cannot be saved: ")
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006"]
    train(tiny_config(tokens), tmp_path / "run", resume=True)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


def test_a_full_disk_that_is_freed_costs_one_checkpoint(
    tokens: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        fill = {7: lambda: full_disk_in_fsync(patch), 10: patch.undo}
        train(tiny_config(tokens, keep_last=0), tmp_path / "run", progress=Recorder(fill))
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [3, 6, 12]
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


def test_an_old_checkpoint_that_cannot_be_deleted_is_said_and_tried_again(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = shutil.rmtree

    def busy(path: Path, **how) -> None:
        if path.name.endswith(".old"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        real(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        watcher = Recorder({7: patch.undo})
        assert train(tiny_config(tokens, keep_last=1), tmp_path / "run", progress=watcher).step == 12
    (note,) = [note for note in watcher.notes if "deleted" in note]
    assert note.startswith("step 6 is saved, but an older checkpoint cannot be deleted: ")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [12]


def test_a_full_disk_while_writing_a_row(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full:
        def write(self, data: bytes) -> int:
            return len(data) // 2

        def close(self) -> None: ...

    real = open
    with monkeypatch.context() as patch:
        patch.setattr(
            "groundup.train.metrics.open", lambda *a, **k: Full() if "ab" in a else real(*a, **k), raising=False
        )
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left"):
            train(tiny_config(tokens), tmp_path / "run")


def test_a_checkpoint_of_another_model_is_named(crashed: Path):
    file = crashed / "config.toml"
    file.write_text(file.read_text().replace("d_ff = 64", "d_ff = 128"))
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.w1\.weight is \(64, 32\) there and \(128, 32\) in the model"):
        load_run(crashed)
    file.write_text(file.read_text().replace("d_ff = 128", "d_ff = 64").replace("n_layers = 2", "n_layers = 3"))
    with pytest.raises(UserError, match=r"it has no layers\.2\."):
        load_run(crashed)
    file.write_text(file.read_text().replace("n_layers = 3", "n_layers = 1"))
    with pytest.raises(UserError, match=r"the model has no layers\.1\."):
        load_run(crashed)


def test_names_are_the_parameters_names(whole: Path):
    weights = load_file(whole / "checkpoints" / "step-00000012" / MODEL)
    moments = load_file(whole / "checkpoints" / "step-00000012" / OPTIMIZER)
    assert {"token_embeddings.weight", "layers.1.attn.q_proj.weight", "lm_head.weight"} <= weights.keys()
    assert moments.keys() == {f"{key}.{name}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")}
    assert all(moments[f"exp_avg.{name}"].shape == weight.shape for name, weight in weights.items())
    assert moments["step.ln_final.weight"].item() == 12


def test_files_are_as_private_as_the_umask_says(whole: Path):
    modes = {path.stat().st_mode for path in (whole / "checkpoints" / "step-00000012").iterdir()}
    assert len(modes) == 1


def test_tied_weights_are_one_tensor(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, model={"tie_embeddings": True})
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=Recorder({8: crash}))
    train(config, tmp_path / "run", resume=True)
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-00000012" / MODEL)
    assert "token_embeddings.weight" in weights
    assert "lm_head.weight" not in weights


def test_no_first_values_are_drawn_for_weights_that_are_read(whole: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groundup.model.layers.Linear.init_weights", pytest.fail)
    model = load_run(whole, device="cpu")[0]
    weights = load_file(whole / "checkpoints" / "step-00000012" / MODEL)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    truth = RotaryEmbedding(model.config.d_head, model.config.context_length, model.config.rope_theta)
    assert torch.equal(model.rope.cos, truth.cos)
    assert torch.equal(model.rope.sin, truth.sin)


def test_load_run_takes_the_newest_or_the_step_asked_for(whole: Path, tokens: Path, tmp_path: Path):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    config = out / "config.toml"
    config.write_text(config.read_text().replace(str(tokens), "/nowhere"))  # the token files may be gone
    model, tokenizer, loaded, step = load_run(out, device="cpu")
    assert (step, tokenizer.vocab_size, loaded.model.d_model, model.training) == (12, 257, 32, False)
    weights = load_file(out / "checkpoints" / "step-00000012" / MODEL)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert load_run(out, step=9)[3] == 9
    with pytest.raises(UserError, match="no checkpoint of step 7; it has: 9, 12"):
        load_run(out, step=7)
    notes: list[str] = []
    flip(out / "checkpoints" / "step-00000012")
    assert load_run(out, note=notes.append)[3] == 9
    assert len(notes) == 1
    with pytest.raises(UserError, match=r"step 12 .* is damaged"):
        load_run(out, step=12)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(UserError, match="no complete checkpoint"):
        load_run(out)
    with pytest.raises(UserError, match="holds no run"):
        load_run(tmp_path)


def test_an_optimizer_file_with_a_gap_is_named(crashed: Path, tokens: Path):
    """Consistent checksums, but one moment is missing: never start it from zero silently."""
    drop_a_moment(crashed / "checkpoints" / "step-00000006", "exp_avg.ln_final.weight")
    with pytest.raises(UserError, match=r"it has no exp_avg\.ln_final\.weight"):
        train(tiny_config(tokens), crashed, resume=True)
