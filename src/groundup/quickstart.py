"""From nothing to a talking model: corpus → tokenizer → token files → training → picture → samples.

A program that calls the rooms in order; each stage's result is a file or directory that appears whole, so a stage
whose result exists is skipped and an interrupted quickstart goes on from there. `quickstart.json` records what the
stages were made from; another corpus or vocabulary needs another directory or a fresh start. The run's config.toml,
written once, holds the size that was chosen for the machine: going on never sizes again.

    OUT/quickstart.json   what it was asked for
    OUT/corpus.txt        the embedded corpus (absent with --corpus)
    OUT/tokenizer/        OUT/tokens/
    OUT/config.toml …     OUT is the run's directory as well
    OUT/loss.png
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from groundup.errors import UserError
from groundup.files import write_atomic

if TYPE_CHECKING:
    from groundup.config import RunConfig
    from groundup.data import TokenData
    from groundup.tokenizer import Tokenizer

MARK = "quickstart.json"
PARTS = (
    "checkpoints",
    "metrics.jsonl",
    "config.toml",
    "tokenizer.json",
    "loss.png",
    "tokens",
    "tokenizer",
    "corpus.txt",
)
"""What a fresh start removes, before the mark itself."""
VALID_FRACTION = 0.02
RESERVED_SECONDS = 10.0
"""Kept for what follows training: the picture and the samples."""
# No prompt ends in a space: the tokenizer glues a space to the word that follows.
CODE_PROMPTS = ["def read(", "class Stack", "import sys"]
SAMPLE = {"max_tokens": 120, "temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """From nothing to a talking model: tokenizer, token files, training, loss curve, samples.

    Without --corpus the text is the source of Python's standard library, so nothing is downloaded. Interrupted, it
    saves; the same command goes on from there.
    """

    corpus: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text file or folder to learn from in place of the standard library."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/quickstart")
    """Directory for everything that is made; also the run's directory."""
    vocab_size: int = 4096
    """Ids of the tokenizer: 256 bytes + merges + <|endoftext|>."""
    budget_seconds: float = 150.0
    """Time for all of it. A new run's model and steps are chosen to fit; a run that exists keeps its own."""
    threads: int = 0
    """Threads for tokenizer and training; 0: one a core."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8 in --corpus. strict: stop and name the byte; replace: put U+FFFD in its place."""
    fresh: FlagCreatePairsOff[bool] = False
    """Remove what an earlier quickstart left in --out and start anew."""


def quickstart(job: Quickstart) -> bool:
    """Do all stages that are not done; True when the end was reached, False when training was interrupted."""
    start = time.monotonic()
    if not 0 < job.budget_seconds < float("inf"):
        raise UserError(f"--budget-seconds is {job.budget_seconds:g}; it must be a positive number")
    with _claimed(job, _inputs(job)):
        source = job.corpus or _embedded_corpus(job.out)
        tokens = _tokens(job, _tokenizer(job, source), source)
    steps = _train(job, tokens, start)
    if not steps:
        print("\nsaved; the same command goes on from here")
        return False
    from groundup.report import plot_runs

    plot_runs([job.out], job.out / "loss.png")
    print(f"loss curve in {job.out / 'loss.png'}")
    prompts = CODE_PROMPTS if job.corpus is None else corpus_prompts(tokens)
    _samples(job.out, prompts)
    _next_commands(job.out, prompts[0], steps)
    return True


def _inputs(job: Quickstart) -> dict:
    """What must be the same for an earlier quickstart to be gone on with."""
    from groundup.tokenizer.training import merges_wanted

    merges_wanted(job.vocab_size, ["<|endoftext|>"])  # refuses a vocabulary that is too small
    if job.corpus is None:
        return {"vocab_size": job.vocab_size, "corpus": "the standard library's source"}
    from groundup.tokenizer.sources import find_sources

    (found,) = find_sources([job.corpus])
    where = str(job.corpus.resolve())
    return {"vocab_size": job.vocab_size, "corpus": where, "files": len(found.files), "bytes": found.bytes}


@contextmanager
def _claimed(job: Quickstart, inputs: dict) -> Generator[None]:
    """Make `out` this quickstart's directory, or check that it is; give it back if it was free and the text turns out
    to be of no use."""
    mark, new = job.out / MARK, not job.out.exists()
    if not new and not job.out.is_dir():
        raise UserError(f"--out {job.out} is a file; give a directory")
    if not mark.exists() and not new and any(job.out.iterdir()):
        raise UserError(f"--out {job.out} holds files of something else; give another directory")
    if mark.exists() and job.fresh:
        for name in (*PARTS, MARK):
            path = job.out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not mark.exists():
        write_atomic(mark, json.dumps(inputs, indent=1) + "\n")
    try:
        before = json.loads(mark.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{mark} is damaged; --fresh starts anew") from None
    for name in inputs | before:
        if before.get(name) != inputs.get(name):
            raise UserError(
                f"{job.out} was made with {name} {before.get(name)}, not {inputs.get(name)}; "
                "--fresh starts anew, or give another --out"
            )
    try:
        yield
    except UserError:
        if new:
            shutil.rmtree(job.out)
        raise


def _embedded_corpus(out: Path) -> Path:
    path = out / "corpus.txt"
    if not path.exists():
        from groundup.data import write_embedded_corpus

        corpus = write_embedded_corpus(path)
        print(
            f"corpus     {corpus.documents:,} files of Python's standard library, {corpus.bytes / 1e6:.1f} MB "
            f"({corpus.skipped} not UTF-8, left out)",
            flush=True,
        )
    return path


def _tokenizer(job: Quickstart, source: Path) -> "Tokenizer":
    from groundup.tokenizer import Tokenizer

    path = job.out / "tokenizer"
    if path.exists():
        return Tokenizer.load(path)
    start = time.monotonic()
    tokenizer = Tokenizer.train(
        [source],
        vocab_size=job.vocab_size,
        special_tokens=["<|endoftext|>"],
        threads=job.threads,
        errors=job.errors,
    )
    tokenizer.save(path)
    print(f"tokenizer  {tokenizer.vocab_size:,} ids, learnt in {time.monotonic() - start:.1f} s", flush=True)
    return tokenizer


def _tokens(job: Quickstart, tokenizer: "Tokenizer", source: Path) -> "TokenData":
    from groundup.data import TokenData, tokenize_corpus

    path = job.out / "tokens"
    if path.exists():
        return TokenData.open(path)
    start = time.monotonic()
    tokenize_corpus(
        [source],
        None,
        tokenizer,
        path,
        valid_fraction=VALID_FRACTION,
        threads=job.threads,
        errors=job.errors,
    )
    data = TokenData.open(path)
    print(
        f"tokens     {len(data.train):,} to train on, {len(data.valid):,} to validate on, "
        f"{data.bytes_per_token('train'):.2f} bytes a token, in {time.monotonic() - start:.1f} s",
        flush=True,
    )
    return data


def _train(job: Quickstart, data: "TokenData", start: float) -> int:
    """Begin the run or go on with it: its steps, 0 when it was interrupted."""
    import torch

    from groundup.train import ConsoleProgress, Progress, RunDirectory, bits_per_byte, train
    from groundup.train.checkpoint import checkpoint_steps

    if job.threads:
        torch.set_num_threads(job.threads)
    run = RunDirectory(job.out)
    begun = run.config.exists()
    config = run.load_config() if begun else _sized(job, data, start)
    done = begun and config.train.steps in checkpoint_steps(run.checkpoints)
    result = train(config, job.out, resume=begun, progress=Progress() if done else ConsoleProgress())
    if result.interrupted:
        return 0
    loss = result.valid_loss
    assert loss is not None, "the quickstart evaluates after its last step"
    bits = bits_per_byte(loss, data.bytes_per_token("valid"))
    already = "already finished; --fresh starts anew: " if done else ""
    print(f"\n{already}{result.step:,} steps, validation loss {loss:.4f}, {bits:.3f} bits per byte")
    return config.train.steps


def _sized(job: Quickstart, data: "TokenData", start: float) -> "RunConfig":
    """The configuration for this machine and the time that is left, at least a fifth of the budget."""
    from groundup.quickstart_size import choose
    from groundup.train.device import choose_device

    print("sizing     timing a few training steps …", flush=True)
    left = job.budget_seconds - RESERVED_SECONDS - (time.monotonic() - start)
    config = choose(len(data.train), data.vocab_size, max(left, job.budget_seconds / 5), choose_device("auto"))
    return replace(config, data=replace(config.data, path=str(job.out / "tokens")))


def corpus_prompts(data: "TokenData") -> list[str]:
    """Up to three words that documents of the validation tokens begin with; of one long document, from three places."""
    tokenizer, n = data.tokenizer(), len(data.valid)
    many = len(data.valid_docs) >= 3
    places = data.valid_docs[:: len(data.valid_docs) // 3][:3].tolist() if many else [0, n // 3, 2 * n // 3]
    prompts = []
    for place in places:
        ids = [i for i in data.valid[place : place + 32].tolist() if i != tokenizer.eot_id]
        words = tokenizer.decode(ids).split()
        # The first word of a place inside a document, and any last one, may be cut.
        words = words[0 if many else 1 : -1] or words
        prompts.append(" ".join(words[:3])[:40])
    return prompts


def _samples(out: Path, prompts: list[str]) -> None:
    from groundup.generate import generate_text
    from groundup.train import load_run

    model, tokenizer, _, _ = load_run(out)
    for seed, prompt in enumerate(prompts):
        print(f"\n── sample {seed + 1}, from {prompt!r} " + "─" * 40)
        print(prompt, end="", flush=True)
        for piece in generate_text(model, tokenizer, prompt, seed=seed, **SAMPLE):
            print(piece, end="", flush=True)
        print()


def _next_commands(out: Path, prompt: str, steps: int) -> None:
    """Three commands that work when typed, `uv run` included where this process was started by it."""
    groundup = "uv run groundup" if "UV_RUN_RECURSION_DEPTH" in os.environ else "groundup"
    path, longer = shlex.quote(str(out)), shlex.quote(f"{out}-longer")
    print("\nnext:")
    print(f"  {groundup} generate {path} --prompt {shlex.quote(prompt)} --temperature 0.7 --max-tokens 300")
    print(f"  {groundup} evaluate {path}")
    print(f"  {groundup} train --config {path}/config.toml --train.steps {4 * steps} --out {longer}")
