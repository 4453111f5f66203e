"""Two processes: what one rank finds or is told, both do; what one cannot do stops both, and costs nothing."""

import os
import signal
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tiny_runs import Recorder, drop_a_moment, read_metrics, tiny_config, write_tokens

from groundup.config import ParallelConfig, RunConfig
from groundup.model import TransformerLM
from groundup.parallel.launch import spawn
from groundup.parallel.processes import connect, disconnect, this_world
from groundup.train.checkpoint import checkpoint_steps


def one_rank(config: RunConfig, out: Path, bad: int, stop: int) -> tuple[int, bool, str]:
    """Train; on rank 1 alone the norm of step `bad` is no number, and SIGTERM arrives during step `stop`."""
    torch.set_num_threads(1)
    from groundup.train import train
    from groundup.train.job import Job

    real, calls, jobs = Job.clip_grad_norm, [], []

    def clip(job: Job) -> torch.Tensor:
        calls.append(1)
        jobs.append(job)
        norm = real(job)
        if job.world.rank == 1 and len(calls) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return norm * float("nan") if job.world.rank == 1 and len(calls) == bad else norm

    Job.clip_grad_norm = clip
    result = train(config, out)
    weights = b"".join(t.numpy().tobytes() for t in jobs[-1].model.state_dict().values())
    return result.step, result.interrupted, sha256(weights).hexdigest()


def for_two(tokens: Path, **train) -> RunConfig:
    base = tiny_config(tokens, **train)
    return replace(base, train=replace(base.train, micro_batch_size=2, grad_accumulation=0, global_batch_size=4))


def test_both_ranks_skip_and_both_stop(tmp_path: Path):
    config = for_two(write_tokens(tmp_path / "tokens"))
    outcomes = spawn(one_rank, 2, config, tmp_path / "run", 5, 8)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:2] == (8, True)
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if row.get("skipped")] == [5]
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [6, 8]


ENGINES = {"zero1": ParallelConfig(optimizer="zero1"), "fsdp": ParallelConfig(data="fsdp")}


def refused(config: RunConfig, out: Path, resume: bool = True) -> str:
    from groundup.train import train

    try:
        train(config, out, resume=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it went on"


def on_two_machines(config: RunConfig, home: Path) -> dict[str, str]:
    """Each rank in a directory of its own, where the run is that of rank 0; then what else one rank may fail at."""
    torch.set_num_threads(1)
    from groundup.train import checkpoint, resume, train

    world, said = this_world(), {}
    connect(world, torch.device("cpu"), timeout=240)
    checkpoint.SHOWN_WITHIN = 1.0
    os.chdir(home / str(world.rank))
    train(config, Path("run"))
    said["unshared"] = refused(config, Path("run"))
    # A directory of the same name, left by an earlier attempt, does not make it a shared one.
    Path("run").mkdir(exist_ok=True)
    said["other"] = refused(config, Path("run"))
    dcp = replace(config, parallel=ParallelConfig(data="torch-fsdp2", checkpoint="dcp"))
    said["dcp"] = refused(dcp, Path("dcp"), resume=False)
    for name, parallel in ENGINES.items():
        out = home / name
        train(replace(config, parallel=parallel), out)
        if world.rank == 0:
            drop_a_moment(out / "checkpoints" / "step-00000003", "exp_avg.ln_final.weight")
        world.any(False)
        said[name] = refused(replace(config, parallel=parallel), out)

    def broken(*_: object) -> None:
        raise OSError("a bad disk")

    real = resume.save_checkpoint
    resume.save_checkpoint = broken
    said["save"] = refused(config, home / "save", resume=False)
    resume.save_checkpoint = real
    watcher, forward = Recorder(), TransformerLM.forward

    def no_memory(model: TransformerLM, *args, **kwargs):
        if world.rank == 1 and not model.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(model, *args, **kwargs)

    TransformerLM.forward = no_memory
    with_evaluation = replace(config, train=replace(config.train, eval_every=2))
    said["steps"] = train(with_evaluation, home / "memory", progress=watcher).step
    said["memory"] = " ".join(note for note in watcher.notes if "memory" in note)
    disconnect()
    return said


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    home = tmp_path_factory.mktemp("machines")
    for rank in range(2):
        (home / str(rank)).mkdir()
    config = for_two(write_tokens(home / "tokens"), steps=3, eval_every=0)
    return home, spawn(on_two_machines, 2, config, home)


def test_a_run_in_a_directory_of_one_machine_is_saved_there_and_not_resumed(two_machines):
    home, said = two_machines
    assert said[0]["unshared"] == said[1]["unshared"]
    assert said[0]["unshared"].startswith("UserError: rank 1 does not see run, where rank 0 writes: to resume")
    assert said[0]["other"] == said[1]["other"]
    assert said[0]["other"].startswith("UserError: none of the checkpoints in run/checkpoints is complete")
    assert [row["step"] for row in read_metrics(home / "0" / "run")] == [1, 2, 3]
    assert checkpoint_steps(home / "0" / "run" / "checkpoints") == [3]
    assert list((home / "1" / "run").iterdir()) == []


def test_shards_need_a_directory_that_all_see(two_machines):
    _, said = two_machines
    assert said[0]["dcp"] == said[1]["dcp"]
    assert said[0]["dcp"].startswith("UserError: rank 1 does not see dcp, where rank 0 writes")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_file_with_a_gap_is_named_by_every_engine(engine, two_machines):
    for said in two_machines[1]:
        assert said[engine].startswith("UserError")
        assert "it has no exp_avg.ln_final.weight (32,)" in said[engine]


def test_an_error_of_rank_zero_reaches_the_others(two_machines):
    _, said = two_machines
    assert said[0]["save"] == "OSError: a bad disk"
    assert said[1]["save"] == "UserError: rank 0 failed: OSError: a bad disk"


def test_a_rank_without_memory_for_an_evaluation_leaves_the_run_alive(two_machines):
    home, said = two_machines
    assert [one["steps"] for one in said] == [3, 3]
    assert said[0]["memory"] == " ".join(
        f"step {step}: out of memory in the evaluation, which is left out; the run goes on" for step in (2, 3)
    )
    assert [row["step"] for row in read_metrics(home / "memory")] == [1, 2, 3]
