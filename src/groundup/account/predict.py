"""Everything the account predicts of one step, under the names that the `step` benchmark measures."""

from groundup.account.flops import flops
from groundup.account.hardware import gpu as gpu_named
from groundup.account.memory import Setting, memory, trace
from groundup.account.params import parameters
from groundup.account.throughput import throughput
from groundup.config import ModelConfig


def predict_step(
    config: ModelConfig,
    batch: int,
    context: int,
    mode: str = "train-step",
    precision: str = "fp32",
    *,
    attention: str = "reference",
    kernels: str = "reference",
    checkpoint_every: int = 0,
    grad: bool = False,
    gpu: str = "h200-measured",
) -> dict[str, float]:
    """Flat keys: parameters.* (counts), flops.* (FLOP), memory.* (bytes), time.* (milliseconds), tokens_per_second.

    mode forward | forward-backward | train-step; precision fp32 | tf32 | bf16-mixed | bf16-pure; `grad`: for mode
    forward, whether autograd records. memory.peak is the steady step's, as torch.cuda.max_memory_allocated has it,
    cuBLAS's workspace included. Raises UserError.
    """
    device = gpu_named(gpu)
    setting = Setting(
        *(batch, context, mode, precision, attention, checkpoint_every, grad),
        workspace_mib=device.cublas_workspace_mib,
        kernels=kernels,
    )
    config = config.resolve()
    step = trace(config, setting.checked(config))
    table: dict[str, float] = {f"parameters.{key}": value for key, value in parameters(config).items()}
    work = flops(config, batch, context, attention, checkpoint_every, kernels=kernels)
    if mode == "forward":
        work["backward"] = work["recompute"] = 0
        work["total"] = work["forward"]
        work["convention"] /= 3
    table |= {f"flops.{key}": value for key, value in work.items()}
    table |= {f"memory.{key}": value for key, value in memory(config, step).items()}
    speed = throughput(config, step, device)
    outside = ("tokens_per_second", "mfu")
    table |= {key if key in outside else f"time.{key}": value for key, value in speed.items()}
    return table
