"""A configuration → the engine around a TransformerLM, with its optimizer.

What the engines must know of the model stands here: which modules run in which order, and which weights are read when.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groundup.config import ParallelConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.optim import Muon
from groundup.parallel.agree import check_agreement
from groundup.parallel.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlapDDP
from groundup.parallel.fsdp import FSDP
from groundup.parallel.torch_engines import TorchDDP, TorchFSDP2
from groundup.parallel.units import UnitPlan, default_units
from groundup.parallel.whole import WholeParameterOptimizer
from groundup.parallel.zero import ShardedDDP, ShardedOptimizer

WHOLE: dict[str, type[DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": BucketedDDP,
    "torch-ddp": TorchDDP,
}
"""parallel.data of the engines that hold whole weights."""
REDUCE = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def gates(model: TransformerLM) -> list[nn.Module]:
    """The modules that a forward pass calls in this order; ln_final comes before the head reads its weight."""
    return [model.token_embeddings, *model.layers, model.ln_final]


def units(model: TransformerLM) -> list[UnitPlan]:
    """What FSDP gathers together: the embedding, each block, the head. A tied table stays whole from first to last."""
    plans = default_units(model)
    return plans if model.lm_head is not None else [UnitPlan(model, plans[0].layers, keep=True), *plans[1:]]


def parallelize(
    model: TransformerLM,
    parallel: ParallelConfig,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    compute_dtype: torch.dtype | None = None,
    materialise: Callable[[nn.Module], None] | None = None,
    device: torch.device | None = None,
    average: bool = False,
) -> tuple[DataParallel, torch.optim.Optimizer]:
    """(engine, optimizer) for a model on its device, on every rank alike; the process group must be there.

    Gradients are summed over ranks, as each rank's loss is divided by the global token count (`average` divides).
    `make_optimizer` says which parameters move how; it sees the model before anything is sharded. `compute_dtype`: the
    type of FSDP's gathered weights; `materialise`, `device`: see FSDP. Raises UserError for impossible
    combinations.
    """
    parallel.check()
    check_agreement(model, timeout=parallel.start_timeout)
    plain = make_optimizer(model)
    extra = {name: getattr(plain, name) for name in ("master_weights", "seed") if hasattr(plain, name)}
    common: dict[str, Any] = {
        "average": average,
        "reduce_dtype": REDUCE[parallel.reduce],
        "timeout": parallel.start_timeout,
    }
    if parallel.data in ("fsdp", "torch-fsdp2"):
        if isinstance(plain, Muon):
            raise UserError(
                f'optim.name "muon" needs whole matrices, which parallel.data "{parallel.data}" cuts; use "bucketed" '
                'with parallel.optimizer "zero1"'
            )
        names = {p: name for name, p in model.named_parameters()}
        groups = [{**g, "params": [names[p] for p in g["params"]]} for g in plain.param_groups]
        if parallel.data == "fsdp":
            engine: DataParallel = FSDP(
                model,
                compute_dtype,
                units=units(model),
                prefetch=parallel.prefetch,
                materialise=materialise,
                device=device,
                **common,
            )
        else:
            engine = TorchFSDP2(model, list(model.layers), compute_dtype, **common)
        now = dict(model.named_parameters())
        return engine, type(plain)([{**g, "params": [now[n] for n in g["params"]]} for g in groups], **extra)
    optimizer, extra["timeout"] = plain, parallel.start_timeout
    if parallel.optimizer == "zero1" and isinstance(plain, Muon):
        optimizer = WholeParameterOptimizer(plain.param_groups, Muon, **extra)
    elif parallel.optimizer == "zero1":
        # Its buffers take the model's values, in which the engine then writes those of rank 0.
        optimizer = ShardedOptimizer(plain.param_groups, type(plain), bucket_mb=parallel.bucket_mb, **extra)
        if parallel.data == "bucketed":
            return ShardedDDP(model, optimizer, gates=gates(model), **common), optimizer
    if parallel.data in ("bucketed", "torch-ddp"):
        common["bucket_mb"] = parallel.bucket_mb
    return WHOLE[parallel.data](model, **common), optimizer


def materialiser(model: TransformerLM, seed: int) -> Callable[[nn.Module], None]:
    """For a model on the meta device: gives one module memory on the CPU, and the values of model.init_weights(seed).

    Called for every module in the order of modules(), it draws the very numbers that a whole model would get there.
    """
    generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def materialise(module: nn.Module) -> None:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device="cpu", recurse=False)
            model.init_module(module, generator)

    return materialise
