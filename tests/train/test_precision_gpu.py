"""Precision modes, Muon, compilation and the micro-batch finder on a GPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import VOCAB, Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

from groundup.config import size
from groundup.train import train
from groundup.train.micro_batch import find_micro_batch

pytestmark = pytest.mark.gpu
MODES = [
    ("tf32", {}),
    ("bf16-mixed", {}),
    ("fp16-mixed", {}),
    ("bf16-pure", {}),
    ("bf16-pure", {"master_weights": False}),
    ("bf16-mixed", {"name": "muon"}),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


@pytest.mark.parametrize(("precision", "optim"), MODES)
def test_each_mode_follows_fp32_and_resumes_bit_for_bit(precision: str, optim: dict, tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, device="cuda", precision=precision, optim=optim)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "cut", progress=Recorder({8: crash}))
    train(config, tmp_path / "cut", resume=True)
    whole, cut = ([r["loss"] for r in read_metrics(tmp_path / n) if "loss" in r] for n in ("whole", "cut"))
    assert whole == cut
    train(tiny_config(tokens, optim=optim), tmp_path / "cpu")
    np.testing.assert_allclose(whole, [r["loss"] for r in read_metrics(tmp_path / "cpu") if "loss" in r], rtol=0.02)


@pytest.mark.parametrize("unit", ["model", "blocks"])
def test_a_compiled_run_compiles_at_most_twice(unit: str, tokens: Path, tmp_path: Path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"device": "cuda", "precision": "bf16-mixed", "eval_batches": 0, "grad_accumulation": 2}
    train(tiny_config(tokens, compile=True, compile_unit=unit, **settings), tmp_path / "run")
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_the_micro_batch_that_is_found_takes_about_what_was_predicted(tokens: Path):
    base = tiny_config(tokens, device="cuda", precision="bf16-mixed")
    fields = {"micro_batch_size": 0, "grad_accumulation": 0, "global_batch_size": 256, "find_micro_batch": True}
    loop = replace(base.train, **fields, memory_gib=8.0)
    config = replace(base, model=replace(size("gpt2-124m"), context_length=256), train=loop).resolve(VOCAB)
    found = find_micro_batch(config, torch.device("cuda"))
    assert 1 < found.size < 256
    assert found.measured <= found.limit
    assert found.measured == pytest.approx(found.predicted, rel=0.15)
    assert not found.failed
