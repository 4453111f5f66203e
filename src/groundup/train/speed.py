"""How well a run uses its device: model FLOPs utilisation (Chowdhery et al. 2022, appendix B) and peak memory.

MFU = tokens a second · FLOPs a token / peak. The FLOPs are the account's: forward and backward of every matrix product,
attention as a causal kernel executes it, nothing for the recompute of activation checkpointing. The peak is the one the
maker lists, dense and in the run's precision, or train.peak_tflops.
"""

import resource
import sys

import torch

from groundup.account import GPUS
from groundup.account.flops import flops
from groundup.account.hardware import named_by_driver
from groundup.config import RunConfig


def flops_per_token(config: RunConfig) -> float:
    """FLOPs of one trained token, forward and backward."""
    return flops(config.model, 1, config.model.context_length, attention="flash")["per_token"]


def listed_tflops(device_name: str, precision: str) -> float:
    """The listed dense peak of a GPU that the driver calls `device_name`, in TFLOP/s; 0 for one not in the table."""
    found = named_by_driver(device_name)
    return GPUS[found.name.removesuffix("-measured")].matmul_tflops(precision) if found else 0.0


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """FLOP/s that one device could do at best; 0 where nobody says."""
    if config.train.peak_tflops:
        return config.train.peak_tflops * 1e12
    if device.type != "cuda":
        return 0.0
    return listed_tflops(torch.cuda.get_device_name(device), config.train.precision) * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that tensors took on a GPU so far, or that the process took where there is none, in GiB (2**30)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
