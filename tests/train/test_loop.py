"""The training step and the loop against independent computations, and the golden loss curve."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import VOCAB, read_metrics, synthetic_tokens, tiny_config, write_tokens

from groundup.config import RunConfig, load_toml
from groundup.data import TokenData, WindowSampler
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.optim import AdamW
from groundup.train import train
from groundup.train.device import choose_device, choose_precision
from groundup.train.job import Batch, build, prefetched
from groundup.train.loop import training_step

torch.set_num_threads(1)
GOLDEN = Path(__file__).with_name("golden_loss.json")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def golden_run(tokens: Path, out: Path) -> list[float]:
    train(tiny_config(tokens, steps=20, grad_accumulation=2, eval_every=0), out)
    return [row["loss"] for row in read_metrics(out)]


def test_golden_loss_curve(tokens: Path, tmp_path: Path):
    """To 1e-4 on any machine, bit for bit between two runs on this one. One thread: the order of sums is fixed.

    To write it anew after a change that is meant to change it: delete the file and run this test twice.
    """
    losses = golden_run(tokens, tmp_path / "a")
    assert losses == golden_run(tokens, tmp_path / "b")
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(losses, indent=0) + "\n")
        pytest.fail(f"{GOLDEN.name} was missing and has been written")
    np.testing.assert_allclose(losses, json.loads(GOLDEN.read_text()), rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_accumulation_equals_one_big_batch(dtype: torch.dtype, tolerance: float, tokens: Path):
    """4 micro-batches of 2 against 1 of 8, with most targets of one micro-batch masked: no mean of means."""
    results = []
    for fields in ({"micro_batch_size": 2, "grad_accumulation": 4}, {"micro_batch_size": 8}):
        job = build(tiny_config(tokens, optim={"grad_clip": 0.5}, **fields))
        job.model.to(dtype)
        batch = job.read(1)
        targets = batch.targets.clone()
        targets[2:4, :29] = -100
        batch = Batch(batch.inputs, targets, int((targets != -100).sum()))
        grads = {}
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p, grads=grads: grads.update({p: p.grad.clone()}))
            for p in job.model.parameters()
        ]
        loss, norm, _ = training_step(job, batch, lr=1e-3)
        results.append((loss, norm, [grads[p] for p in job.model.parameters()]))
        assert len(hooks) == len(grads)
        assert all(p.grad is None for p in job.model.parameters())
    (loss_a, norm_a, grads_a), (loss_b, norm_b, grads_b) = results
    torch.testing.assert_close(loss_a, loss_b, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm_a, norm_b, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grads_a, grads_b, rtol=tolerance, atol=tolerance)


def test_the_hosts_work_comes_between_backward_and_the_optimizer(tokens: Path):
    """A GPU is busy then, and the host would only wait for the step's flag."""
    job, seen = build(tiny_config(tokens)), []
    before = [p.detach().clone() for p in job.model.parameters()]

    def look() -> None:
        same = all(torch.equal(p, old) for p, old in zip(job.model.parameters(), before, strict=True))
        seen.append(same and all(p.grad is not None for p in job.model.parameters()))

    training_step(job, job.read(1), 1e-3, meanwhile=look)
    assert seen == [True]
    assert not any(torch.equal(p, old) for p, old in zip(job.model.parameters(), before, strict=True))


@pytest.mark.parametrize("clips_as_it_reads", [False, True])
def test_a_run_equals_a_plain_torch_loop(
    tokens: Path, tmp_path: Path, clips_as_it_reads: bool, monkeypatch: pytest.MonkeyPatch
):
    """Three steps against torch's own AdamW, clipping and cross entropy, over whole batches."""
    monkeypatch.setattr(AdamW, "heeds_flag", lambda _: clips_as_it_reads)
    config = tiny_config(tokens, steps=3, grad_accumulation=2, eval_every=0, optim={"grad_clip": 0.5})
    train(config, tmp_path / "run")
    data = TokenData.open(tokens)
    sampler = WindowSampler(len(data.train), 32, 8, seed=7)
    model = TransformerLM(config.model)
    model.init_weights(7)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, row in enumerate(read_metrics(tmp_path / "run"), 1):
        inputs, targets = map(torch.from_numpy, sampler.batch(data.train, step - 1))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * step / 5
        optimizer.step()
        assert row["step"] == step
        assert row["loss"] == pytest.approx(loss.item(), rel=2e-6)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert row["lr"] == pytest.approx(3e-3 * step / 5)
        assert row["tokens"] == step * 8 * 32


def test_the_last_step_has_the_smallest_learning_rate(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens, eval_every=0), tmp_path / "run")
    rates = [row["lr"] for row in read_metrics(tmp_path / "run")]
    assert max(rates) == rates[4] == 3e-3
    assert rates[-1] == pytest.approx(3e-4)


def test_rows_hold_exactly_the_promised_fields(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens), tmp_path / "run")
    rows = read_metrics(tmp_path / "run", timeless=False)
    fields = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "memory_gib", "eta_seconds"}
    assert all(row.keys() == fields for row in rows if "loss" in row)
    evaluations = [row for row in rows if "loss" not in row]
    assert [row["step"] for row in evaluations] == [6, 12]
    assert all(row.keys() == {"step", "valid_loss", "valid_bits_per_byte"} for row in evaluations)


def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_written(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, model={"vocab_size": 200})
    with pytest.raises(UserError, match=r"has 257 tokens, but model\.vocab_size is 200"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_id_without_a_row_is_refused(tmp_path: Path):
    """A token file that lies about its vocabulary."""
    directory = write_tokens(tmp_path / "tokens")
    ids = synthetic_tokens(4000, 1)
    ids[:-1] = 300
    np.save(directory / "train.npy", ids)
    with pytest.raises(UserError, match="300"):
        train(tiny_config(directory), tmp_path / "run")
    assert read_metrics(tmp_path / "run") == []


def test_too_few_tokens_and_no_directory(tmp_path: Path):
    directory = write_tokens(tmp_path / "tokens", n_train=20)
    with pytest.raises(UserError, match="20 tokens are fewer than one window of 33"):
        train(tiny_config(directory), tmp_path / "run")
    with pytest.raises(UserError, match="groundup tokenize"):
        train(tiny_config(tmp_path / "missing"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_out_that_is_a_file(tokens: Path, tmp_path: Path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        train(tiny_config(tokens), tmp_path / "run")


def test_config_toml_reproduces_the_run(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens), tmp_path / "a")
    train(load_toml(tmp_path / "a" / "config.toml", RunConfig).resolve(VOCAB), tmp_path / "b")
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_text() == (tmp_path / "b" / "config.toml").read_text()


def test_random_order_and_another_seed_train_on_other_batches(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, steps=2, eval_every=0)
    variants = {
        "a": config,
        "b": replace(config, data=replace(config.data, order="random")),
        "c": replace(config, train=replace(config.train, seed=8)),
    }
    for name, variant in variants.items():
        train(variant, tmp_path / name)
    losses = {read_metrics(tmp_path / name)[0]["loss"] for name in variants}
    assert len(losses) == 3


def test_batches_are_read_once_each_and_in_order():
    read = []
    steps = [step for step, _ in prefetched(lambda step: read.append(step), 3, 7)]
    assert steps == read == [3, 4, 5, 6, 7]
    assert list(prefetched(lambda step: read.append(step), 8, 7)) == []


def test_an_error_while_reading_ahead_reaches_the_loop():
    def read(step: int) -> int:
        if step == 3:
            raise UserError("bad batch")
        return step

    seen = []
    with pytest.raises(UserError, match="bad batch"):
        seen.extend(step for step, _ in prefetched(read, 1, 5))


def test_precision_and_device_are_named():
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("bf16-mixed", torch.device("cpu")) == "bf16-mixed"
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(UserError, match="no CUDA device"):
            choose_device("cuda")


def test_bf16_mixed_keeps_float32_weights_and_moments(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens, precision="bf16-mixed"), tmp_path / "bf16")
    train(tiny_config(tokens), tmp_path / "fp32")
    checkpoint = tmp_path / "bf16" / "checkpoints" / "step-00000012"
    for file in ("model", "optimizer"):
        kinds = {t.dtype for t in load_file(checkpoint / f"{file}.safetensors").values()}
        assert kinds <= {torch.float32, torch.int64}
    a, b = ([row["loss"] for row in read_metrics(tmp_path / run) if "loss" in row] for run in ("bf16", "fp32"))
    assert a != b
    np.testing.assert_allclose(a, b, rtol=0.02)
