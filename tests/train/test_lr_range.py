"""The learning-rate range test: what it leaves behind, where it stops, what it says."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import read_metrics, tiny_config, write_tokens

from groundup.cli import main
from groundup.config import dump_toml
from groundup.errors import UserError
from groundup.report.lr_range import plot_lr_range
from groundup.train import lr_range as module
from groundup.train import train
from groundup.train.job import build
from groundup.train.loop import training_step
from groundup.train.lr_range import BETA, LrRange, lr_range, smooth


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_the_job_goes_on_as_if_nothing_had_been(optim: dict, precision: str, tokens: Path):
    tested, untouched = (build(tiny_config(tokens, optim=optim, precision=precision)) for _ in range(2))
    for job in (tested, untouched):
        training_step(job, job.read(1), 1e-3)
    random = torch.get_rng_state()
    rates = [group["lr"] for group in tested.optimizer.param_groups]
    found = lr_range(tested, 1e-4, 100.0, 30)
    assert len(found.rates) >= 10
    assert torch.equal(torch.get_rng_state(), random)
    assert [group["lr"] for group in tested.optimizer.param_groups] == rates
    assert tested.scaler.state_dict() == untouched.scaler.state_dict()
    for p, q in zip(tested.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is None
    a, b = (training_step(job, job.read(2), 1e-3)[0] for job in (tested, untouched))
    assert torch.equal(a, b)
    for p, q in zip(tested.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_error_in_the_middle_puts_the_job_back_too(tokens: Path):
    job = build(tiny_config(tokens))
    before = deepcopy(job.model.state_dict())

    def fail(step: int, lr: float, loss: float) -> None:
        if step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lr_range(job, 1e-3, 1.0, 20, fail)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert not job.optimizer.state


def fake_losses(monkeypatch: pytest.MonkeyPatch, curve) -> None:
    """Let every training step return curve(lr) instead of training."""
    monkeypatch.setattr(module, "training_step", lambda job, batch, lr: (torch.tensor(curve(lr)), None, None))


def test_the_sweep_is_exponential_and_stops_at_divergence(tokens: Path, monkeypatch: pytest.MonkeyPatch):
    # Falls around 1e-3, lowest at 1e-1, then rises without bound.
    fake_losses(monkeypatch, lambda lr: 5 - 2 / (1 + (1e-3 / lr)) + 3 * max(0.0, math.log10(lr / 1e-1)))
    found = lr_range(build(tiny_config(tokens)), 1e-6, 10.0, 141)
    np.testing.assert_allclose(np.diff(np.log10(found.rates)), 7 / 140, rtol=1e-9)
    assert found.rates[0] == 1e-6
    assert 0.03 < found.lowest < 0.11  # the mean sees the sharp rise some steps ahead
    assert found.suggestion == found.lowest / 10
    assert found.steepest == pytest.approx(1e-3, rel=0.3)  # where 1 / (1 + 1e-3 / lr) is steepest in log(lr)
    assert found.diverged == found.rates[-1]
    assert 0.1 < found.diverged < 1.0
    assert found.losses[-1] > 3


def test_a_loss_that_is_not_finite_stops_it(tokens: Path, monkeypatch: pytest.MonkeyPatch):
    fake_losses(monkeypatch, lambda lr: 5 - math.log10(lr) if lr < 0.9e-2 else math.nan)
    found = lr_range(build(tiny_config(tokens)), 1e-4, 1.0, 41)
    assert found.diverged == pytest.approx(1e-2)
    assert len(found.losses) == len(found.smoothed) == len(found.rates) - 1
    assert all(map(math.isfinite, found.losses))


def test_a_range_without_divergence_says_so_and_senseless_ones_are_refused(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
):
    job = build(tiny_config(tokens))
    fake_losses(monkeypatch, lambda lr: 5.0 - lr)
    assert lr_range(job, 1e-4, 1e-2, 20).diverged is None
    fake_losses(monkeypatch, lambda lr: math.nan)
    with pytest.raises(UserError, match="start lower"):
        lr_range(job, 1e-4, 1e-2, 20)
    with pytest.raises(UserError, match="positive and rise"):
        lr_range(job, 1e-2, 1e-4, 20)
    with pytest.raises(UserError, match="too few"):
        lr_range(job, 1e-4, 1e-2, 5)


def test_smoothing_has_no_lag_and_equals_two_weighted_means():
    step = [1.0] * 40 + [0.0] * 40
    smoothed = smooth(step)
    assert smoothed[39] + smoothed[40] == pytest.approx(1.0, abs=0.03)  # the edge stays in the middle
    values = np.random.default_rng(0).normal(size=25)

    def mean(v: np.ndarray) -> np.ndarray:
        weights = np.tril(BETA ** (np.arange(25)[:, None] - np.arange(25)[None]))
        return weights @ v / weights.sum(1)

    np.testing.assert_allclose(smooth(values.tolist()), mean(mean(values)[::-1])[::-1], rtol=1e-12)


def test_plot(tmp_path: Path):
    found = LrRange([1e-3, 1e-2, 1e-1, 1.0], [3.0, 2.0, 2.5], [3.0, 2.2, 2.5], 1e-3, 3e-3, 1e-2, 1.0)
    plot_lr_range(found, tmp_path / "a.png")
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(1).sum() > 50
    with pytest.raises(UserError, match=r"\.png"):
        plot_lr_range(found, tmp_path / "a.pdf")


def test_the_command_writes_picture_and_json_and_leaves_a_run_alone(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(tiny_config(tokens), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    words = ["--start", tmp_path / "run", "--sweep", 15, "--highest", 0.1, "--plot", tmp_path / "p.png", "--json"]
    assert main(["lr-range", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert len(found["rates"]) == len(found["losses"]) == 15
    fresh = read_metrics(tmp_path / "run")[0]["loss"]
    assert found["losses"][0] < fresh - 0.1  # the run's weights
    assert "starting from step 12" in err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_of_several_processes_is_a_start(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its batch is that of two processes; one takes the pieces of both."""
    train(tiny_config(tokens, steps=3, eval_every=0), tmp_path / "run")
    saved = tiny_config(tokens, steps=3, eval_every=0, micro_batch_size=2, global_batch_size=4)
    saved = replace(saved, train=replace(saved.train, grad_accumulation=1))
    (tmp_path / "run" / "config.toml").write_text(dump_toml(saved))
    words = ["--start", tmp_path / "run", "--sweep", 12, "--highest", 0.1, "--plot", tmp_path / "p.png", "--json"]
    assert main(["lr-range", *map(str, words)]) == 0, capsys.readouterr().err
    assert len(json.loads(capsys.readouterr().out)["rates"]) == 12


def test_several_processes_are_refused_in_a_line(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["lr-range", "--data", str(tokens)]) == 2
    assert "a range test is one process" in capsys.readouterr().err
