"""Precision modes against float64, loss scaling, and compiled runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

from groundup.errors import UserError
from groundup.parallel.processes import World
from groundup.train import evaluate_run, evaluate_run_documents, train
from groundup.train.device import (
    LossScaler,
    autocast,
    cast_weights,
    choose_precision,
    compiled_unit,
    is_recorded,
    prepared,
    set_matmul_precision,
)
from groundup.train.job import build
from groundup.train.loop import training_step
from groundup.train.progress import make_plan

ROUNDING = {"fp32": 2**-23, "bf16-mixed": 2**-8, "fp16-mixed": 2**-11, "bf16-pure": 2**-8}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if "loss" in row]


@pytest.mark.parametrize("precision", ROUNDING)
def test_loss_and_gradients_are_those_of_float64_within_the_modes_rounding(precision: str, tokens: Path):
    job = build(tiny_config(tokens, precision=precision))
    batch = job.read(1)
    with job.autocast():
        loss = job.forward(batch.inputs, batch.targets, n_valid=batch.n_valid)
    job.scaler.scaled(loss).backward()
    job.scaler.unscale(job.model.parameters())
    exact = build(tiny_config(tokens)).model.double()
    if precision == "bf16-pure":
        exact.load_state_dict(job.model.state_dict())  # the weights themselves are rounded
    expected = exact(batch.inputs, batch.targets, n_valid=batch.n_valid)
    expected.backward()
    rounding = ROUNDING[precision]
    assert loss.item() == pytest.approx(expected.item(), rel=rounding)
    kind = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    errors = []
    for (name, p), q in zip(job.model.named_parameters(), exact.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == kind, name
        errors.append(((p.grad.double() - q.grad).norm() / q.grad.norm()).item())
    assert max(errors) < 16 * rounding
    if precision != "fp32":
        assert max(errors) > rounding / 16  # the mode does round


def test_a_step_is_recorded_on_one_gpu_alone(tokens: Path):
    config = tiny_config(tokens, cuda_graph="on")
    with pytest.raises(UserError, match=r'train.cuda_graph "on" .* this run is on the CPU; use "auto"'):
        build(config)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(UserError, match="this run is on 2 processes"):
        is_recorded(config.train, gpu, 2)
    assert is_recorded(config.train, gpu, 1)
    for compiled in (False, True):
        auto = replace(config.train, cuda_graph="auto", compile=compiled)
        assert [is_recorded(auto, *where) for where in ((gpu, 1), (gpu, 2), (cpu, 1))] == [compiled, False, False]
        assert not is_recorded(replace(auto, cuda_graph="off"), gpu, 1)


def test_each_mode_computes_in_its_own_type():
    x = torch.ones(2, 2)
    for precision, kind in {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.items():
        with autocast(torch.device("cpu"), precision):
            assert (x @ x).dtype == kind
    for precision, policy in {"fp32": "highest", "tf32": "high", "bf16-mixed": "high", "fp16-mixed": "high"}.items():
        set_matmul_precision(precision)
        assert torch.get_float32_matmul_precision() == policy
    set_matmul_precision("fp32")
    with pytest.raises(UserError, match="tf32"):
        choose_precision("tf32", torch.device("cpu"))


def test_a_call_leaves_the_policy_for_float32_products_as_it_was(tokens: Path, tmp_path: Path):
    before, seen = torch.get_float32_matmul_precision(), []
    assert before == "highest"
    watcher = Recorder({1: lambda: seen.append(torch.get_float32_matmul_precision())})
    train(tiny_config(tokens, precision="bf16-mixed", steps=1), tmp_path / "run", progress=watcher)
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before
    evaluate_run(tmp_path / "run", device="cpu")
    evaluate_run_documents(tmp_path / "run", device="cpu")
    assert torch.get_float32_matmul_precision() == before


def test_bf16_pure_keeps_the_angles_of_rope_in_float32(tokens: Path):
    model = build(tiny_config(tokens)).model
    cast_weights(model, "bf16-pure")
    assert model.rope.cos.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("master_weights", [True, False])
def test_bf16_pure_learns_and_resumes_bit_for_bit(master_weights: bool, tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, precision="bf16-pure", optim={"master_weights": master_weights})
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "cut", progress=Recorder({8: crash}))
    train(config, tmp_path / "cut", resume=True)
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    final = tmp_path / "whole" / "checkpoints" / "step-00000012"
    assert {t.dtype for t in load_file(final / "model.safetensors").values()} == {torch.bfloat16}
    kinds = {t.dtype for t in load_file(final / "optimizer.safetensors").values()} - {torch.int64}
    assert kinds == {torch.float32 if master_weights else torch.bfloat16}
    train(tiny_config(tokens), tmp_path / "fp32")
    np.testing.assert_allclose(losses(tmp_path / "whole"), losses(tmp_path / "fp32"), rtol=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_every_optimizer_resumes_bit_for_bit(optimizer: str, precision: str, tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, precision=precision, optim={"name": optimizer, "schedule": "wsd"})
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "cut", progress=Recorder({8: crash}))
    train(config, tmp_path / "cut", resume=True)
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    for file in ("model", "optimizer"):
        a, b = (load_file(tmp_path / r / f"checkpoints/step-00000012/{file}.safetensors") for r in ("whole", "cut"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_plan_names_the_groups(tokens: Path, tmp_path: Path):
    watcher = Recorder()
    train(tiny_config(tokens, steps=1, optim={"name": "muon"}), tmp_path / "run", progress=watcher)
    text = "\n".join(watcher.plans[0].lines)
    assert "Muon, hidden matrices: 14 tensors" in text
    assert "AdamW, not decayed: 5 tensors, 160 parameters, lr 0.003, decay 0" in text


def test_an_overflow_skips_the_step_halves_the_scale_and_training_goes_on(tokens: Path):
    job = build(tiny_config(tokens, precision="fp16-mixed"))
    job.scaler.scale.fill_(2.0**24)  # beyond what float16's gradients hold here
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    skipped = 0
    for step in range(1, 40):
        _, norm, skip = training_step(job, job.read(step), 1e-3)
        if not skip:
            break
        skipped += 1
        assert not torch.isfinite(norm)
        assert all(torch.equal(p, before[name]) for name, p in job.model.named_parameters())
        assert not job.optimizer.state
    assert 2 < skipped < 20
    assert job.scaler.state_dict() == {"scale": 2.0 ** (24 - skipped), "streak": 1}
    assert torch.isfinite(norm)
    assert not torch.equal(job.model.token_embeddings.weight, before["token_embeddings.weight"])


def test_loss_scale_grows_backs_off_and_is_remembered():
    scaler = LossScaler(True, scale=8.0, growth_interval=3)
    yes, no = torch.tensor(True), torch.tensor(False)
    scales = []
    for sound in (yes, yes, yes, yes, no, yes, yes, no, yes, yes):
        scaler.update(sound)
        scales.append(scaler.scale.item())
    assert scales == [8, 8, 16, 16, 8, 8, 8, 4, 4, 4]
    again = LossScaler(True, growth_interval=3)
    again.load_state_dict(scaler.state_dict())
    for each in (scaler, again):
        each.update(yes)
    assert again.state_dict() == scaler.state_dict() == {"scale": 8.0, "streak": 0}
    assert again.scaled(torch.tensor(3.0)) == 24
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([8.0, 4.0])
    again.unscale([p])
    assert p.grad.tolist() == [1.0, 0.5]


def test_no_scaler_does_nothing():
    scaler, loss = LossScaler(False), torch.tensor(3.0)
    assert scaler.scaled(loss) is loss
    before = scaler.state_dict()
    scaler.update(torch.tensor(False))
    assert scaler.state_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["model", "blocks"])
@pytest.mark.parametrize("checkpoint", [0, 1])
def test_a_compiled_run_compiles_at_most_twice_and_saves_plain_names(
    unit: str, checkpoint: int, tokens: Path, tmp_path: Path
):
    """Dynamo's counter of graphs over a run with accumulation, evaluations of another batch size, and a resume."""
    counters = torch._dynamo.utils.counters
    model = {"n_layers": 3, "checkpoint_activations": checkpoint}
    settings = {"model": model, "grad_accumulation": 2, "eval_batches": 0}
    config = tiny_config(tokens, **settings, compile=True, compile_unit=unit)
    for run in range(2):
        torch._dynamo.reset()
        counters.clear()
        if run == 0:
            with pytest.raises(Crash):
                train(config, tmp_path / "run", progress=Recorder({8: crash}))
        else:
            train(config, tmp_path / "run", resume=True)
        assert 1 <= counters["stats"]["unique_graphs"] <= 2
        assert not counters["graph_break"]
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000012" / "model.safetensors")
    plain = build(tiny_config(tokens, **settings)).model
    plain.load_state_dict(saved, strict=True)
    assert not any("_orig_mod" in name or "module." in name for name in saved)
    train(tiny_config(tokens, **settings), tmp_path / "eager")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "eager"), rtol=1e-4)


def test_what_is_compiled_at_once_is_what_the_plan_says(tokens: Path):
    job = build(tiny_config(tokens))
    asked = replace(job.config, train=replace(job.config.train, compile=True, compile_unit="model"))
    for size, unit in ((1, "model"), (2, "blocks")):
        (line,) = (s for s in make_plan(replace(job, config=asked, world=World(0, size)), 0).lines if "compiled" in s)
        assert line.endswith(f"compiled ({unit})")
        assert compiled_unit(asked.train, size) == unit


def test_nothing_is_compiled_unasked(tokens: Path):
    job = build(tiny_config(tokens))
    assert compiled_unit(job.config.train, 1) == ""
    assert prepared(job.model, "") is job.model
