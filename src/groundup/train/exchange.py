"""Runs to and from directories in Hugging Face's format; model/hf.py knows the format, this file the run's side.

    DIR/config.json            the shape, and which ids begin and end a text
    DIR/generation_config.json the same ids; those that no token has, so that they are not drawn
    DIR/model.safetensors      the weights, float32; its metadata says that groundup wrote it, and the step
    DIR/tokenizer.json         the run's own, byte for byte
    DIR/tokenizer_config.json  the names of the special tokens

An imported run is a run with one checkpoint and no history: evaluate, generate, chat and export use it like any other;
it cannot be resumed, because the format holds no optimizer state. Its config.toml has the shape from config.json and
defaults for the rest. `data` names the token files that evaluate reads when it is not told others; without it
evaluate asks for --data.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from groundup import __version__
from groundup.config import DataConfig, RunConfig, TrainConfig
from groundup.data import TokenData
from groundup.errors import UserError
from groundup.files import check_replaceable, directory_written_aside
from groundup.model.hf import CONFIG, WEIGHTS, read_hf, read_json, to_hf, to_hf_config
from groundup.parallel.state import whole_weights
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.tokenizer import END_OF_TEXT
from groundup.train.checkpoint import save_checkpoint
from groundup.train.load import load_run, unfilled
from groundup.train.resume import IMPORTED
from groundup.train.run_directory import RunDirectory, flat_fields

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
EXPORTED = frozenset({CONFIG, GENERATION, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG})


def export_run(out: Path, directory: Path, step: int | str | None = None) -> int:
    """Write a checkpoint of the run `out` in Hugging Face's format; returns its step. step None: the newest complete.

    `directory` appears whole; an earlier export there is replaced. Raises UserError when it holds anything else, or
    the model has an option that the format lacks: before anything is written.
    """
    directory = directory.resolve()
    _refuse_foreign_export(directory)
    to_hf_config(RunDirectory(out).load_config().model)  # refuse before reading gigabytes
    model, tokenizer, config, step = load_run(out, step, device="cpu")
    eot = tokenizer.eot_id
    ends = {"bos_token_id": eot, "eos_token_id": eot}
    padding = list(range(tokenizer.vocab_size, config.model.vocab_size))
    tables: dict[str, dict[str, Any]] = {
        CONFIG: {**to_hf_config(model.config), **ends, "torch_dtype": "float32"},
        GENERATION: {**ends, **({"suppress_tokens": padding} if padding else {})},
        TOKENIZER_CONFIG: _tokenizer_config(eot, config.model.context_length),
    }
    tensors = to_hf(whole_weights(None, model), model.config)
    with directory_written_aside(directory) as aside:
        for name, table in tables.items():
            (aside / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(RunDirectory(out).tokenizer, aside / TOKENIZER)
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt", "groundup": __version__, "step": str(step)})
        shutil.copymode(aside / CONFIG, aside / WEIGHTS)  # safetensors makes it private whatever the umask
    return step


def _tokenizer_config(eot: int | None, context_length: int) -> dict[str, Any]:
    """`<|endoftext|>` ends every document and so stands before every one: it is both beginning and end."""
    token = None if eot is None else END_OF_TEXT
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token,
        "eos_token": token,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }


def _refuse_foreign_export(directory: Path) -> None:
    """Raise UserError unless `directory` is free, empty, or an export of ours and nothing else."""
    check_replaceable(directory, EXPORTED, "export")
    if directory.exists() and any(directory.iterdir()) and not _is_ours(directory / WEIGHTS):
        # A downloaded model has files of the same names.
        raise UserError(f"--out {directory} holds a model that groundup did not export; give another directory")


def _is_ours(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt") as file:
            return "groundup" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def import_run(directory: Path, out: Path, data: Path | None, note: Callable[[str], None]) -> RunConfig:
    """Make the run `out` from a directory in Hugging Face's format; returns its configuration.

    Weights become float32 (exact from half precision). The step is the one that an export of ours recorded, else 0.
    `note` gets a line for what the tokenizer there does and ours does not. Raises UserError when `out` is not free,
    the model or its tokenizer is none that groundup has, or `data` was written by another tokenizer.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"--out {out} is not free; an imported run needs a directory of its own: give a new path")
    shape, tensors, metadata = read_hf(directory)
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"{directory / TOKENIZER} has {tokenizer.vocab_size:,} ids and the model only {shape.vocab_size:,}; "
            "they do not belong together"
        )
    if data is not None:
        TokenData.open(data).check_tokenizer(tokenizer, str(directory / TOKENIZER))
    _note_differences(directory, tokenizer, note)
    step = int(metadata["step"]) if "groundup" in metadata and metadata.get("step", "").isdecimal() else 0
    path = "" if data is None else str(data)
    config = RunConfig(model=shape, train=TrainConfig(steps=max(step, 1)), data=DataConfig(path=path)).resolve()
    model = unfilled(config.model)
    model.load_state_dict(tensors)
    trained = {name: value for name, value in flat_fields(config).items() if name != "data.path"}
    facts = {IMPORTED: True, "config": trained, "versions": {"groundup": __version__}}
    with directory_written_aside(out) as aside:
        run = RunDirectory(aside)
        run.begin(config, directory / TOKENIZER)
        save_checkpoint(run.checkpoints, step, whole_weights(None, model), {}, facts)
    return config


def _note_differences(directory: Path, tokenizer: Tokenizer, note: Callable[[str], None]) -> None:
    """Say what Hugging Face's side would do with a text and groundup will not."""
    added = read_json(directory / TOKENIZER).get("post_processor")
    if added and added.get("type") != "ByteLevel":
        note(
            f"{directory / TOKENIZER} adds tokens around a text ({added.get('type')}); groundup encodes the text "
            "alone: write them into the prompt"
        )
    end = read_json(directory / CONFIG).get("eos_token_id")
    if end != tokenizer.eot_id:
        has = f"id {tokenizer.eot_id}" if tokenizer.eot_id is not None else "not in its tokenizer"
        note(f"the model ends a text with id {end}, groundup with {END_OF_TEXT} ({has}): generation stops there only")
