"""Which parameter is moved how: by name and shape → optimizer with its parameter groups."""

from typing import Any

from torch import nn

from groundup.config import OptimConfig
from groundup.optim.adamw import AdamW
from groundup.optim.muon import Muon

EMBEDDINGS = ("token_embeddings", "lm_head")


def make_optimizer(model: nn.Module, optim: OptimConfig, seed: int = 0) -> AdamW | Muon:
    """The optimizer that `optim` (resolved) names; `set_learning_rate` gives it the schedule's at every step."""
    common: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    common |= {"weight_decay": optim.weight_decay, "master_weights": optim.master_weights, "seed": seed}
    if optim.name == "adamw":
        groups = parameter_groups(model, optim.weight_decay, optim.decay_norms, optim.decay_embeddings)
        return AdamW(groups, **common)
    hidden = [p for name, p in _trained(model) if _is_hidden(name, p)]
    rest = parameter_groups(model, optim.weight_decay, optim.decay_norms, optim.decay_embeddings, without_hidden=True)
    ratio = optim.muon_lr / optim.lr
    muon = {"name": "hidden matrices", "params": hidden, "muon": True, "lr": optim.muon_lr, "lr_ratio": ratio}
    groups = [muon, *({**group, "muon": False} for group in rest)] if hidden else rest
    settings = {"momentum": optim.muon_momentum, "steps": optim.muon_steps, "factor": optim.muon_factor}
    return Muon(groups, **settings, **common)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_norms: bool = False,
    decay_embeddings: bool = True,
    without_hidden: bool = False,
) -> list[dict[str, Any]]:
    """AdamW's groups, decayed and not decayed, without empty ones; `without_hidden` leaves out Muon's matrices.

    Matrices decay, vectors (norm gains) do not: decay would pull a gain from 1 to 0.
    """
    decayed, free = [], []
    for name, p in _trained(model):
        if without_hidden and _is_hidden(name, p):
            continue
        decays = decay_norms if p.ndim < 2 else decay_embeddings or not _is_embedding(name)
        (decayed if decays else free).append(p)
    groups = [
        {"name": "decayed", "params": decayed, "weight_decay": weight_decay},
        {"name": "not decayed", "params": free, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Give every group the learning rate `lr`, times its own ratio where it has one (Muon's)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def describe_groups(optimizer: Any) -> list[str]:
    """One line a group: what moves it, tensors, parameters, peak learning rate, decay."""
    lines = []
    for group in optimizer.param_groups:
        kind = "Muon" if group.get("muon") else "AdamW"
        count = sum(p.numel() for p in group["params"])
        factor = f" × {group['factor']} factor" if group.get("muon") else ""
        lines.append(
            f"{kind}, {group.get('name', 'all')}: {len(group['params'])} tensors, {count:,} parameters, "
            f"lr {group['lr']:g}{factor}, decay {group['weight_decay']:g}"
        )
    return lines


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _is_embedding(name: str) -> bool:
    return any(part in EMBEDDINGS for part in name.split("."))


def _is_hidden(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 2 and not _is_embedding(name)
