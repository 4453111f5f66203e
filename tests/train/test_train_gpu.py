"""The loop on a GPU: rows one step late but all there, pinned batches, resume."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

from groundup.train import load_run, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_rows_saves_and_resume_on_a_gpu(precision: str, tmp_path: Path):
    data = write_tokens(tmp_path / "tokens")
    config = tiny_config(data, device="cuda", precision=precision, grad_accumulation=2)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "broken", progress=Recorder({8: crash}))
    train(config, tmp_path / "broken", resume=True)
    whole, broken = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "broken")
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12]
    assert whole == broken
    train(tiny_config(data, grad_accumulation=2), tmp_path / "cpu")
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (whole, read_metrics(tmp_path / "cpu"))]
    np.testing.assert_allclose(*losses, rtol=1e-4 if precision == "fp32" else 0.02)


def test_a_run_from_a_gpu_loads_on_the_cpu_and_back(tmp_path: Path):
    data = write_tokens(tmp_path / "tokens")
    train(tiny_config(data, device="cuda"), tmp_path / "run")
    models = [load_run(tmp_path / "run", device=device)[0] for device in ("cpu", "cuda")]
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_recorded_steps_are_the_plain_ones_bit_for_bit(precision: str, compiled: bool, tmp_path: Path):
    """With accumulation, an evaluation in between, and a resume."""
    data = write_tokens(tmp_path / "tokens")
    fields = {"device": "cuda", "precision": precision, "grad_accumulation": 2, "deterministic": True}
    plain = tiny_config(data, **fields, compile=compiled, cuda_graph="off")
    recorded = tiny_config(data, **fields, compile=compiled, cuda_graph="on")
    train(plain, tmp_path / "plain")
    train(recorded, tmp_path / "recorded")
    with pytest.raises(Crash):
        train(recorded, tmp_path / "broken", progress=Recorder({8: crash}))
    train(recorded, tmp_path / "broken", resume=True)
    rows = [read_metrics(tmp_path / name) for name in ("plain", "recorded", "broken")]
    assert rows[0] == rows[1] == rows[2]
