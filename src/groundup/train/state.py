"""The state of a run as named tensors, the same for every world size: weights, optimizer state, random numbers."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from groundup.errors import UserError
from groundup.parallel.shards import Shards


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name → weight, contiguous. A tied matrix appears once."""
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`exp_avg.layers.0.…` and so on: each state of each parameter under the parameter's name, counts as int64."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value.contiguous() if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a safetensors file, or whole ones of a directory of shards."""
    if not path.is_dir():
        return load_file(path)
    shards = Shards(path)
    return shards.whole(shards.keys())


def load_model(model: nn.Module, path: Path) -> None:
    """Copy the weights of a file into the model. Raises UserError naming the first tensor that differs."""
    saved = read_tensors(path)
    check_tensors({name: tensor.shape for name, tensor in model.state_dict().items()}, saved, path)
    model.load_state_dict(saved)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give every parameter the state it had when the file was written. Raises UserError as load_model does."""
    saved = read_tensors(path)
    parameters = dict(model.named_parameters())
    # Which states there are is the optimizer's matter, by group; that a group's parameters all have them is checked.
    names = {parameter: name for name, parameter in parameters.items()}
    expected: dict[str, torch.Size] = {}
    for group in optimizer.param_groups:
        members = {names[p]: p for p in group["params"]}
        keys = {full.partition(".")[0]: t.ndim == 0 for full, t in saved.items() if full.partition(".")[2] in members}
        for key, is_count in keys.items():
            for name, p in members.items():
                expected[f"{key}.{name}"] = torch.Size() if is_count else p.shape
    check_tensors(expected, saved, path)
    for full, tensor in saved.items():
        key, _, name = full.partition(".")
        parameter = parameters[name]
        # A clone, because what load_file returns may be a view of the mapped file.
        value = tensor.to(parameter.device, copy=True) if tensor.ndim else tensor.item()
        optimizer.state[parameter][key] = value


def check_tensors(expected: Mapping[str, torch.Size], saved: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError with the first name, in the model's order, whose shape is not the file's."""
    for name, shape in expected.items():
        if name not in saved:
            raise UserError(
                f"{path} does not match the model: it has no {name} {tuple(shape)}; check [model] in the config"
            )
        if saved[name].shape != shape:
            raise UserError(
                f"{path} does not match the model: {name} is {tuple(saved[name].shape)} there and {tuple(shape)} "
                "in the model; check [model] in the config"
            )
    for name, tensor in saved.items():
        if name not in expected:
            raise UserError(
                f"{path} does not match the model: the model has no {name} {tuple(tensor.shape)}; "
                "check [model] in the config"
            )


def rng_state(device: torch.device) -> dict[str, str]:
    """torch's generators of this rank as base64. Nothing in a run draws from another one."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(tensor.numpy().tobytes()).decode() for name, tensor in state.items()}


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators back; a run that moved to another kind of device keeps that device's fresh one."""
    tensors = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in state.items()
    }
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
