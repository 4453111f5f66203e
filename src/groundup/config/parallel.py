"""How a run uses many processes."""

from dataclasses import dataclass
from typing import Literal

from groundup.errors import UserError


@dataclass(frozen=True)
class ParallelConfig:
    """One process a GPU, started by --nproc, torchrun, mpirun or srun; with one process nothing here has an effect."""

    data: Literal["naive", "flat", "overlap", "bucketed", "fsdp", "torch-ddp", "torch-fsdp2"] = "bucketed"
    """How gradients and weights are spread. naive, flat, overlap, bucketed: whole weights on every rank, gradients
    all-reduced in four ways. fsdp: weights, gradients and optimizer state sharded. torch-…: PyTorch's own engines."""
    optimizer: Literal["whole", "zero1"] = "whole"
    """zero1: each rank keeps 1/W of the optimizer's state (ZeRO-1). With bucketed its communication is overlapped."""
    bucket_mb: float = 50.0
    """MiB of gradients that travel together (bucketed, zero1, torch-ddp)."""
    reduce: Literal["auto", "fp32", "bf16"] = "auto"
    """Type in which gradients travel; auto: as they are (fsdp: as the master weights)."""
    prefetch: int = 1
    """fsdp: blocks gathered ahead of the one at work, 0 to 2."""
    checkpoint: Literal["whole", "dcp"] = "whole"
    """Format of checkpoints, any of which every engine and number of processes reads. whole: safetensors files, written
    by rank 0. dcp: torch.distributed.checkpoint, each rank writing its own shards at once (torch-fsdp2 only)."""
    nvls: bool = False
    """Whether NCCL may use NVLink multicast (NCCL_NVLS_ENABLE), which not every driver and container allows."""
    start_timeout: float = 120.0
    """Seconds that ranks wait for each other at the start."""
    timeout: float = 600.0
    """Seconds after which a collective that does not end stops the run."""

    def check(self) -> "ParallelConfig":
        """The same configuration. Raises UserError naming the offending value."""
        if not self.bucket_mb > 0:
            raise UserError(f"parallel.bucket_mb is {self.bucket_mb}; it must be positive")
        if not 0 <= self.prefetch <= 2:
            raise UserError(f"parallel.prefetch is {self.prefetch}; it must be 0, 1 or 2")
        for name in ("start_timeout", "timeout"):
            if not getattr(self, name) >= 1:
                raise UserError(f"parallel.{name} is {getattr(self, name)}; it must be at least 1 second")
        if self.optimizer == "zero1" and self.data not in ("naive", "flat", "overlap", "bucketed"):
            raise UserError(
                f'parallel.optimizer "zero1" goes with whole weights, not with parallel.data "{self.data}"; '
                'use "bucketed", or leave the optimizer "whole" (fsdp shards its state anyway)'
            )
        if self.checkpoint == "dcp" and self.data != "torch-fsdp2":
            raise UserError(
                f'parallel.checkpoint "dcp" writes the shards of parallel.data "torch-fsdp2"; "{self.data}" has none '
                'of that kind: leave it "whole"'
            )
        return self
