"""groundup: language models from the ground up.

The rooms, from the ground to the roof (imports only point downwards):

    config/     frozen dataclasses of every room; TOML in and out
    tokenizer/  text ↔ ids (Rust core, Python face, plain Python reference)
    data/       documents → token files → batches
    model/      the Transformer, plain
    optim/      AdamW, Muon, schedules, clipping
    parallel/   many processes: data parallelism, ZeRO-1, FSDP
    generate/   sampling and the KV-cache engine
    train/      the loop, evaluation, run directory, checkpoints
    report/     plots from run logs
    cli/        one small file a command

Names are loaded on first use, so that a command which only tokenizes never imports torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Tokenizer": "groundup.tokenizer",
    "ModelConfig": "groundup.config",
    "RunConfig": "groundup.config",
    "TransformerLM": "groundup.model",
    "UserError": "groundup.errors",
}

__all__ = ["ModelConfig", "RunConfig", "Tokenizer", "TransformerLM", "UserError", "__version__"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groundup' has no attribute {name!r}")
