"""The largest micro-batch that fits: predicted by the account, then tried.

The global batch decides what is learnt, so it is given; which part of it a device sees at once decides speed and memory
alone. Candidates are the divisors of a device's share of the global batch. The account predicts the bytes of a step in
eager mode; a bisection over the candidates finds the largest one below the limit. Then a step is really made, with
random tokens and a model that is thrown away; where the memory runs out or the limit is passed, the next smaller
candidate is tried.

Cost: some symbolic steps (about 0.1 s each for 12 layers) and two real ones a candidate tried. On a CPU memory that is
asked for is granted and only later found missing (the kernel then kills the process), so there the prediction decides
and the step only proves that it runs. Sharded optimizers and weights need less than predicted: the choice is safe, not
the largest.
"""

import gc
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

import psutil
import torch

from groundup.account import parameters
from groundup.account.memory import Setting, memory, trace
from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.optim import make_optimizer
from groundup.train.device import autocast, cast_weights
from groundup.train.guards import is_out_of_memory

GIB = 2**30
GPU_SHARE, CPU_SHARE = 0.9, 0.5
"""Of the free memory: on a GPU the allocator's fragments need some, on a CPU everybody else."""


@dataclass(frozen=True)
class MicroBatch:
    """What was chosen and why."""

    size: int
    """Sequences a device sees at once."""
    predicted: int
    """Bytes of a step, predicted."""
    measured: int
    """Bytes of the step that was made; 0 on a CPU, which does not count them."""
    limit: int
    """Bytes that were allowed."""
    failed: tuple[int, ...] = ()
    """Larger sizes that were predicted to fit and did not."""

    def __str__(self) -> str:
        measured = f", measured {self.measured / GIB:.2f}" if self.measured else ""
        failed = f"; {', '.join(map(str, self.failed))} did not fit" if self.failed else ""
        return (
            f"micro-batch {self.size} found: predicted {self.predicted / GIB:.2f} GiB{measured}, "
            f"allowed {self.limit / GIB:.2f}{failed}"
        )


def find_micro_batch(config: RunConfig, device: torch.device, world_size: int = 1) -> MicroBatch:
    """The micro-batch of a resolved configuration whose global batch is given. Raises UserError where not even one
    sequence fits. What it allocates is gone when it returns; the global random state is as before.
    """
    share = config.train.global_batch_size // world_size
    limit = int(config.train.memory_gib * GIB)
    if not limit and device.type == "cuda":
        torch.cuda.empty_cache()
        limit = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    elif not limit:
        limit = int(psutil.virtual_memory().available * CPU_SHARE)
    predicted = cache(lambda size: predicted_bytes(config, size, device))
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    failed: list[int] = []
    for size in reversed(sizes[: bisect_right(sizes, limit, key=predicted)]):
        measured = step_bytes(config, size, device)
        if measured is not None and measured <= limit:
            return MicroBatch(size, predicted(size), measured, limit, tuple(failed))
        failed.append(size)
    raise UserError(
        f"not even one sequence of {config.model.context_length} tokens fits into {limit / GIB:.2f} GiB "
        f"({predicted(1) / GIB:.2f} GiB predicted); take a smaller model or context, "
        "model.checkpoint_activations 1, or allow more with train.memory_gib"
    )


def predicted_bytes(config: RunConfig, size: int, device: torch.device) -> int:
    """Peak bytes of a training step with `size` sequences, the optimizer's state included."""
    precision = config.train.precision.replace("fp16", "bf16")  # of the same width
    model = config.model.resolve()
    if device.type == "cuda":
        setting = Setting.on_gpu(model, batch=size, precision=precision)
        table = memory(model, trace(model, setting))
        peak = table["reserved"]
    else:
        setting = Setting(size, precision=precision, checkpoint_every=model.checkpoint_activations)
        table = memory(model, trace(model, setting, plain=True))
        peak = max(table["peak"], table["peak_first_step"])
    if precision == "bf16-pure" and config.optim.master_weights:
        peak += 8 * parameters(model)["total"]  # float32 weight and moments instead of bf16 moments
    return peak


def step_bytes(config: RunConfig, size: int, device: torch.device) -> int | None:
    """Peak bytes of two steps (the first one creates the optimizer's state); 0 on a CPU; None: out of memory."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        _steps(config, size, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    else:
        return torch.cuda.max_memory_reserved(device) if on_gpu else 0
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def _steps(config: RunConfig, size: int, device: torch.device) -> None:
    model = TransformerLM(config.model).to(device)
    cast_weights(model, config.train.precision)
    optimizer = make_optimizer(model, config.optim)
    generator = torch.Generator().manual_seed(0)
    shape = size, config.model.context_length
    ids = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    for _ in range(2):
        with autocast(device, config.train.precision):
            loss = model(ids, ids, n_valid=ids.numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
