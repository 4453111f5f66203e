"""A run's parts, built from its configuration before anything is written; how its batches are read.

A batch is a pure function of the step, so reading ahead carries no state: one background thread reads the batch of the
next step while the current one trains, and a resumed run asks for its first step like any other.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from groundup.config import RunConfig
from groundup.data import TokenData, WindowSampler
from groundup.errors import UserError
from groundup.model import TransformerLM, count_parameters
from groundup.optim import Optimizer, clip_grad_norm, describe_groups, make_optimizer
from groundup.optim.clip import clip_factor
from groundup.parallel.ddp import DataParallel
from groundup.parallel.engine import materialiser, parallelize
from groundup.parallel.optimizer import DistributedOptimizer
from groundup.parallel.processes import World, local_device, this_world
from groundup.parallel.zero import ShardedDDP, ShardedOptimizer
from groundup.train.cuda_graph import StepGraph
from groundup.train.device import (
    AUTOCAST,
    LossScaler,
    autocast,
    cast_weights,
    compiled_unit,
    concrete,
    is_recorded,
    prepared,
    set_matmul_precision,
)
from groundup.train.evaluate import check_validation
from groundup.train.micro_batch import MicroBatch, find_micro_batch


@dataclass(frozen=True)
class Batch:
    """This rank's sequences of one step."""

    inputs: Int[Tensor, "sequences context_length"]
    targets: Int[Tensor, "sequences context_length"]
    n_valid: int
    """Valid targets of the whole global batch, over all micro-batches and ranks."""

    def micro_batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of `size` sequences on the device; from pinned memory the copy does not wait."""
        pieces = zip(self.inputs.split(size), self.targets.split(size), strict=True)
        for inputs, targets in pieces:
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


@dataclass(frozen=True)
class Job:
    """The parts of a run, built from its configuration."""

    config: RunConfig
    world: World
    device: torch.device
    data: TokenData
    sampler: WindowSampler
    model: TransformerLM
    forward: Callable[..., Tensor]
    """The model as the step calls it, compiled or not."""
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    """Scales the loss under fp16-mixed."""
    found: MicroBatch | None = None
    """How the micro-batch was found, where it was looked for."""
    engine: DataParallel | None = None
    """What spreads the run over its processes; None: it is alone."""
    graph: StepGraph | None = None
    """Records forward and backward, and replays them (train.cuda_graph)."""
    parameters: int = 0
    """Trainable scalars of the whole model."""
    groups: tuple[str, ...] = ()
    """What moves the parameters, a line each."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.config.train.global_batch_size * self.config.model.context_length

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return autocast(self.device, self.config.train.precision)

    def gradients(self, inputs: Tensor, targets: Tensor, n_valid: Tensor | int) -> Tensor:
        """Forward and backward of a micro-batch, whose gradients add to those that are there; its loss."""
        with self.autocast():
            loss = self.forward(inputs, targets, n_valid=n_valid)
        self.scaler.scaled(loss).backward()
        return loss.detach()

    def micro_step(self, inputs: Tensor, targets: Tensor, n_valid: int, first: bool) -> Tensor:
        """`gradients`, or its replay; `first`: of the micro-batches of a step."""
        if self.graph is None:
            return self.gradients(inputs, targets, n_valid)
        if not (self.graph.recorded or self.graph.given_up) and isinstance(self.optimizer, Optimizer):
            self.optimizer.make_state()  # the recording is the run's peak, and a resumed run has its state by then
        return self.graph(self.gradients, inputs, targets, n_valid, first)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch: gradients travel with the last one of a step only."""
        return nullcontext() if last or self.engine is None else self.engine.no_sync()

    def clip_grad_norm(self) -> Tensor:
        """Reduce what is not reduced yet, take the loss' scale off, clip; the joint norm before clipping.

        An optimizer that heeds a factor gets one, and clips as it reads the gradients.
        """
        holders: list[Tensor] = list(self.model.parameters())
        if self.engine is not None:
            self.engine.finish_gradient_synchronization()
        if isinstance(self.engine, ShardedDDP) and isinstance(self.optimizer, ShardedOptimizer):
            holders = [piece for line in self.optimizer.lines for piece in line.pieces]
        self.scaler.unscale(holders)
        clip = partial(clip_grad_norm, holders) if self.engine is None else self.engine.clip_grad_norm
        largest, moved_by = self.config.optim.grad_clip, getattr(self.optimizer, "inner", self.optimizer)
        if not (largest and isinstance(moved_by, Optimizer) and moved_by.heeds_flag()):
            return clip(largest)
        norm = clip(0.0)
        moved_by.factor = clip_factor(norm, largest)
        return norm

    def settle(self) -> None:
        """Wait for parameters and counts that are still under way, before something outside the step reads them."""
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.settle()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait()

    @property
    def has_whole_weights(self) -> bool:
        """Whether this process holds every weight."""
        return self.config.parallel.data not in ("fsdp", "torch-fsdp2") or self.engine is None

    @property
    def is_sharded(self) -> bool:
        """Whether this process lacks some weights or some of the optimizer's state."""
        return not self.has_whole_weights or isinstance(self.optimizer, DistributedOptimizer)

    def read(self, step: int) -> Batch:
        """This rank's batch of a step."""
        return read_batch(self.data.train, self.sampler, step, self.world, pin=self.device.type == "cuda")


def build(config: RunConfig) -> Job:
    """Resolve the configuration, check data against model and build everything in memory; nothing is written.

    Raises UserError for missing or foreign token files, too few tokens, a vocabulary larger than the model's, and ranks
    that differ in token files, device or precision.
    """
    world = this_world()
    if not config.data.path:
        raise UserError("no token files: add --data DIR, a directory written by groundup tokenize")
    data = TokenData.open(Path(config.data.path))
    config = replace(config, train=concrete(config.train, world.size))
    _check_machines(world, config, data)
    config = config.resolve(data.vocab_size, world.size)
    train, device = config.train, local_device(config.train.device, world)
    recorded = is_recorded(train, device, world.size)
    set_matmul_precision(train.precision)
    vocabulary = data.tokenizer().vocab_size
    if vocabulary > config.model.vocab_size:
        raise UserError(
            f"the tokenizer of {config.data.path} has {vocabulary:,} tokens, but model.vocab_size is "
            f"{config.model.vocab_size:,}; set it to {vocabulary} or more, or to 0 for the tokenizer's"
        )
    if train.eval_every:
        check_validation(data)
    sampler = WindowSampler(
        n_tokens=len(data.train),
        context_length=config.model.context_length,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        order=config.data.order,
        vocab_size=config.model.vocab_size,
    )
    found = None
    if not train.micro_batch_size:
        # The smallest of the ranks' for all of them, with the figures of the rank that found it.
        found = min(world.gather(find_micro_batch(config, device, world.size)), key=lambda one: one.size)
        config = replace(config, train=replace(train, micro_batch_size=found.size)).resolve(world_size=world.size)
        train = config.train
    torch.manual_seed(train.seed)
    scaler = LossScaler(train.precision == "fp16-mixed", device)
    parts = _alone(config, device, recorded) if world.size == 1 else _spread(config, device, world)
    return Job(config, world, device, data, sampler, scaler=scaler, found=found, **parts)


def _check_machines(world: World, config: RunConfig, data: TokenData) -> None:
    """Raise UserError on every rank where two of them would train on other tokens, or in another way."""
    found = {
        f"the token files in {config.data.path}": data.digest[:12],
        "train.device": config.train.device,
        "train.precision": config.train.precision,
    }
    everywhere = world.gather(found)
    for rank, theirs in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if theirs[name] != value:
                raise UserError(
                    f"ranks disagree on {name}: rank 0 has {value}, rank {rank} has {theirs[name]}; give all the same"
                )


def _model(config: RunConfig, device: torch.device) -> TransformerLM:
    with torch.device("meta"):
        model = TransformerLM(config.model)
    # First values are drawn on the CPU: the same weights on every kind of device.
    fill = materialiser(model, config.train.seed)
    for module in model.modules():
        fill(module)
    model.to(device)
    cast_weights(model, config.train.precision)
    return model


def _alone(config: RunConfig, device: torch.device, recorded: bool) -> dict[str, Any]:
    """The job's model, forward and optimizer in one process; `recorded`: its steps, as CUDA graphs."""
    model = _model(config, device)
    optimizer = make_optimizer(model, config.optim, config.train.seed)
    facts = {"parameters": count_parameters(model), "groups": tuple(describe_groups(optimizer))}
    forward = prepared(model, compiled_unit(config.train, 1))
    graph = StepGraph(model.parameters()) if recorded else None
    return {"model": model, "forward": forward, "optimizer": optimizer, "graph": graph, **facts}


def _spread(config: RunConfig, device: torch.device, world: World) -> dict[str, Any]:
    """The same with the engine of [parallel]. FSDP's model is born without memory and filled unit by unit."""
    train, parallel = config.train, config.parallel
    from_meta = parallel.data == "fsdp" and train.precision != "bf16-pure"
    if from_meta:
        with torch.device("meta"):
            model = TransformerLM(config.model)
    else:
        model = _model(config, device)

    def plain(model: Any) -> torch.optim.Optimizer:
        return make_optimizer(model, config.optim, train.seed)

    facts = {"parameters": count_parameters(model), "groups": tuple(describe_groups(plain(model)))}
    prepared(model, compiled_unit(train, world.size))
    fill = materialiser(model, train.seed) if from_meta else None
    engine, optimizer = parallelize(model, parallel, plain, AUTOCAST.get(train.precision), fill, device)
    return {"model": model, "forward": engine, "engine": engine, "optimizer": optimizer, **facts}


def read_batch(tokens: np.ndarray, sampler: WindowSampler, step: int, world: World, pin: bool) -> Batch:
    """The batch of optimizer step `step` (counted from 1). Raises UserError for an id the model has no row for."""
    inputs, targets = map(torch.from_numpy, sampler.batch(tokens, step - 1, rank=world.rank, world_size=world.size))
    if pin:
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    # Every target of a window is valid and every rank has as many, so the global count needs no communication.
    return Batch(inputs, targets, targets.numel() * world.size)


def prefetched(read: Callable[[int], Batch], first: int, last: int) -> Iterator[tuple[int, Batch]]:
    """(step, batch) for the steps first … last, each read while the one before is in use."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="groundup-batches") as thread:
        coming = thread.submit(read, first) if first <= last else None
        for step in range(first, last + 1):
            assert coming is not None
            batch = coming.result()
            if step < last:
                coming = thread.submit(read, step + 1)
            yield step, batch
