"""Training in two processes against one, and checkpoints that any world size and engine takes over bit for bit."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from runs import compile_all, config, go_on, reload_all, spawned, train_all
from safetensors.torch import load_file
from tiny_runs import read_metrics, write_tokens

from groundup.cli import main
from groundup.errors import UserError
from groundup.train import train
from groundup.train.resume import at_world_size

OURS = ["bucketed", "naive", "zero1", "fsdp", "muon"]
THEIRS = ["torch-ddp", "torch-fsdp2"]
BF16 = ["bucketed-bf16", "zero1-bf16", "fsdp-bf16"]
FILES = ("model.safetensors", "optimizer.safetensors")


PAIRS = [(saved, loads) for saved in ("bucketed", "zero1", "fsdp") for loads in ("bucketed", "zero1", "fsdp")]
PAIRS.append(("muon", "muon"))
PAIRS += [("bucketed-bf16", "zero1-bf16"), ("zero1-bf16", "fsdp-bf16"), ("fsdp-bf16", "bucketed-bf16")]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def two_ranks(tokens, tmp_path_factory):
    """(directory of the runs in two processes, that of `differing`, what each rank found there)."""
    two, apart = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("apart")
    return two, apart, spawned(2, train_all, tokens, two, [*OURS, *BF16, "torch-fsdp2-bf16"], PAIRS, apart)


@pytest.fixture(scope="module")
def pairs_of_runs(two_ranks, tokens, tmp_path_factory):
    """(directory of the runs in two processes, of those in one)."""
    two, one = two_ranks[0], tmp_path_factory.mktemp("one")
    for engine in ("bucketed", "muon"):
        # One process sums the same four micro-batches in another order; with two, in the very order of two ranks.
        train(config(tokens, engine), one / engine)
    return two, one


def tensors(run: Path, step: int = 6) -> dict:
    directory = run / "checkpoints" / f"step-{step:08d}"
    return {f"{name}:{key}": value for name in FILES for key, value in load_file(directory / name).items()}


def compare(run: Path, truth: Path, tolerance: float) -> None:
    found, expected = tensors(run), tensors(truth)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert (found[name].double() - value.double()).abs().max() <= tolerance, name
    for row, other in zip(read_metrics(run), read_metrics(truth), strict=True):
        assert row.keys() == other.keys()
        for key in ("loss", "grad_norm", "valid_loss", "valid_bits_per_byte"):
            assert row.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-5), (row, key)


@pytest.mark.parametrize("engine", OURS)
def test_two_processes_train_as_one(pairs_of_runs, engine):
    two, one = pairs_of_runs
    compare(two / engine, one / ("muon" if engine == "muon" else "bucketed"), 3e-6)


def test_engines_agree_bit_for_bit(pairs_of_runs):
    """Reducing by parameter or by bucket, and keeping the state whole or not, changes no bit but through the norm."""
    two, _ = pairs_of_runs
    compare(two / "naive", two / "bucketed", 0.0)


def check_reloaded(two: Path, again: Path, world: int, pairs: list) -> None:
    for saved, loads in pairs:
        expected, found = tensors(two / saved), tensors(again / f"{saved}-{loads}-{world}")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert found[name].equal(value), (saved, loads, name)


def test_one_process_takes_over_what_two_saved(pairs_of_runs, tmp_path):
    pairs = [("bucketed", "bucketed"), ("zero1", "bucketed"), ("fsdp", "bucketed"), ("muon", "bucketed")]
    pairs += [(saved, "bucketed-bf16") for saved in BF16]
    reload_all(pairs_of_runs[0], tmp_path, pairs)
    check_reloaded(pairs_of_runs[0], tmp_path, 1, pairs)


def test_every_engine_takes_over_what_another_saved(pairs_of_runs):
    check_reloaded(pairs_of_runs[0], pairs_of_runs[0] / "again", 2, PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_more_processes_take_over_what_two_saved(pairs_of_runs, tmp_path, world):
    spawned(world, reload_all, pairs_of_runs[0], tmp_path, PAIRS)
    check_reloaded(pairs_of_runs[0], tmp_path, world, PAIRS)


def cut_short(run: Path, copy: Path) -> None:
    """Copy a finished run so that its last three steps are still to do."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")


@pytest.mark.parametrize("engine", ["bucketed", "zero1", "fsdp"])
def test_one_process_goes_on_and_ends_like_two(pairs_of_runs, tokens, tmp_path, engine):
    two, _ = pairs_of_runs
    cut_short(two / engine, tmp_path / engine)
    go_on(tokens, tmp_path, engine)
    compare(tmp_path / engine, two / engine, 3e-6)


def test_the_command_line_goes_on_with_another_number_of_processes(pairs_of_runs, tmp_path, capsys):
    two, _ = pairs_of_runs
    cut_short(two / "bucketed", tmp_path / "run")
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0, capsys.readouterr().err
    compare(tmp_path / "run", two / "bucketed", 3e-6)


def free_port() -> int:
    """One that a number of a job can stand for, and that no system gives away by itself (Linux: those from 32768)."""
    for port in range(15000 + os.getpid() % 17000, 32768):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


def test_srun_needs_nothing_else(pairs_of_runs, tmp_path):
    """Slurm's variables alone: rank and size, the meeting point from the list of hosts and the job's number."""
    two, _ = pairs_of_runs
    cut_short(two / "bucketed", tmp_path / "run")
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(free_port() - 15000), "SLURM_STEP_ID": "0"}
    slurm["SLURM_JOB_NODELIST"] = "localhost"
    command = [sys.executable, "-m", "groundup.cli", "train", "--out", str(tmp_path / "run"), "--resume"]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    compare(tmp_path / "run", two / "bucketed", 0.0)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
without_mpi = pytest.mark.skipif(shutil.which("ompi_info") is None, reason="no Open MPI")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param([*MPIRUN, sys.executable], id="mpirun", marks=[pytest.mark.slow, without_mpi]),
    ],
)
def test_other_launchers_give_the_same_run(pairs_of_runs, tmp_path, launcher):
    two, _ = pairs_of_runs
    cut_short(two / "bucketed", tmp_path / "run")
    port = str(free_port())
    command = [word.format(port=port) for word in launcher]
    command += ["-m", "groundup.cli", "train", "--out", str(tmp_path / "run"), "--resume"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(command, env=os.environ | meeting, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    compare(tmp_path / "run", two / "bucketed", 0.0)


@pytest.mark.slow
def test_two_processes_go_on_bit_for_bit(pairs_of_runs, tokens, tmp_path):
    two, _ = pairs_of_runs
    for engine in ("bucketed", "zero1", "fsdp"):
        cut_short(two / engine, tmp_path / engine)
        spawned(2, go_on, tokens, tmp_path, engine)
        compare(tmp_path / engine, two / engine, 0.0)


@pytest.mark.slow
def test_torchs_engines_train_as_one(pairs_of_runs, tokens, tmp_path):
    spawned(2, train_all, tokens, tmp_path, THEIRS)
    for engine in THEIRS:
        compare(tmp_path / engine, pairs_of_runs[1] / "bucketed", 3e-6)


def check_narrow(two: Path, kind: str) -> None:
    """Under bf16-pure master weights and moments are saved uncut; that all engines take them over is in PAIRS."""
    for engine in ("bucketed", "zero1", "fsdp", *(["torch-fsdp2"] if kind == "bf16" else [])):
        saved = tensors(two / f"{engine}-{kind}")
        state = {key: value for key, value in saved.items() if key.startswith("optimizer") and value.ndim}
        assert all(value.dtype == torch.float32 for value in state.values())
        if kind == "bf16":
            assert saved["model.safetensors:layers.0.ffn.w1.weight"].dtype == torch.bfloat16
            assert any(key.startswith("optimizer.safetensors:master.") for key in state)
        # Numbers that bfloat16 cannot hold, so that a cast on the way shows.
        assert any((value != value.bfloat16().float()).any() for value in state.values())
        rows = [read_metrics(two / f"{e}-{kind}") for e in (engine, "bucketed")]
        losses, truth = ([row["loss"] for row in some if "loss" in row] for some in rows)
        assert losses == pytest.approx(truth, rel=2e-2)


def test_bf16_keeps_its_float32_state(pairs_of_runs):
    check_narrow(pairs_of_runs[0], "bf16")


@pytest.mark.slow
def test_fp16_on_two_processes(tokens, tmp_path):
    names = ["bucketed-fp16", "zero1-fp16", "fsdp-fp16"]
    pairs = [(saved, loads) for saved in names for loads in names]
    spawned(2, train_all, tokens, tmp_path, names, pairs)
    check_narrow(tmp_path, "fp16")
    check_reloaded(tmp_path, tmp_path / "again", 2, pairs)


def test_a_saved_batch_is_dealt_out_anew(tokens):
    saved = config(tokens, "bucketed").resolve(257, 2)
    for world, micro, accumulation in ((1, 3, 4), (2, 3, 2), (3, 2, 2), (4, 3, 1), (6, 2, 1), (12, 1, 1)):
        train_config = at_world_size(saved, world).train
        assert (train_config.micro_batch_size, train_config.grad_accumulation) == (micro, accumulation)
        assert train_config.global_batch_size == 12
    with pytest.raises(UserError, match="cannot be dealt out to 5"):
        at_world_size(saved, 5)


@pytest.mark.slow
def test_compiled_blocks_train_as_one_and_leave_the_overlap(pairs_of_runs, tokens, tmp_path):
    for found in spawned(2, compile_all, tokens, tmp_path, ["bucketed", "zero1", "fsdp"]):
        for engine, (graphs, breaks, last_backwards) in found.items():
            assert (graphs, breaks, len(last_backwards)) == (1, 0, 6), engine  # one graph for both blocks
            assert all("l" in events for events in last_backwards), (engine, last_backwards)
            compare(tmp_path / engine, pairs_of_runs[1] / "bucketed", 3e-6)


def test_more_processes_take_fewer_steps_over_the_same_tokens(two_ranks, tokens):
    _, apart, found = two_ranks
    assert [rank["steps"] for rank in found] == [12, 12]
    assert read_metrics(apart / "length")[-1]["tokens"] == 12 * 32 * 6
    length = replace(config(tokens, "bucketed").train, steps=0, tokens=12 * 32 * 6, global_batch_size=0)
    assert [length.resolve(32, world).steps for world in (1, 2, 4)] == [24, 12, 6]


def test_ranks_that_differ_do_not_train(two_ranks):
    first, second = two_ranks[2]
    assert first["tokens"] == second["tokens"]
    assert first["tokens"].startswith("ranks disagree on the token files in tokens: rank 0 has ")
    assert first["precision"] == second["precision"]
    assert first["precision"].startswith("ranks disagree on train.precision: rank 0 has fp32, rank 1 has bf16-mixed")


def test_a_rank_that_does_not_see_the_run_ends_its_resume_with_a_line(two_ranks):
    first, second = two_ranks[2]
    assert first["resume"] == second["resume"]
    assert first["resume"][0] == 2
    assert "rank 1 does not see run, where rank 0 writes" in first["resume"][1]


@pytest.mark.slow
def test_muon_and_fsdp_do_not_go_together(tokens, tmp_path):
    wanted = config(tokens, "muon")
    wanted = replace(wanted, parallel=replace(wanted.parallel, data="fsdp", optimizer="whole"))
    with pytest.raises(UserError, match="needs whole matrices"):
        spawned(2, train, wanted, tmp_path / "run")


@pytest.mark.slow
def test_kill_of_a_rank_stops_the_others_with_a_line_and_loses_no_checkpoint(tokens, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "import sys; from groundup.cli import main; sys.exit(main())", "train"]
    command += ["--data", str(tokens), "--out", str(out), "--nproc", "2", "--train.steps", "100000"]
    command += ["--train.save-every", "5", "--train.eval-every", "0", "--train.global-batch-size", "4"]
    command += [
        "--model.context-length",
        "32",
        "--model.d-model",
        "32",
        "--model.n-layers",
        "1",
        "--model.n-heads",
        "2",
    ]
    command += ["--train.device", "cpu", "--parallel.timeout", "20"]
    for victim in (0, 1):
        process = subprocess.Popen(
            [*command, *(["--resume"] if victim else [])], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        before = set((out / "checkpoints").glob("step-*"))
        end = time.monotonic() + 240
        while not set((out / "checkpoints").glob("step-*")) - before and time.monotonic() < end:
            time.sleep(0.1)
        ranks = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        os.kill(sorted(ranks, key=lambda child: child.pid)[victim].pid, signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == 2, errors
        assert f"rank {victim} was killed by SIGKILL; the others were stopped" in errors
        assert not any(child.is_running() for child in ranks)
        newest = max((out / "checkpoints").glob("step-*"))
        load_file(newest / "model.safetensors")
