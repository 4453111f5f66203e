"""Ranks from every launcher's variables, Slurm's node lists, the launcher of our own."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from groundup.config import ParallelConfig
from groundup.errors import UserError
from groundup.parallel import launch
from groundup.parallel.launch import ChildError, spawn
from groundup.parallel.processes import (
    World,
    connect,
    disconnect,
    first_host,
    is_lost_peer,
    local_device,
    meeting_point,
    nccl_variables,
    this_world,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", "login"),
        ("a,b-2", "a"),
        ("node[01-03,7],gpu5", "node01"),
        ("n[9-11]", "n9"),
        ("n[007,9]", "n007"),
        ("r[1-2]n[0-1].local", "r1n0.local"),
    ],
)
def test_node_lists(text, expected):
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1-x]", "a b"])
def test_broken_node_lists_are_refused(text):
    with pytest.raises(UserError, match="SLURM_NODELIST"):
        first_host(text)


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, World(3, 4, 1, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            World(2, 4, 2, "mpirun"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2, 0, "mpirun")),
        ({**SLURM, "SLURM_STEP_ID": "0"}, World(5, 8, 1, "srun")),
        ({**SLURM, "SLURM_STEP_ID": "0", "PMI_RANK": "5", "PMI_SIZE": "8"}, World(5, 8, 1, "srun")),  # srun --mpi=pmi2
        (  # mpirun in a job: its daemons, one a node, were started by srun
            {**SLURM, "SLURM_STEP_ID": "0", "PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3"},
            World(9, 16, 3, "mpirun"),
        ),
        (SLURM, World(0, 1)),  # a batch script's own shell
        ({**SLURM, "SLURM_STEP_ID": "0", "RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 0, "torchrun")),
    ],
)
def test_worlds(environment, expected):
    assert this_world(environment) == expected


def test_impossible_worlds_are_refused():
    with pytest.raises(UserError, match="not below"):
        this_world({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(UserError, match="not numbers"):
        this_world({"RANK": "x", "WORLD_SIZE": "4"})


def test_meeting_points():
    srun = World(5, 8, 1, "srun")
    assert meeting_point(srun, {**SLURM, "SLURM_JOB_NODELIST": "gpu[07-08]"}) == ("gpu07", 15000 + 41234 % 20000)
    assert meeting_point(srun, {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "77"}) == ("a", 77)
    mpirun = World(0, 2, 0, "mpirun")
    local = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": "5"}
    assert meeting_point(mpirun, local) == ("127.0.0.1", 5)
    with pytest.raises(UserError, match="MASTER_PORT is not set"):
        meeting_point(mpirun, {"MASTER_ADDR": "a"})
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        meeting_point(mpirun, {"MASTER_PORT": "5"})


def test_devices(monkeypatch):
    assert local_device("cpu", World(1, 2, 1)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_device("cuda", World(6, 8, 2)) == torch.device("cuda", 2)
    with pytest.raises(UserError, match="at most 4 processes"):
        local_device("cuda", World(5, 8, 5))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # one visible device a task
    assert local_device("cuda", World(6, 8, 2)) == torch.device("cuda", 0)


def meet_on_one_gpu():
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{device}")
    world = this_world()
    connect(world, local_device("cuda", world), start_timeout=60)


def test_two_processes_on_one_gpu_are_refused():
    with pytest.raises(UserError, match="ranks 0 and 1 have the same GPU"):
        spawn(meet_on_one_gpu, 2)


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        (torch.distributed.DistBackendError, "NCCL error in: NCCLUtils.cpp:94, remote process exited", True),
        (torch.distributed.DistBackendError, "NCCL error in: NCCLUtils.cpp:94, invalid usage\nDuplicate GPU", False),
        (RuntimeError, "[pair.cc:553] Connection closed by peer", True),
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
        (OSError, "timed out", False),
    ],
)
def test_what_a_lost_rank_looks_like(kind, text, lost):
    assert is_lost_peer(kind(text)) == lost


def test_nccl_variables_name_multicast():
    assert nccl_variables(False, 10)["NCCL_NVLS_ENABLE"] == "0"
    assert nccl_variables(True, 10)["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.parametrize(
    "fields", [{"bucket_mb": 0.0}, {"prefetch": 3}, {"timeout": 0.0}, {"optimizer": "zero1", "data": "fsdp"}]
)
def test_impossible_configurations_are_refused(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        ParallelConfig(**fields).check()


def meet(value):
    world = this_world()
    connect(world, torch.device("cpu"), timeout=120)
    total = torch.tensor(float(world.rank + value))
    torch.distributed.all_reduce(total)
    name = world.on_rank_zero(lambda: f"run-{world.rank}")
    said = []
    for kind in (UserError, OSError):
        try:
            world.on_rank_zero(lambda kind=kind: refuse(kind))
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    together = world.any(world.rank == 1), world.any(False), world.gather(world.rank * 2)
    disconnect()
    return world.rank, total.item(), name, said, together


def refuse(kind):
    raise kind("no room")


def fail(kind):
    world = this_world()
    connect(world, torch.device("cpu"), timeout=60)
    if world.rank == 1:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("a broken file") if kind == "user" else ValueError("a bug")
    time.sleep(300)


def break_down():
    raise ValueError("a bug")


def test_processes_meet_and_agree():
    """An error of rank 0's is its own there and a line on the others: none waits for what does not come."""
    found = spawn(meet, 2, 10)
    others = ("OSError", "no room"), ("UserError", "rank 0 failed: OSError: no room")
    for rank in (0, 1):
        said = [("UserError", "no room"), others[rank]]
        assert found[rank] == (rank, 21.0, "run-0", said, (True, False, [0, 2]))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        pytest.param("user", UserError, "rank 1: a broken file", marks=pytest.mark.slow),
        pytest.param("bug", ChildError, r"rank 1 failed:\nTraceback[\s\S]*ValueError: a bug", marks=pytest.mark.slow),
        ("kill", UserError, "rank 1 was killed by SIGKILL; the others were stopped"),
    ],
)
def test_a_failure_stops_all_and_is_named(kind, error, text):
    with pytest.raises(error, match=text):
        spawn(fail, 2, kind)


def test_a_trace_reaches_the_parent():
    with pytest.raises(ChildError, match=r"rank 0 failed:\nTraceback[\s\S]*ValueError: a bug"):
        spawn(break_down, 1)


class EndsUnseen:
    """A child that fails between being asked whether it lives and being asked for its exit code, or the reverse."""

    sentinel, pid = -1, 1

    def __init__(self, question):
        self.question, self.exit_code = question, None

    def asked(self, question):
        before = self.exit_code
        if question == self.question:
            self.exit_code = 1
        return before

    def is_alive(self):
        return self.asked("alive") is None

    @property
    def exitcode(self):
        return self.asked("code")

    def join(self, timeout=None):
        assert self.exit_code == 1


@pytest.mark.parametrize("question", ["alive", "code"])
def test_a_child_that_fails_between_two_looks_is_not_missed(question, monkeypatch):
    monkeypatch.setattr(launch, "wait", lambda sentinels, timeout: None)
    assert launch._first_failure([EndsUnseen(question)], 0.0, threading.Event()) == 0


def leave_silently():
    os._exit(0)


def test_a_child_without_a_result_is_named():
    with pytest.raises(ChildError, match="rank 0 ended with exit code 0"):
        spawn(leave_silently, 1)


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"rank 1 did not start within 3 s \(parallel.start_timeout\)"):
        connect(this_world(), torch.device("cpu"), start_timeout=3)
