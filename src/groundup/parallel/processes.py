"""Which process this is, how the processes find each other, and how they end.

A process learns its rank from whoever started it: `groundup train --nproc`, torchrun (RANK, WORLD_SIZE), mpirun
(OMPI_COMM_WORLD_RANK or PMI_RANK), srun (SLURM_PROCID). The meeting point is MASTER_ADDR and MASTER_PORT; under srun
alone it is derived: the first host of the job's node list, a port from the job's number. Then every start is the same.
"""

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from groundup.config import ParallelConfig
from groundup.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes, and what they decide together.

    Each trains on its slice of the global batch. Every method is a collective: all ranks call it at the same place.
    Alone it costs nothing.
    """

    rank: int
    size: int
    local_rank: int = 0
    """Which of the processes on this machine."""
    launcher: str = ""
    """Who started it; empty: nobody, a single process."""

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over the ranks, in place and on their device; no process waits for the numbers."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank. Through the CPU's back-end (gloo): a GPU does not wait for it."""
        return self.sum(torch.tensor(float(flag))).item() > 0 if self.size > 1 else flag

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """`work()` on rank 0 alone; its result on every rank. An error is raised on every rank: rank 0's own there, on
        the others as a UserError, so that nobody waits for what does not come.

        The others wait no longer than the processes' `timeout`: a save that takes longer needs a longer one.
        """
        if self.size == 1:
            return work()
        answer: list[Any] = [None, None]
        failed = None
        if self.rank == 0:
            try:
                answer[0] = work()
            except Exception as error:
                failed = error
                answer[1] = str(error) if isinstance(error, UserError) else f"rank 0 failed: {_told(error)}"
        dist.broadcast_object_list(answer, 0, device=torch.device("cpu"))
        if failed is not None:
            raise failed
        if answer[1] is not None:
            raise UserError(answer[1])
        return answer[0]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def this_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world that the environment tells of. Raises UserError when its numbers do not fit together."""
    for launcher, rank, size, local in _VARIABLES:
        if rank not in environment or size not in environment:
            continue
        # Inside sbatch or salloc Slurm's variables do not mean that srun started this process. Its PMI-2 sets PMI_RANK
        # as mpirun does, whose daemons srun may have started; the local rank is mpirun's alone.
        if launcher == "srun" and ("SLURM_STEP_ID" not in environment or "MPI_LOCALRANKID" in environment):
            continue
        try:
            found = World(int(environment[rank]), int(environment[size]), int(environment.get(local, 0)), launcher)
        except ValueError:
            raise UserError(f"{rank} = {environment[rank]!r}, {size} = {environment[size]!r}: not numbers") from None
        if not 0 <= found.rank < found.size:
            raise UserError(f"{rank} {found.rank} is not below {size} {found.size}; start the processes again")
        return found if found.size > 1 else World(0, 1)
    return World(0, 1)


def meeting_point(world: World, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """(host, port) where rank 0 waits. Raises UserError when the environment does not say."""
    port = environment.get("MASTER_PORT", "")
    job = environment.get("SLURM_JOB_ID", "") if world.launcher == "srun" else ""
    if not port and job.isdecimal():
        port = str(15000 + int(job) % 20000)
    host = environment.get("MASTER_ADDR", "")
    if not host and world.launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        host = first_host(nodes or environment.get("SLURM_NODELIST", ""))
    if not host and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world.size):
        host = "127.0.0.1"
    if not host or not port.isdecimal():
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise UserError(
            f"{world.launcher} started {world.size} processes, but {missing} is not set; export MASTER_ADDR (a host "
            "that all reach) and MASTER_PORT (a free port there), with mpirun by -x"
        )
    return host, int(port)


def first_host(text: str) -> str:
    """The first host of a node list as Slurm writes it: `rack[1-2]n[01-03,7],login` → rack1n01.

    Raises UserError for an empty or unreadable list.
    """
    part = re.split(r",(?![^\[]*\])", text.strip())[0]  # at the commas outside brackets
    host = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", part)  # leading zeros are part of the name
    if not re.fullmatch(r"[\w.\-]+", host):
        raise UserError(f"SLURM_NODELIST is {text!r}: no list of hosts; export MASTER_ADDR")
    return host


def nccl_variables(nvls: bool, timeout: float) -> dict[str, str]:
    """What is set before NCCL starts, where the environment does not say otherwise: the one place that does."""
    return {
        "NCCL_NVLS_ENABLE": "1" if nvls else "0",
        # A collective that fails or times out ends the process instead of leaving it to hang.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Longer than the collectives' own timeout, which has the better message.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(timeout) + 60),
    }


def local_device(kind: str, world: World) -> torch.device:
    """This process's device: GPU number local_rank, or the only one it may see. Raises UserError when there is none."""
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)
    if world.local_rank >= count:
        raise UserError(
            f"process {world.local_rank} of this machine has no GPU: it sees {count}; start at most {count} processes "
            "a machine, or let each see one"
        )
    return torch.device("cuda", world.local_rank)


def connect(
    world: World,
    device: torch.device,
    *,
    nvls: bool = False,
    start_timeout: float = 120.0,
    timeout: float = 600.0,
    backend: str | None = None,
    name: str = "",
) -> dict[str, str]:
    """Join the other processes; returns the NCCL variables that were set. Raises UserError when they do not come.

    GPUs talk through NCCL, CPU tensors (checks, checkpoints) through Gloo, unless `backend` says otherwise. `name`: of
    this meeting; where processes have met before, what they left at the meeting point bears another one.
    """
    chosen = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        wanted = nccl_variables(nvls, timeout)
        chosen = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(chosen)
    host, port = meeting_point(world)
    try:
        # Under --nproc and torchrun the launcher holds the store, so that no rank's port can be taken meanwhile.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            host,
            port,
            world.size,
            is_master=world.rank == 0 and not hosted,
            timeout=timedelta(seconds=start_timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"groundup/{attempt}{name}", store)
        _meet(prefixed, world, start_timeout, device)
        usual = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend or usual,
            store=prefixed,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout),
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise UserError(
            f"rank {world.rank} of {world.size} could not join at {host}:{port}: {str(error).splitlines()[0]}"
        ) from None
    return chosen


def _meet(store: Any, world: World, timeout: float, device: torch.device) -> None:
    """Wait for all. Name the rank that does not come, instead of the store's key; refuse two on one GPU, of which NCCL
    tells late and in its own words.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"here/{world.rank}", gpu)
    seen: dict[str, int] = {}
    for rank in range(world.size):
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=timeout))
        except dist.DistStoreError:
            raise RuntimeError(f"rank {rank} did not start within {timeout:g} s (parallel.start_timeout)") from None
        other = seen.setdefault(store.get(f"here/{rank}").decode() or str(rank), rank)
        if other != rank:
            raise RuntimeError(f"ranks {other} and {rank} have the same GPU; start one process a GPU")


@contextmanager
def joined(world: World, kind: str, parallel: ParallelConfig, note: Callable[[str], None]) -> Generator[None]:
    """Be one of the world's processes meanwhile, on a device of `kind`. `note` gets a line for what is set for NCCL.

    Raises UserError when the others do not come, or when one is lost underway.
    """
    if world.size == 1 or dist.is_initialized():
        yield
        return
    parallel.check()
    chosen = connect(
        world,
        local_device(kind, world),
        nvls=parallel.nvls,
        start_timeout=parallel.start_timeout,
        timeout=parallel.timeout,
    )
    if chosen:
        note(f"set for NCCL: {', '.join(f'{name}={value}' for name, value in chosen.items())}")
    try:
        yield
        world.any(False)  # nobody leaves, and takes the meeting point away, before all are done
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        longer = ", and a longer parallel.timeout if it was still saving" if "time" in reason.lower() else ""
        raise UserError(
            f"rank {world.rank} lost another rank ({reason}); go on from the last checkpoint with --resume{longer}"
        ) from error
    disconnect()


def disconnect() -> None:
    """Leave the other processes in order; does nothing where none were joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


_LOST = ("connection closed by peer", "timed out", "timeout", "connection reset", "gloo", "nccl", "pair closure")


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a collective raises when another rank has gone or does not answer."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or "invalid usage" in text:  # NCCL's word for a mistake of the caller's
        return False
    return isinstance(error, dist.DistError) or any(word in text for word in _LOST)
