"""Guards over two processes: what one rank finds or is told, both do."""

import os
import signal
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from tiny_runs import read_metrics, tiny_config, write_tokens

from groundup.config import RunConfig
from groundup.parallel.launch import spawn
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


def test_both_ranks_skip_and_both_stop(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens")
    base = tiny_config(tokens)
    loop = replace(base.train, micro_batch_size=2, grad_accumulation=0, global_batch_size=4)
    config = replace(base, train=loop)
    outcomes = spawn(one_rank, 2, config, tmp_path / "run", 5, 8)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:2] == (8, True)
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if row.get("skipped")] == [5]
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [6, 8]
