"""Guards: what is skipped, what it leaves untouched, and when a run gives up."""

import json
import math
import os
import shutil
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Crash, Recorder, crash, read_metrics, synthetic_tokens, tiny_config, write_tokens

from groundup.config import TrainConfig
from groundup.data import TokenData
from groundup.errors import UserError
from groundup.train import Evaluation, train
from groundup.train.checkpoint import OPTIMIZER, checkpoint_steps
from groundup.train.guards import Guards, apply_unless, foreign_tokens, least_bits_per_byte, to_skip
from groundup.train.job import build
from groundup.train.loop import training_step

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float, where: str = "loss") -> None:
    """From the model on: the loss (or one gradient) of these steps is multiplied by `value`."""
    real = training_step
    calls = []

    def poisoned(job, batch, *rest):
        calls.append(1)
        bad = len(calls) in steps
        if not bad:
            return real(job, batch, *rest)
        if where == "loss":
            forward = job.forward
            changed = replace(job, forward=lambda *args, **kwargs: forward(*args, **kwargs) * value)
            return real(changed, batch, *rest)
        weight = next(job.model.parameters())
        hook = weight.register_hook(lambda grad: grad * value)
        try:
            return real(job, batch, *rest)
        finally:
            hook.remove()

    monkeypatch.setattr("groundup.train.loop.training_step", poisoned)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value: float, where: str, tokens: Path, monkeypatch):
    job = build(tiny_config(tokens))
    training_step(job, job.read(1), 1e-3)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    moments = [{k: torch.as_tensor(v).clone() for k, v in state.items()} for state in job.optimizer.state.values()]
    batch = job.read(2)
    if where == "loss":
        forward = job.forward
        job = replace(job, forward=lambda *args, **kwargs: forward(*args, **kwargs) * value)
        loss, norm, skipped = training_step(job, batch, 1e-3)
        assert not math.isfinite(loss)
    else:
        hook = job.model.lm_head.weight.register_hook(lambda grad: torch.where(grad == grad.max(), value, grad))
        loss, norm, skipped = training_step(job, batch, 1e-3)
        hook.remove()
        assert math.isfinite(loss)
    assert not math.isfinite(norm)
    assert skipped.item() is True
    for name, tensor in job.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for state, old in zip(job.optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(torch.as_tensor(state[key]), old[key]) for key in old)
    assert all(p.grad is None for p in job.model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_an_optimizer_is_applied_or_left_alone(fused: bool, skip: bool):
    """Also by the flag on the device, which torch's fused AdamW takes; against the same optimizer called plainly."""

    def one(flag: bool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(5))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        for grad, is_skipped in ((torch.randn(5), False), (torch.randn(5), flag)):
            weight.grad = grad
            if is_skipped is not None:
                apply_unless(torch.tensor(is_skipped), optimizer)
        return [weight.detach(), *(torch.as_tensor(v) for v in optimizer.state[weight].values())]

    for found, expected in zip(one(skip), one(None if skip else False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(one(False)[0], one(True)[0])


def test_a_flag_of_another_rank_skips_here_too(tokens: Path):
    """The agreement adds the ranks' numbers up: simulated by a world whose other rank found a bad gradient."""
    job = build(tiny_config(tokens))
    before = job.model.lm_head.weight.clone()
    other = SimpleNamespace(sum=lambda values: values + torch.tensor([0.0, 1.0]))
    changed = replace(job, world=other)
    loss, norm, skipped = training_step(changed, job.read(1), 1e-3)
    assert skipped
    assert torch.isfinite(loss)
    assert torch.isfinite(norm)
    assert torch.equal(job.model.lm_head.weight, before)


def test_to_skip():
    sound = torch.tensor(0.0)
    for loss, unsound, limit, expected in [
        (1.0, 0, math.inf, False),
        (math.inf, 0, math.inf, True),
        (math.nan, 0, math.inf, True),
        (1.0, 1, math.inf, True),
        (2.0, 0, 1.5, True),
        (1.5, 0, 1.5, False),
    ]:
        assert to_skip(torch.tensor(loss), sound + unsound, limit).item() is expected


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_skipped_step_is_counted_and_the_run_goes_on(where: str, tokens: Path, tmp_path: Path, monkeypatch):
    poison(monkeypatch, {5}, math.nan, where)
    watcher = Recorder()
    train(tiny_config(tokens), tmp_path / "run", progress=watcher)
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows if row.get("skipped")] == [5]
    assert (rows[4]["loss"] is None, rows[4]["grad_norm"]) == (where == "loss", None)
    assert len(rows) == 12
    assert any("step 5 skipped" in note and "1 in a row, 1 in all" in note for note in watcher.notes)
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000012" / "state.json").read_text())
    assert (state["extra"]["guards"]["skipped"], state["extra"]["guards"]["in_a_row"]) == (1, 0)


def test_a_loss_scale_goes_on_where_it_was(tokens: Path, tmp_path: Path, monkeypatch):
    """fp16: the skipped step halves the scale, and the scale is in the checkpoint."""
    config = tiny_config(tokens, precision="fp16-mixed")
    for out, resume, watcher in (("whole", False, Recorder()), ("run", False, Recorder({8: crash}))):
        with monkeypatch.context() as patch:
            poison(patch, {2}, math.inf, "gradient")
            try:
                train(config, tmp_path / out, resume=resume, progress=watcher)
            except Crash:
                train(config, tmp_path / out, resume=True)
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    for out in ("whole", "run"):
        state = json.loads((tmp_path / out / "checkpoints" / "step-00000012" / "state.json").read_text())
        assert state["extra"]["scaler"] == {"scale": 2.0**15, "streak": 10}


def test_too_many_in_a_row_end_the_run(tokens: Path, tmp_path: Path, monkeypatch):
    poison(monkeypatch, {4, 6, 7, 8}, math.inf)
    with pytest.raises(UserError, match="step 8: 3 steps in a row were skipped"):
        train(tiny_config(tokens, max_skipped_steps=2), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [3, 6]


def losses_with_a_spike(guards: Guards, losses: list[float]) -> list[int]:
    flagged = []
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "loss": loss, "grad_norm": 1.0}
        guards.observe(row)
        if row.get("spike"):
            flagged.append(step)
    return flagged


def test_the_limit_is_median_plus_mads_of_a_lagged_window():
    guards = Guards(TrainConfig(spike_window=16, spike_threshold=5.0))
    losses = (2 + 0.1 * np.random.default_rng(0).standard_normal(60)).tolist()
    for step, loss in enumerate(losses, 1):
        known = losses[max(0, step - 2 - 16) : max(0, step - 2)]
        if len(known) >= 8:
            middle = statistics.median(known)
            expected = middle + 5 * 1.4826 * statistics.median(abs(x - middle) for x in known)
        else:
            expected = math.inf
        assert guards.limit(step) == pytest.approx(expected)
        guards.observe({"step": step, "loss": loss, "grad_norm": 1.0})
        assert guards.limit(step + 1) == guards.limit(step + 1)


def test_spikes_are_flagged_and_a_new_level_becomes_usual():
    guards = Guards(TrainConfig(spike_window=16, spike_threshold=8.0))
    rng = np.random.default_rng(1)
    calm = (3 + 0.05 * rng.standard_normal(40)).tolist()
    assert losses_with_a_spike(guards, [*calm, 5.0, *calm[:10]]) == [41]
    guards = Guards(TrainConfig(spike_window=16, spike_threshold=8.0))
    flagged = losses_with_a_spike(guards, [*calm, *(x + 3 for x in calm)])
    assert flagged[0] == 41
    assert 8 <= len(flagged) <= 12
    assert losses_with_a_spike(Guards(TrainConfig(spike_threshold=0.0)), [*calm, 9.0]) == []
    falling = [10 * math.exp(-i / 20) + 2 + 0.05 * rng.standard_normal() for i in range(300)]
    assert losses_with_a_spike(Guards(TrainConfig()), falling) == []


SPIKE = {"steps": 16, "spike_window": 8, "spike_threshold": 8.0, "eval_every": 0, "optim": {"warmup_steps": 30}}


def test_a_spike_is_flagged_or_skipped(tokens: Path, tmp_path: Path, monkeypatch):
    for name, skip in (("flag", False), ("skip", True)):
        with monkeypatch.context() as patch:
            poison(patch, {13}, 3.0)
            watcher = Recorder()
            train(tiny_config(tokens, skip_spikes=skip, **SPIKE), tmp_path / name, progress=watcher)
        rows = read_metrics(tmp_path / name)
        assert [row["step"] for row in rows if row.get("spike")] == [13]
        assert [row["step"] for row in rows if row.get("skipped")] == ([13] if skip else [])
        assert sum("spike" in note for note in watcher.notes) == 1
    a, b = (read_metrics(tmp_path / name) for name in ("flag", "skip"))
    assert a[:12] == b[:12]
    assert a[13]["loss"] != b[13]["loss"]


def test_a_resumed_run_knows_what_is_usual(tokens: Path, tmp_path: Path, monkeypatch):
    """The window is in the checkpoint: without metrics.jsonl too, the spike after the resume is skipped."""
    config = tiny_config(tokens, skip_spikes=True, **SPIKE)
    with monkeypatch.context() as patch:
        poison(patch, {13}, 3.0)
        train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=Recorder({12: crash}))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with monkeypatch.context() as patch:
        poison(patch, {13 - 9}, 3.0)
        train(config, tmp_path / "run", resume=True)
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")[9:]


def test_a_count_that_is_taken_back_later_is_right_in_a_checkpoint(tokens: Path, tmp_path: Path, monkeypatch):
    """As on a GPU: the update heeds the flag and the host, which counted the step, learns of it afterwards."""
    config = tiny_config(tokens, keep_last=0)
    for name, heeds in (("asks", False), ("heeds", True)):
        with monkeypatch.context() as patch:
            patch.setattr("groundup.optim.AdamW.heeds_flag", lambda self, heeds=heeds: heeds)
            poison(patch, {3}, math.nan)
            with pytest.raises(Crash):
                train(config, tmp_path / name, progress=Recorder({5: crash}))
        train(config, tmp_path / name, resume=True)
    assert read_metrics(tmp_path / "asks") == read_metrics(tmp_path / "heeds")
    for step in (3, 12):
        states = [
            load_file(tmp_path / name / "checkpoints" / f"step-{step:08d}" / OPTIMIZER) for name in ("asks", "heeds")
        ]
        assert states[0]["step.ln_final.weight"] == step - 1
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_in_an_evaluation_or_a_sample_leaves_the_run_alive(
    error: Exception, tokens: Path, tmp_path: Path, monkeypatch
):
    def fail(*args, **kwargs):
        assert 6 in checkpoint_steps(tmp_path / name / "checkpoints")
        raise error

    config = tiny_config(tokens, sample_prompt="abc", keep_last=0)
    for name, what in (("evaluate", "evaluation"), ("generate_text", "sampling")):
        watcher = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(f"groundup.train.loop.{name}", fail)
            result = train(config, tmp_path / name, progress=watcher)
        assert result.step == 12
        assert [note for note in watcher.notes if "out of memory" in note] == [
            f"step {step}: out of memory in the {what}, which is left out; the run goes on" for step in (6, 12)
        ]
        evaluated = [row["step"] for row in read_metrics(tmp_path / name) if "valid_loss" in row]
        assert evaluated == ([] if name == "evaluate" else [6, 12])


def test_a_sample_is_a_function_of_the_step_and_changes_nothing(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens), tmp_path / "plain")
    train(tiny_config(tokens, sample_prompt="abc"), tmp_path / "a")
    with pytest.raises(Crash):
        train(tiny_config(tokens, sample_prompt="abc"), tmp_path / "b", progress=Recorder({8: crash}))
    train(tiny_config(tokens, sample_prompt="abc"), tmp_path / "b", resume=True)
    a, b, plain = (read_metrics(tmp_path / name) for name in ("a", "b", "plain"))
    assert a == b
    samples = [row.pop("sample") for row in a if "valid_loss" in row]
    assert all(sample.startswith("abc") and len(sample) > 3 for sample in samples)
    assert a == plain


def test_a_save_without_room_is_put_off_and_made_up_for(tokens: Path, tmp_path: Path, monkeypatch):
    free = {"now": 10**12}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free["now"]))

    def full() -> None:
        free["now"] = 1000

    def freed() -> None:
        free["now"] = 10**12

    watcher = Recorder({2: full, 8: freed})
    train(tiny_config(tokens, keep_last=0), tmp_path / "run", progress=watcher)
    lines = [note for note in watcher.notes if "cannot be saved" in note]
    assert [line.split(":")[0] for line in lines] == ["step 3 cannot be saved", "step 6 cannot be saved"]
    assert "0.00 GB are free" in lines[0]
    assert "tried again after every step" in lines[0]
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [8, 9, 12]

    watcher = Recorder({2: full})
    with pytest.raises(UserError, match=r"step 12 cannot be saved: .* free space"):
        train(tiny_config(tokens), tmp_path / "full", progress=watcher)
    assert len(read_metrics(tmp_path / "full")) == 13


def test_a_signal_without_room_says_so(tokens: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="step 2 cannot be saved"):
        train(
            tiny_config(tokens), tmp_path / "run", progress=Recorder({2: lambda: os.kill(os.getpid(), signal.SIGTERM)})
        )


def test_a_loss_below_what_the_text_gives_is_flagged(tokens: Path, tmp_path: Path, monkeypatch):
    least = least_bits_per_byte(TokenData.open(tokens))
    assert 0.2 < least < 1  # the text has 2 bits a byte; xz finds few of its rules in so few bytes
    for bits, suspicious in ((least * 0.99, True), (least * 1.01, False)):
        found = Evaluation(loss=1.0, perplexity=math.e, bits_per_byte=bits, tokens=1, bytes=1)
        watcher = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr("groundup.train.loop.evaluate", lambda *args, found=found, **kwargs: found)
            train(tiny_config(tokens), tmp_path / str(suspicious), progress=watcher)
        rows = [row for row in read_metrics(tmp_path / str(suspicious)) if "valid_loss" in row]
        assert [row.get("suspicious", False) for row in rows] == [suspicious] * 2
        assert any("encoded by another tokenizer" in note for note in watcher.notes) is suspicious


def test_validation_tokens_of_another_tokenizer_are_noticed(tokens: Path, tmp_path: Path):
    """The ids of a vocabulary of pairs in a file whose tokenizer knows bytes: half the bytes that meta.json counts."""
    assert foreign_tokens(TokenData.open(tokens)) is None
    data = Path(shutil.copytree(tokens, tmp_path / "tokens"))
    meta = json.loads((data / "meta.json").read_text())
    meta["splits"]["valid"]["bytes"] *= 2
    (data / "meta.json").write_text(json.dumps(meta))
    watcher = Recorder()
    train(tiny_config(data), tmp_path / "run", progress=watcher)
    assert sum("stand for 699 bytes of text, but meta.json counts 1,398" in note for note in watcher.notes) == 1


def test_changed_edges_of_a_token_file_are_noticed(tmp_path: Path):
    """meta.json still tells the old digest."""
    data = write_tokens(tmp_path / "tokens")
    with pytest.raises(Crash):
        train(tiny_config(data), tmp_path / "run", progress=Recorder({8: crash}))
    ids = synthetic_tokens(4000, 1)
    ids[10] += 1
    np.save(data / "train.npy", ids)
    with pytest.raises(UserError, match=r"have changed since .* --allow-changed-data"):
        train(tiny_config(data), tmp_path / "run", resume=True)
    watcher = Recorder()
    train(tiny_config(data), tmp_path / "run", resume=True, progress=watcher, allow_changed_data=True)
    assert any("going on with these, as asked" in note for note in watcher.notes)
    assert len(read_metrics(tmp_path / "run")) == 14


def test_changed_data_of_another_tokenizer_is_refused_in_any_case(tmp_path: Path):
    data = write_tokens(tmp_path / "tokens")
    config = tiny_config(data, model={"vocab_size": 300})
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=Recorder({8: crash}))
    shutil.rmtree(data)
    write_tokens(data, specials=("<|endoftext|>", "<|pad|>"))
    with pytest.raises(UserError, match="does not match the tokens"):
        train(config, tmp_path / "run", resume=True, allow_changed_data=True)
