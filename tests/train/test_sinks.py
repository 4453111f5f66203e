"""Copies of the rows: missing packages are named, a broken sink costs a line, the real ones have what was written."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

from groundup.errors import UserError
from groundup.train import train
from groundup.train.metrics import flops_per_token, listed_tflops, peak_flops
from groundup.train.sinks import KINDS

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_before_the_first_step(
    name: str, module: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"asks for {name}, which is not installed: pip install {name}"):
        train(tiny_config(tokens, sinks=(name,)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_row_reaches_a_sink_and_a_broken_one_is_dropped(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, closed = [], []

    class Good:
        def __init__(self, config, run, step):
            assert step == 0

        def write(self, row):
            rows.append(dict(row))

        def close(self):
            closed.append("good")

    class Broken(Good):
        def write(self, row):
            if row["step"] == 5:
                raise ConnectionError("no network\nat all")

        def close(self):
            closed.append("broken")

    monkeypatch.setattr("groundup.train.loop.check_packages", lambda names: None)
    monkeypatch.setitem(KINDS, "tensorboard", Good)
    monkeypatch.setitem(KINDS, "wandb", Broken)
    watcher = Recorder()
    train(tiny_config(tokens, sinks=("tensorboard", "wandb")), tmp_path / "run", progress=watcher)
    assert rows == read_metrics(tmp_path / "run", timeless=False)
    assert closed == ["broken", "good"]
    assert [n for n in watcher.notes if "wandb" in n] == [
        "wandb gets no more rows: no network; metrics.jsonl has them all"
    ]


def test_tensorboard_has_the_rows_of_a_resumed_run(tokens: Path, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(tokens, sinks=("tensorboard",), sample_prompt="abc")
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=Recorder({8: crash}))
    train(config, tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read_metrics(tmp_path / "run")
    for name in ("loss", "lr", "valid_loss"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert "sample/text_summary" in events.Tags()["tensors"]


def test_wandb_works_offline(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "name-of-this-machine")
    train(tiny_config(tokens, sinks=("wandb",)), tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    record = file.read_bytes()  # W&B has no reader of its own for it
    for field in (b"valid_bits_per_byte", b"grad_norm", b"tokens_per_second", b"optim.lr"):
        assert field in record
    for row in read_metrics(tmp_path / "run"):
        assert str(row.get("loss", row.get("valid_loss"))).encode() in record
    assert b"name-of-this-machine" not in record


def test_peaks_of_listed_gpus_by_the_drivers_name():
    for name, precision, tflops in [
        ("NVIDIA H200", "bf16-mixed", 989),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756),
        ("NVIDIA H100 NVL", "bf16-mixed", 835),
        ("NVIDIA GH200 480GB", "bf16-mixed", 0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed", 312),
        ("NVIDIA A100 80GB PCIe", "bf16-mixed", 312),
        ("NVIDIA L40S", "bf16-mixed", 362),
        ("NVIDIA L4", "bf16-mixed", 121),
        ("NVIDIA A10", "bf16-mixed", 125),
        ("NVIDIA A100X of another kind", "bf16-mixed", 0),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", 0),
        ("NVIDIA B200", "bf16-mixed", 2250),
        ("AMD Instinct MI300X", "bf16-mixed", 0),
    ]:
        assert listed_tflops(name, precision) == tflops, name


def test_mfu_is_speed_times_flops_over_the_peak_given(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, peak_tflops=0.05)
    train(config, tmp_path / "run")
    row = read_metrics(tmp_path / "run", timeless=False)[0]
    # 6 FLOP a weight that multiplies every token, and attention as a causal kernel runs it: 2 products forward and 5
    # backward, each of d · T / 2 multiply-adds a token and layer.
    d, n_kv, d_ff, layers, context, vocab = 32, 16, 64, 2, 32, 257
    weights = layers * (2 * d * d + 2 * d * n_kv + 3 * d * d_ff) + d * vocab
    flops = 6 * weights + layers * 7 * 2 * d * context / 2
    assert flops_per_token(config) == pytest.approx(flops)
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 0.05e12)
    assert peak_flops(tiny_config(tokens), torch.device("cpu")) == 0
    assert SimpleNamespace(**row).memory_gib > 0.1
