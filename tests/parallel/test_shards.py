"""Checkpoints of torch.distributed.checkpoint: the shards of FSDP2, held against the whole tensors of the same run.

What lies in shards is read here by PyTorch's own converter (dcp_to_torch_save), not by the code under test.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import config, reload_all, spawned, with_shards
from safetensors.torch import load_file
from tiny_runs import read_metrics, write_tokens
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from groundup.config import ParallelConfig
from groundup.errors import UserError
from groundup.train import export_run, load_run, train
from groundup.train.checkpoint import checkpoint_steps, newest_complete, prune_checkpoints
from groundup.train.run_directory import RunDirectory

INTO_SHARDS = [("dcp", "dcp"), ("torch-fsdp2", "dcp"), ("one", "dcp"), ("one-bf16", "dcp-bf16")]
OUT_OF_SHARDS = [("dcp", "fsdp"), ("dcp", "zero1"), ("dcp", "torch-fsdp2")]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """(directory of the runs, how each rank's save ended that had no room on rank 1, and how the group did)."""
    out = tmp_path_factory.mktemp("two")
    train(config(tokens, "bucketed"), out / "one")
    train(config(tokens, "bucketed-bf16"), out / "one-bf16")
    with pytest.raises(UserError) as end:
        spawned(2, with_shards, tokens, out, INTO_SHARDS + OUT_OF_SHARDS)
    return out, [(out / f"no-room-{rank}").read_text() for rank in range(2)], str(end.value)


def tensors(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    directory, found = run / "checkpoints" / f"step-{step:08d}", {}
    for part in ("model", "optimizer"):
        if (shards := directory / f"{part}.dcp").exists():
            assert not (directory / f"{part}.safetensors").exists()
            dcp_to_torch_save(shards, run / "whole.pt")
            saved = torch.load(run / "whole.pt")
        else:
            saved = load_file(directory / f"{part}.safetensors")
        found |= {f"{part}:{name}": value for name, value in saved.items()}
    return found


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].equal(value), name


@pytest.mark.parametrize("step", [3, 6])
def test_shards_hold_what_whole_tensors_do(runs, step):
    out = runs[0]
    assert_equal(tensors(out / "dcp", step), tensors(out / "torch-fsdp2", step))
    assert read_metrics(out / "dcp") == read_metrics(out / "torch-fsdp2")


def test_every_rank_writes_its_half_and_the_rest_lies_beside(runs):
    path = runs[0] / "dcp" / "checkpoints" / "step-00000006"
    for part in ("model", "optimizer"):
        sizes = {file.name: file.stat().st_size for file in (path / f"{part}.dcp").iterdir()}
        assert sizes.keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        assert 0.8 < sizes["__0_0.distcp"] / sizes["__1_0.distcp"] < 1.25
    state, other = (
        json.loads((runs[0] / run / path.relative_to(runs[0] / "dcp") / "state.json").read_text())
        for run in ("dcp", "torch-fsdp2")
    )
    assert state["rng"].keys() == {"0", "1"}
    for name in ("step", "tokens", "rng", "extra", "data"):
        assert state[name] == other[name]
    assert state["files"].keys() == {str(f.relative_to(path)) for f in path.glob("*.dcp/*")}


@pytest.mark.parametrize(("saved", "loads"), INTO_SHARDS + OUT_OF_SHARDS)
def test_two_processes_take_over(runs, saved, loads):
    out = runs[0]
    assert_equal(tensors(out / "again" / f"{saved}-{loads}-2"), tensors(out / saved))


def test_one_process_takes_over(runs, tmp_path):
    out = runs[0]
    shutil.copytree(out / "again" / "one-bf16-dcp-bf16-2", tmp_path / "bf16")
    for name in ("config.toml", "tokenizer.json"):
        shutil.copy(out / "one-bf16" / name, tmp_path / "bf16")
    reload_all(out, tmp_path, [("dcp", "bucketed")])
    reload_all(tmp_path, tmp_path, [("bf16", "bucketed-bf16")])
    assert_equal(tensors(tmp_path / "dcp-bucketed-1"), tensors(out / "dcp"))
    assert_equal(tensors(tmp_path / "bf16-bucketed-bf16-1"), tensors(out / "one-bf16"))


def test_evaluation_and_export_read_shards(runs, tmp_path):
    out = runs[0]
    model, _, _, step = load_run(out / "dcp", device="cpu")
    assert step == 6
    expected = {k.partition(":")[2]: v for k, v in tensors(out / "dcp").items() if k.startswith("model:")}
    assert_equal(model.state_dict(), expected)
    for run in ("dcp", "torch-fsdp2"):
        assert export_run(out / run, tmp_path / run, 3) == 3
    assert_equal(load_file(tmp_path / "dcp/model.safetensors"), load_file(tmp_path / "torch-fsdp2/model.safetensors"))


def test_a_resumed_run_goes_on_bit_for_bit(runs):
    out = runs[0]
    assert_equal(tensors(out / "on" / "dcp"), tensors(out / "dcp"))
    assert read_metrics(out / "on" / "dcp") == read_metrics(out / "dcp")


def test_what_is_saved_after_an_evaluation_is_all_there(runs):
    """The best checkpoint is written when the evaluation has said so."""
    assert_equal(tensors(runs[0] / "best", 2), tensors(runs[0] / "plain", 2))


def test_no_room_on_one_rank_is_one_line_on_all_and_costs_nothing(runs):
    out, lines, _ = runs
    assert len(set(lines)) == 1
    assert "rank 1: No space left on device; the checkpoints before it are kept" in lines[0]
    assert [path.name for path in (out / "full" / "dcp" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_rank_that_dies_while_it_saves_leaves_the_older_one(runs):
    out, _, end = runs
    run = out / "killed" / "dcp"
    assert "rank 1 was killed by SIGKILL; the others were stopped" in end
    assert checkpoint_steps(run / "checkpoints") == [3]
    with RunDirectory(run).locked():
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.dcp/__0_0.distcp", "optimizer.dcp/__1_0.distcp", "model.dcp/.metadata"])
def test_damaged_shards_are_skipped(runs, tmp_path, name):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(runs[0] / "dcp" / "checkpoints", checkpoints)
    notes: list[str] = []
    damage(checkpoints / "step-00000006" / name)
    found = newest_complete(checkpoints, notes.append)
    assert found is not None
    assert found.step == 3
    assert len(notes) == 1
    assert f"{name} does not match its checksum" in notes[0]
    (checkpoints / "step-00000006" / name).unlink()
    prune_checkpoints(checkpoints, 6, keep_last=1)
    assert checkpoint_steps(checkpoints) == [3]


def test_old_shards_are_deleted(runs, tmp_path):
    shutil.copytree(runs[0] / "dcp" / "checkpoints", tmp_path / "checkpoints")
    prune_checkpoints(tmp_path / "checkpoints", 6, keep_last=1)
    assert checkpoint_steps(tmp_path / "checkpoints") == [6]


@pytest.mark.parametrize("data", ["bucketed", "fsdp", "torch-ddp"])
def test_engines_without_such_shards_refuse(data):
    with pytest.raises(UserError, match=f'parallel.checkpoint "dcp" .* "{data}" has none of that kind'):
        ParallelConfig(data=data, checkpoint="dcp").check()
    assert ParallelConfig(data="torch-fsdp2", checkpoint="dcp").check().checkpoint == "dcp"


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_more_processes_take_over(runs, tmp_path, world):
    pairs = [*INTO_SHARDS, *OUT_OF_SHARDS, ("dcp", "bucketed")]
    spawned(world, reload_all, runs[0], tmp_path, pairs)
    for saved, loads in pairs:
        assert_equal(tensors(tmp_path / f"{saved}-{loads}-{world}"), tensors(runs[0] / saved))
