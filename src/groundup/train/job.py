"""A run's parts, built from its configuration before anything is written."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groundup.config import RunConfig
from groundup.data import TokenData, WindowSampler
from groundup.errors import UserError
from groundup.model import TransformerLM, count_parameters
from groundup.optim import AdamW, Muon, describe_groups, make_optimizer
from groundup.train.batches import Batch, read_batch
from groundup.train.device import autocast, cast_weights, concrete, describe, prepared, set_matmul_precision
from groundup.train.evaluate import check_validation
from groundup.train.loss_scale import LossScaler
from groundup.train.micro_batch import MicroBatch, find_micro_batch, with_micro_batch
from groundup.train.plan import Plan
from groundup.train.world import World, this_world


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
    optimizer: AdamW | Muon
    scaler: LossScaler
    """Scales the loss under fp16-mixed."""
    found: MicroBatch | None = None
    """How the micro-batch was found, where it was looked for."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.config.train.global_batch_size * self.config.model.context_length

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return autocast(self.device, self.config.train.precision)

    def read(self, step: int) -> Batch:
        """This rank's batch of a step."""
        return read_batch(self.data.train, self.sampler, step, self.world, pin=self.device.type == "cuda")


def build(config: RunConfig) -> Job:
    """Resolve the configuration, check data against model and build everything in memory; nothing is written.

    Raises UserError for missing or foreign token files, too few tokens, or a vocabulary larger than the model's.
    """
    world = this_world()
    if not config.data.path:
        raise UserError("data.path is empty; name the directory that groundup tokenize wrote")
    data = TokenData.open(Path(config.data.path))
    config = replace(config, train=concrete(config.train, world.size)).resolve(data.vocab_size, world.size)
    train, device = config.train, torch.device(config.train.device)
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
        found = find_micro_batch(config, device, world.size)
        config = with_micro_batch(config, min(world.gather(found.size)), world.size)
        train = config.train
    torch.manual_seed(train.seed)
    # Initialised on the CPU: the same weights on every kind of device.
    model = TransformerLM(config.model)
    model.init_weights(train.seed)
    model.to(device)
    cast_weights(model, train.precision)
    optimizer = make_optimizer(model, config.optim, train.seed)
    scaler = LossScaler(train.precision == "fp16-mixed", device)
    return Job(config, world, device, data, sampler, model, prepared(model, train), optimizer, scaler, found)


def make_plan(job: Job, done: int) -> Plan:
    """What the job derived, with `done` steps behind it."""
    return Plan(
        config=job.config,
        world=job.world,
        parameters=count_parameters(job.model),
        device=describe(job.device),
        train_tokens=len(job.data.train),
        valid_tokens=len(job.data.valid),
        train_bytes_per_token=job.data.bytes_per_token("train"),
        windows_per_epoch=job.sampler.windows_per_epoch,
        first_step=done + 1,
        groups=describe_groups(job.optimizer),
        found=str(job.found) if job.found else "",
    )
