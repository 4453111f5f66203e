"""Where a run computes and in which precision; what is applied to the model from outside.

Policy for float32 matrix products: `fp32` means fp32, TF32 stays off. In `bf16-mixed` the weights, the gradients and
the optimizer's state are float32, products run in bfloat16 by autocast, and the few that stay in float32 may use TF32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from groundup.config import TrainConfig
from groundup.errors import UserError

Precision = Literal["auto", "fp32", "bf16-mixed"]


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device that exists. Raises UserError when there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device is "cuda", but PyTorch sees no CUDA device here; use "cpu" or "auto"')
    return torch.device(name)


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """`auto` as bf16-mixed on a GPU with bfloat16 units, else fp32; other names as they are."""
    if name != "auto":
        return name
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "fp32"


def concrete(train: TrainConfig) -> TrainConfig:
    """The same configuration with `auto` replaced by what this machine gives, so that the saved one reproduces it."""
    device = choose_device(train.device)
    kind = "cuda" if device.type == "cuda" else "cpu"
    return replace(train, device=kind, precision=choose_precision(train.precision, device))


def set_matmul_precision(precision: str) -> None:
    """Set this process's policy for float32 products (see the module's docstring)."""
    torch.set_float32_matmul_precision("high" if precision == "bf16-mixed" else "highest")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context of a forward pass: bfloat16 products under bf16-mixed, no change under fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def prepared(model: nn.Module, compile_model: bool) -> Callable[..., Any]:
    """What the training step calls: the model, compiled if asked.

    The compiled callable shares the model's parameters. Saving, loading and evaluating use the model itself, so no
    `_orig_mod.` enters a checkpoint and an evaluation's shapes never compile a second time.
    """
    return torch.compile(model) if compile_model else model


def describe(device: torch.device) -> str:
    """The device's name for people."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
