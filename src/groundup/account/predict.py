"""Everything the account predicts of one step, under the names that the `step` benchmark measures."""

from dataclasses import replace

from groundup.account.flops import flops
from groundup.account.hardware import gpu as gpu_named
from groundup.account.memory import Setting, memory, trace
from groundup.account.params import parameters
from groundup.account.throughput import throughput
from groundup.config import ModelConfig


def predict_step(config: ModelConfig, setting: Setting, gpu: str = "h200-measured") -> dict[str, float]:
    """Flat keys: parameters.* (counts), flops.* (FLOP), memory.* (bytes), time.* (milliseconds), tokens_per_second.

    memory.peak is the steady step's, as torch.cuda.max_memory_allocated has it, cuBLAS's workspace included (as large
    as the GPU's is). Raises UserError.
    """
    config, device = config.resolve(), gpu_named(gpu)
    setting = replace(setting, workspace_mib=device.cublas_workspace_mib).checked(config)
    step = trace(config, setting)
    work = flops(config, setting.batch, setting.context, setting.attention, setting.checkpoint_every, setting.kernels)
    if setting.mode == "forward":
        work["backward"] = work["recompute"] = 0
        work["total"] = work["forward"]
        work["convention"] /= 3
    table: dict[str, float] = {}
    for prefix, figures in (("parameters", parameters(config)), ("flops", work), ("memory", memory(config, step))):
        table |= {f"{prefix}.{key}": value for key, value in figures.items()}
    outside = ("tokens_per_second", "mfu")
    speed = throughput(config, step, device)
    return table | {key if key in outside else f"time.{key}": value for key, value in speed.items()}
