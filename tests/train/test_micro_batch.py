"""The micro-batch finder on a CPU with a stated bound; its GPU side needs one (test_precision_gpu.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import VOCAB, Recorder, read_metrics, tiny_config, write_tokens

from groundup.config import RunConfig, load_toml
from groundup.errors import UserError
from groundup.model import TransformerLM, count_parameters
from groundup.parallel.processes import World
from groundup.train import micro_batch, train
from groundup.train.job import build
from groundup.train.micro_batch import MicroBatch, find_micro_batch, predicted_bytes

CPU = torch.device("cpu")
GIB = 2**30


def config(tokens: Path, memory_gib: float, **settings) -> RunConfig:
    base = tiny_config(tokens)
    fields = {"micro_batch_size": 0, "grad_accumulation": 0, "global_batch_size": 24, "find_micro_batch": True}
    return replace(base, train=replace(base.train, **fields, memory_gib=memory_gib, **settings)).resolve(VOCAB)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


def test_prediction_grows_with_the_batch_and_falls_with_checkpointing(tokens: Path):
    base = config(tokens, 1)
    sizes = [predicted_bytes(base, size, CPU) for size in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)
    assert sizes[3] - sizes[2] == pytest.approx(2 * (sizes[2] - sizes[1]), rel=0.05)
    checkpointed = replace(base, model=replace(base.model, checkpoint_activations=1))
    assert predicted_bytes(checkpointed, 8, CPU) < sizes[3]
    pure = replace(base, train=replace(base.train, precision="bf16-pure"))
    rounded = replace(pure, optim=replace(pure.optim, master_weights=False))
    count = count_parameters(TransformerLM(base.model))
    assert predicted_bytes(pure, 1, CPU) - predicted_bytes(rounded, 1, CPU) == 8 * count


def test_on_a_gpu_the_prediction_follows_what_the_model_says_of_its_kernels(tokens: Path):
    """Reference attention holds the scores of every layer, a plain loss all logits; kernels hold neither."""
    base, size = config(tokens, 1), 8
    base = replace(base, model=replace(base.model, context_length=512, vocab_size=8192))
    gpu = torch.device("cuda")

    def predicted(device: torch.device = gpu, **how) -> int:
        return predicted_bytes(replace(base, model=replace(base.model, **how)), size, device)

    scores = 4 * size * base.model.n_layers * base.model.n_heads * 512**2
    logits = 4 * size * 512 * 8192
    kernels = predicted()
    assert predicted(attention="flash-triton", kernels="triton") == kernels
    assert predicted(attention="reference", kernels="triton") >= kernels + scores
    plain = predicted(attention="sdpa", kernels="reference")
    assert plain >= predicted(attention="sdpa", kernels="loss") + logits
    assert predicted(attention="reference", kernels="reference", checkpoint_activations=1) < plain + scores
    # A CPU has no kernels: there "auto" is the reference.
    assert predicted(CPU) == predicted(CPU, attention="reference", kernels="reference") >= scores + logits


@pytest.mark.parametrize("wanted", [1, 2, 3, 8, 12, 24])
def test_the_largest_divisor_below_the_bound_is_found(wanted: int, tokens: Path):
    need = predicted_bytes(config(tokens, 1), wanted, CPU)
    found = find_micro_batch(config(tokens, (need + 100) / GIB), CPU)
    assert (found.size, found.predicted, found.failed) == (wanted, need, ())
    if wanted > 1:
        below = find_micro_batch(config(tokens, (need - 100) / GIB), CPU)
        assert below.size == max(n for n in (1, 2, 3, 4, 6, 8, 12) if n < wanted)


def test_it_backs_off_when_the_step_runs_out_of_memory(tokens: Path, monkeypatch: pytest.MonkeyPatch):
    real = micro_batch._steps

    def steps(config: RunConfig, size: int, device: torch.device) -> None:
        if size > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(config, size, device)

    monkeypatch.setattr(micro_batch, "_steps", steps)
    found = find_micro_batch(config(tokens, 8), CPU)
    assert (found.size, found.failed) == (6, (24, 12, 8))
    assert "24, 12, 8 did not fit" in str(found)
    assert found.predicted == predicted_bytes(config(tokens, 8), 6, CPU)


def test_nothing_fits(tokens: Path):
    with pytest.raises(UserError, match="not even one sequence of 32 tokens fits"):
        find_micro_batch(config(tokens, 1e-6), CPU)


def test_another_error_is_not_taken_for_a_lack_of_memory(tokens: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(micro_batch, "_steps", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        find_micro_batch(config(tokens, 8), CPU)


def test_a_run_finds_its_micro_batch_says_so_and_learns_the_same(tokens: Path, tmp_path: Path):
    need = predicted_bytes(config(tokens, 1), 8, CPU)
    searched = config(tokens, (need + 100) / GIB)
    watcher = Recorder()
    train(searched, tmp_path / "found", progress=watcher)
    assert any("micro-batch 8 found: predicted" in line for line in watcher.plans[0].lines)
    saved = load_toml(tmp_path / "found" / "config.toml", RunConfig)
    assert (saved.train.micro_batch_size, saved.train.grad_accumulation) == (8, 3)
    given = tiny_config(tokens, micro_batch_size=8, global_batch_size=24)
    train(given, tmp_path / "given")
    assert read_metrics(tmp_path / "found") == read_metrics(tmp_path / "given")
    # A finished run is resumed with what was found, not searched again.
    train(searched, tmp_path / "found", resume=True, progress=watcher)
    assert not any("found:" in line for line in watcher.plans[1].lines)


def test_the_smallest_of_the_ranks_is_taken_and_told(tokens: Path, monkeypatch: pytest.MonkeyPatch):
    """Another rank, whose GPU is not empty, found less."""

    def gathered(_: World, value: Any) -> list[Any]:
        other = replace(value, size=2, predicted=123 * GIB) if isinstance(value, MicroBatch) else value
        return [value, other]

    monkeypatch.setattr(World, "gather", gathered)
    job = build(config(tokens, 8))
    assert job.config.train.micro_batch_size == 2
    assert str(job.found).startswith("micro-batch 2 found: predicted 123.00 GiB")


def test_the_global_batch_must_be_given_and_divisible(tokens: Path):
    base = tiny_config(tokens)
    loop = replace(base.train, micro_batch_size=0, grad_accumulation=0, global_batch_size=0, find_micro_batch=True)
    with pytest.raises(UserError, match="set train"):
        replace(base, train=loop).resolve(VOCAB)
    with pytest.raises(UserError, match="world size 5"):
        replace(base, train=replace(loop, global_batch_size=24)).resolve(VOCAB, world_size=5)
