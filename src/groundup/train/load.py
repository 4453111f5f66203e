"""A finished or running run → its model, for evaluation and generation."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groundup.config import ModelConfig, RunConfig
from groundup.data import TokenData
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.parallel.state import load_weights
from groundup.tokenizer import Tokenizer
from groundup.train.checkpoint import (
    BEST,
    MODEL,
    Checkpoint,
    IncompleteError,
    best_step,
    check_tensors,
    checkpoint_path,
    checkpoint_steps,
    newest_complete,
    opened,
    read_checkpoint,
)
from groundup.train.device import (
    autocast,
    cast_weights,
    choose_device,
    choose_precision,
    matmul_precision_kept,
    set_matmul_precision,
)
from groundup.train.documents import DocumentEvaluation, evaluate_documents
from groundup.train.evaluate import Evaluation, check_validation, evaluate
from groundup.train.run_directory import RunDirectory


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_run(
    out: Path, step: int | str | None = None, device: str | None = None, note: Callable[[str], None] = _to_stderr
) -> tuple[TransformerLM, Tokenizer, RunConfig, int]:
    """(model in eval mode on the device, tokenizer, configuration, step) of a run's checkpoint.

    step None: the newest complete one; damaged newer ones are skipped with a line to `note`. "best": the one of the
    lowest validation loss, where the run keeps it. device None: a GPU where
    there is one. Needs the run's directory only. Raises UserError when there is no run or no such checkpoint.
    """
    run = RunDirectory(out)
    config = run.load_config()
    checkpoint = _find(run, step, note)
    tokenizer = run.load_tokenizer()
    model = unfilled(config.model)
    path = checkpoint.tensors(MODEL)
    with opened(path) as (saved, read):
        check_tensors({name: tensor.shape for name, tensor in model.state_dict().items()}, saved, path)
        load_weights(None, model, read)
    return model.to(choose_device(device or "auto")).eval(), tokenizer, config, checkpoint.step


def unfilled(config: ModelConfig) -> TransformerLM:
    """A model on the CPU whose weights are yet to be read: drawing first values takes seconds a billion."""
    with torch.device("meta"):
        model = TransformerLM(config)
    model.to_empty(device="cpu")
    if model.rope is not None:
        model.rope.reset(torch.device("cpu"))
    return model


@matmul_precision_kept()
def evaluate_run(
    out: Path,
    step: int | str | None = None,
    device: str | None = None,
    data: Path | None = None,
    batches: int = 0,
    note: Callable[[str], None] = _to_stderr,
) -> tuple[Evaluation, int]:
    """(evaluation, step) of a run's checkpoint on the validation tokens, all of them unless `batches` says fewer.

    data None: the token files it was trained on. The precision is the run's on the run's kind of device, else that of
    `auto`. Raises UserError as load_run does, and when the tokens were made by another tokenizer.
    """
    model, tokens, config, step, forward_context = _to_evaluate(out, step, device, data, note)
    batch_size = config.train.micro_batch_size
    found = evaluate(model, tokens, batch_size=batch_size, batches=batches, forward_context=forward_context)
    return found, step


@matmul_precision_kept()
def evaluate_run_documents(
    out: Path,
    step: int | str | None = None,
    device: str | None = None,
    data: Path | None = None,
    note: Callable[[str], None] = _to_stderr,
) -> tuple[DocumentEvaluation, int]:
    """(evaluation, step) like `evaluate_run`, each validation document for itself (documents.py)."""
    model, tokens, config, step, forward_context = _to_evaluate(out, step, device, data, note)
    batch_size = config.train.micro_batch_size
    return evaluate_documents(model, tokens, batch_size=batch_size, forward_context=forward_context), step


def _to_evaluate(
    out: Path, step: int | str | None, device: str | None, data: Path | None, note: Callable[[str], None]
) -> tuple[TransformerLM, TokenData, RunConfig, int, Callable[[], AbstractContextManager[Any]]]:
    """A run's model, the checked tokens, and the context of a forward pass; sets the policy for float32 products."""
    model, tokenizer, config, step = load_run(out, step, device, note)
    if data is None and not config.data.path:
        raise UserError(f"{out} was imported and knows no token files; give --data, tokenized with --tokenizer {out}")
    tokens = TokenData.open(data or Path(config.data.path))
    if tokens.tokenizer().fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"the tokens in {data or config.data.path} were made by another tokenizer than {out}'s; "
            f"tokenize the text again with --tokenizer {out}"
        )
    check_validation(tokens)
    where = next(model.parameters()).device
    precision = choose_precision(config.train.precision if where.type == config.train.device else "auto", where)
    set_matmul_precision(precision)
    cast_weights(model, precision)
    return model, tokens, config, step, partial(autocast, where, precision)


def _find(run: RunDirectory, step: int | str | None, note: Callable[[str], None]) -> Checkpoint:
    """The checkpoint asked for; only the model's file is read for its checksum."""
    steps = checkpoint_steps(run.checkpoints)
    if step is None:
        newest = newest_complete(run.checkpoints, note, contents=[MODEL])
        if newest is None:
            raise UserError(f"{run.path} has no complete checkpoint yet; train it first, or go on with --resume")
        return newest
    if step == BEST:
        step = best_step(run.checkpoints)
        if step is None:
            raise UserError(f"{run.path} keeps no best checkpoint; train with --train.keep-best, or give a step")
    if step not in steps:
        has = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{run.path} has no checkpoint of step {step}; it has: {has}")
    try:
        return read_checkpoint(checkpoint_path(run.checkpoints, step), contents=[MODEL])
    except IncompleteError as error:
        raise UserError(f"the checkpoint of step {step} in {run.path} is damaged: {error}; take another step") from None
