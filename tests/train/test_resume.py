"""A resumed run is the unbroken run, bit for bit."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from random import Random

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tiny_runs import Crash, Recorder, crash, read_metrics, resume_slowly, tiny_config, write_tokens

from groundup.config import RunConfig, load_toml
from groundup.errors import UserError
from groundup.train import Evaluation, RunDirectory, changed_fields, evaluate_run, load_run, train
from groundup.train.checkpoint import MODEL, OPTIMIZER, checkpoint_steps, newest_complete
from groundup.train.job import build
from groundup.train.resume import start

torch.set_num_threads(1)

CASES = {
    "plain": {},
    "accumulation": {"grad_accumulation": 3},
    # 1,153 tokens are 36 windows of 32: nine steps of 4, so the save at step 9 is the epoch's end.
    "epoch end": {"n_train": 1153, "kill_at": 9},
    "inside an epoch, two passes": {"n_train": 800},
    "no evaluation": {"eval_every": 0},
}
FIFTY = {
    # A save at step 50, the death at step 52, then 50 steps again.
    "plain": {},
    "accumulation": {"grad_accumulation": 4},
    # 6,401 tokens are 200 windows of 32, 50 steps of 4: the save is an epoch's end.
    "epoch end": {"n_train": 6401},
    "compiled": {"compile": True, "deterministic": True},
}


def same_run(a: Path, b: Path) -> None:
    """Rows and the tensors of every checkpoint that both have are equal."""
    assert read_metrics(a) == read_metrics(b)
    steps = checkpoint_steps(a / "checkpoints")
    assert steps == checkpoint_steps(b / "checkpoints")
    for step in steps:
        for name in (MODEL, OPTIMIZER):
            left, right = (load_file(run / "checkpoints" / f"step-{step:08d}" / name) for run in (a, b))
            assert left.keys() == right.keys()
            for key in left:
                assert torch.equal(left[key], right[key]), (step, key)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def crashed(tokens: Path, tmp_path: Path) -> Path:
    """A run that died after step 8; its newest checkpoint is step 6."""
    with pytest.raises(Crash):
        train(tiny_config(tokens), tmp_path / "run", progress=Recorder({8: crash}))
    return tmp_path / "run"


@pytest.mark.parametrize("case", CASES)
def test_resume_after_a_crash_is_bit_exact(case: str, tmp_path: Path):
    fields = dict(CASES[case])
    data = write_tokens(tmp_path / "tokens", n_train=fields.pop("n_train", 4000))
    kill_at = fields.pop("kill_at", 8)
    config = tiny_config(data, **fields)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "broken", progress=Recorder({kill_at: crash}))
    result = train(config, tmp_path / "broken", resume=True)
    assert (result.step, result.interrupted) == (12, False)
    same_run(tmp_path / "whole", tmp_path / "broken")
    assert [row["step"] for row in read_metrics(tmp_path / "whole") if "loss" in row] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("case", FIFTY)
def test_fifty_steps_after_a_resume_are_bit_equal(case: str, tmp_path: Path):
    fields = {"steps": 100, "save_every": 50, "eval_every": 20, **FIFTY[case]}
    data = write_tokens(tmp_path / "tokens", n_train=fields.pop("n_train", 4000))
    config = tiny_config(data, **fields)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "broken", progress=Recorder({52: crash}))
    torch.compiler.reset()  # a resume compiles anew, as a new process would
    watcher = Recorder()
    train(config, tmp_path / "broken", resume=True, progress=watcher)
    assert watcher.plans[0].first_step == 51
    same_run(tmp_path / "whole", tmp_path / "broken")


def test_deterministic_holds_during_a_run_and_not_after(tokens: Path, tmp_path: Path):
    def now() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    seen: list[tuple[bool, bool]] = []
    at = {1: lambda: seen.append(now())}
    train(tiny_config(tokens, steps=1), tmp_path / "plain", progress=Recorder(at))
    train(tiny_config(tokens, steps=1, deterministic=True), tmp_path / "strict", progress=Recorder(at))
    assert seen == [(False, True), (True, False)]
    assert now() == (False, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_field_newer_than_the_checkpoint_had_its_default(crashed: Path, tokens: Path):
    file = crashed / "checkpoints" / "step-00000006" / "state.json"
    state = json.loads(file.read_text())
    del state["config"]["train.skip_spikes"], state["extra"], state["data"]["edges"]
    file.write_text(json.dumps(state))
    train(tiny_config(tokens), crashed, resume=True)
    assert len(read_metrics(crashed)) == 14


FIRST_FIELDS = {
    "model": "vocab_size context_length d_model n_layers n_heads n_kv_heads d_ff rope_theta norm_eps tie_embeddings",
    "optim": "lr min_lr_ratio warmup_steps betas eps weight_decay grad_clip",
    "train": "steps tokens micro_batch_size grad_accumulation global_batch_size seed device precision compile "
    "eval_every eval_batches save_every keep_last",
    "data": "path order",
}
"""What the first runs had in their config.toml; every field that came later must mean what was done before it came."""


def test_a_run_from_before_the_newer_fields_is_read_and_resumed(crashed: Path, tokens: Path, tmp_path: Path):
    names = {f"{section}.{name}" for section, row in FIRST_FIELDS.items() for name in row.split()}
    old = {
        section: {name: value for name, value in table.items() if f"{section}.{name}" in names}
        for section, table in tomllib.loads((crashed / "config.toml").read_text()).items()
        if section in FIRST_FIELDS
    }
    (crashed / "config.toml").write_text(tomli_w.dumps(old))
    for file in (crashed / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        state["config"] = {name: value for name, value in state["config"].items() if name in names}
        file.write_text(json.dumps(state))
    assert RunDirectory(crashed).load_config() == tiny_config(tokens)
    assert load_run(crashed, device="cpu")[3] == 6
    assert evaluate_run(crashed, device="cpu")[0].tokens > 0
    train(tiny_config(tokens), crashed, resume=True)
    train(tiny_config(tokens), tmp_path / "whole")
    same_run(tmp_path / "whole", crashed)
    with pytest.raises(UserError, match=r"model\.norm is 'pre' in .* and 'post' was given"):
        train(tiny_config(tokens, model={"norm": "post"}), crashed, resume=True)


def test_random_numbers_go_on_where_they_were(tokens: Path, tmp_path: Path):
    """Nothing in a run draws from torch's generator today; a dropout layer would."""

    def drawn(out: Path, resume: bool, last: int) -> list[float]:
        draws: list[float] = []
        at = {step: lambda: draws.append(torch.rand(()).item()) for step in range(1, last)}
        watcher = Recorder({**at, last: crash})
        with pytest.raises(Crash):
            train(tiny_config(tokens, eval_every=0), out, resume=resume, progress=watcher)
        return draws

    whole = drawn(tmp_path / "whole", resume=False, last=11)
    assert drawn(tmp_path / "broken", resume=False, last=8) == whole[:7]
    assert drawn(tmp_path / "broken", resume=True, last=11) == whole[6:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_current_step_and_resumes(number: signal.Signals, tokens: Path, tmp_path: Path):
    before = signal.getsignal(number)
    train(tiny_config(tokens), tmp_path / "whole")
    watcher = Recorder({5: lambda: os.kill(os.getpid(), number)})
    result = train(tiny_config(tokens), tmp_path / "broken", progress=watcher)
    assert result.interrupted
    assert result.step == 5
    assert "--resume" in watcher.notes[-1]
    assert signal.getsignal(number) is before
    assert checkpoint_steps(tmp_path / "broken" / "checkpoints") == [3, 5]
    train(tiny_config(tokens), tmp_path / "broken", resume=True)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "broken")


def test_a_signal_during_an_evaluation_saves(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train(tiny_config(tokens, save_every=5), tmp_path / "whole")
    module = sys.modules["groundup.train.evaluate"]
    real = module.validation_windows

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "validation_windows", interrupted)
        result = train(tiny_config(tokens, save_every=5), tmp_path / "broken")
    assert (result.step, result.interrupted) == (6, True)
    assert checkpoint_steps(tmp_path / "broken" / "checkpoints") == [5, 6]
    train(tiny_config(tokens, save_every=5), tmp_path / "broken", resume=True)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "broken")


def test_a_failing_evaluation_comes_after_the_save(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def bad_disk(*args, **kwargs):
        raise OSError("no disk")

    train(tiny_config(tokens), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("groundup.train.loop.evaluate", bad_disk)
        with pytest.raises(OSError, match="no disk"):
            train(tiny_config(tokens), tmp_path / "broken")
    assert checkpoint_steps(tmp_path / "broken" / "checkpoints") == [3, 6]
    train(tiny_config(tokens), tmp_path / "broken", resume=True)
    same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_validation_loss_that_is_not_finite_stops_the_run_after_the_save(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nothing = Evaluation(loss=math.nan, perplexity=math.nan, bits_per_byte=math.nan, tokens=1, bytes=1)
    monkeypatch.setattr("groundup.train.loop.evaluate", lambda *args, **kwargs: nothing)
    with pytest.raises(UserError, match="step 6: the validation loss is nan"):
        train(tiny_config(tokens), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [3, 6]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_rows_reach_the_disk_before_their_checkpoint(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After a power failure no checkpoint may be newer than its rows, and none may have its name without its files."""
    flushed: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)
    train(tiny_config(tokens, steps=1, eval_every=0), tmp_path / "run")
    rows, *files, aside, directory = flushed[flushed.index("metrics.jsonl") :]
    assert rows == "metrics.jsonl"
    assert sorted(files) == [MODEL, OPTIMIZER, "state.json"]
    assert aside.startswith(".step-00000001.")
    assert directory == "checkpoints"


def test_metrics_are_cut_back_to_the_checkpoint(crashed: Path, tokens: Path):
    log = crashed / "metrics.jsonl"
    with open(log, "a") as file:
        file.write('{"step": 9, "loss": 1.')  # torn by a kill
    with pytest.raises(Crash):
        train(tiny_config(tokens), crashed, resume=True, progress=Recorder({7: crash}))
    assert [row["step"] for row in read_metrics(crashed)] == [1, 2, 3, 4, 5, 6, 6, 7]


def test_a_resumed_run_holds_the_rows_of_evaluations_alone(crashed: Path, tokens: Path):
    """The others of a long run are gigabytes, on every rank."""
    job = build(tiny_config(tokens))
    step, rows = start(job, RunDirectory(crashed), True, lambda line: None, {})
    assert step == 6
    assert rows == [row for row in read_metrics(crashed) if "valid_loss" in row]
    assert [row["step"] for row in rows] == [6]


def test_lost_metrics_are_said(crashed: Path, tokens: Path):
    (crashed / "metrics.jsonl").unlink()
    watcher = Recorder()
    train(tiny_config(tokens), crashed, resume=True, progress=watcher)
    assert any("ends at step 0" in note for note in watcher.notes)


def test_a_finished_run_has_nothing_left_to_do(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens), tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    result = train(tiny_config(tokens), tmp_path / "run", resume=True)
    assert (result.step, result.interrupted) == (12, False)
    assert result.valid_loss == read_metrics(tmp_path / "run")[-1]["valid_loss"]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_resume_without_a_checkpoint_starts_at_0_and_says_so(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "broken", progress=Recorder({2: crash}))
    for out in (tmp_path / "broken", tmp_path / "new"):
        watcher = Recorder()
        train(config, out, resume=True, progress=watcher)
        assert any("no complete checkpoint" in note for note in watcher.notes)
        same_run(tmp_path / "whole", out)


def test_a_run_is_not_overwritten(crashed: Path, tokens: Path):
    before = (crashed / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds a run; add --resume"):
        train(tiny_config(tokens), crashed)
    assert (crashed / "metrics.jsonl").read_bytes() == before


def test_a_run_that_another_process_made_meanwhile_is_not_overwritten(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, loop = tmp_path / "run", sys.modules["groundup.train.loop"]
    real = loop.build

    def build_slowly(config: RunConfig):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "build", real)
            train(tiny_config(tokens, steps=2), out)
        return real(config)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "build", build_slowly)
        with pytest.raises(UserError, match="holds a run; add --resume"):
            train(tiny_config(tokens), out)
    assert len(read_metrics(out)) == 3


def test_other_flags_are_refused_by_name(crashed: Path, tokens: Path):
    given = tiny_config(tokens, optim={"lr": 1e-2}, steps=20)
    with pytest.raises(UserError, match=r"optim\.lr is 0\.003 .* 0\.01 was given \(also: train\.steps\)"):
        train(given, crashed, resume=True)


def test_changed_fields_ignores_what_is_left_to_be_derived(tokens: Path):
    saved = tiny_config(tokens)
    assert changed_fields(saved, saved) == []
    left = replace(saved, train=replace(saved.train, steps=0, device="auto"), model=replace(saved.model, d_ff=0))
    assert changed_fields(saved, left) == []
    here = replace(saved, data=replace(saved.data, path=os.path.relpath(saved.data.path)))
    assert changed_fields(saved, here) == []
    off = replace(saved, optim=replace(saved.optim, grad_clip=0.0, betas=(0.9, 0.99)))
    assert changed_fields(saved, off) == [("optim.betas", [0.9, 0.95], [0.9, 0.99]), ("optim.grad_clip", 1.0, 0.0)]


def test_an_edited_configuration_is_refused_by_name(crashed: Path, tokens: Path):
    file = crashed / "config.toml"
    file.write_text(file.read_text().replace("warmup_steps = 5", "warmup_steps = 6"))
    with pytest.raises(UserError, match=r"optim\.warmup_steps = 6, but the checkpoint was trained with 5"):
        train(tiny_config(tokens, optim={"warmup_steps": 6}), crashed, resume=True)


def test_another_gpu_is_said(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = {"now": "A100"}
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name["now"])
    kept = sys.modules["groundup.train.resume"]
    monkeypatch.setattr(kept, "_versions", lambda _, real=kept._versions: real(torch.device("cuda")))
    with pytest.raises(Crash):
        train(tiny_config(tokens), tmp_path / "run", progress=Recorder({8: crash}))
    name["now"], watcher = "H200", Recorder()
    train(tiny_config(tokens), tmp_path / "run", resume=True, progress=watcher)
    assert "since the checkpoint: GPU A100 → H200; losses may differ in their last bits" in watcher.notes


def test_changed_data_is_refused(tmp_path: Path):
    data = write_tokens(tmp_path / "tokens")
    with pytest.raises(Crash):
        train(tiny_config(data), tmp_path / "run", progress=Recorder({8: crash}))
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(data)
    write_tokens(data, seed=5)
    with pytest.raises(UserError, match="have changed since"):
        train(tiny_config(data), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows


def test_steps_that_were_recorded_go_on_where_they_cannot_be(crashed: Path, tmp_path: Path, tokens: Path):
    file = crashed / "config.toml"
    file.write_text(file.read_text().replace('cuda_graph = "auto"', 'cuda_graph = "on"'))
    config = load_toml(file, RunConfig)
    assert config.train.cuda_graph == "on"
    with pytest.raises(UserError, match="this run is on the CPU"):
        train(config, crashed, resume=True)  # as the command line without the flag
    train(replace(config, train=replace(config.train, cuda_graph="auto")), crashed, resume=True)
    assert max(row["step"] for row in read_metrics(crashed)) == config.train.steps


def test_moved_data_is_found_through_config_toml(tmp_path: Path):
    data = write_tokens(tmp_path / "tokens")
    train(tiny_config(data), tmp_path / "whole")
    with pytest.raises(Crash):
        train(tiny_config(data), tmp_path / "run", progress=Recorder({8: crash}))
    moved = data.rename(tmp_path / "elsewhere")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace(str(data), str(moved)))
    train(tiny_config(moved), tmp_path / "run", resume=True)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_two_processes_do_not_train_in_one_directory(tokens: Path, tmp_path: Path):
    with RunDirectory(tmp_path / "run").locked(), pytest.raises(UserError, match="another process"):
        train(tiny_config(tokens), tmp_path / "run")


@pytest.fixture(scope="module")
def start_child() -> Callable[..., Process]:
    """Starts a process that resumes a run. Forked from a server that has torch loaded, so it costs milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_runs", "torch._dynamo"])

    def begin(config: RunConfig, out: Path, fsync_seconds: float, last: int = 0, full: float = 0.0) -> Process:
        child = context.Process(target=resume_slowly, args=(config, out, fsync_seconds, last, full))
        child.start()
        return child

    return begin


def kill(child: Process) -> None:
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def wait_until(child: Process, ready: Callable[[], bool]) -> None:
    """Poll until `ready()`; the child must not end before."""
    while not ready():
        assert child.is_alive()
        time.sleep(0.002)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_9_then_resume_is_bit_exact(tokens: Path, tmp_path: Path, start_child: Callable[..., Process]):
    config, out = tiny_config(tokens, steps=40), tmp_path / "broken"
    train(config, tmp_path / "whole")
    child = start_child(config, out, fsync_seconds=0.02, last=20)
    wait_until(child, lambda: lines(out / "metrics.jsonl") >= 9)
    kill(child)
    watcher = Recorder()
    train(config, out, resume=True, progress=watcher)
    assert watcher.plans[0].first_step > 1
    same_run(tmp_path / "whole", out)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("full", [0.0, 0.3])
def test_fifty_kills_at_random_moments(full: float, tokens: Path, tmp_path: Path, start_child: Callable[..., Process]):
    """Slow disks make most moments moments of a save. Every life starts from the newest complete checkpoint.
    `full`: the share of writes for which the disk has no room.
    """
    config, out = tiny_config(tokens, steps=500), tmp_path / "broken"
    train(config, tmp_path / "whole")
    random, during_saves, lives = Random(0), 0, 0
    for _ in range(50):
        newest = newest_complete(out / "checkpoints", print)
        child = start_child(config, out, fsync_seconds=0.03, full=full)
        wait_until(child, lambda before=lives: lines(out / "starts") > before)
        time.sleep(random.uniform(0, 1))
        kill(child)
        lives = lines(out / "starts")
        assert int((out / "starts").read_text().split()[-1]) == (newest.step if newest else 0) + 1
        during_saves += any((out / "checkpoints").glob(".step-*.tmp"))
    assert during_saves >= 15
    assert newest_complete(out / "checkpoints", print) is not None
    train(config, out, resume=True)
    same_run(tmp_path / "whole", out)
    assert not any((out / "checkpoints").glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_run_is_loaded_stops_it_before_its_first_step(
    number: signal.Signals, crashed: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = sys.modules["groundup.train.loop"]
    real = loop.start

    def start(*args):
        os.kill(os.getpid(), number)
        return real(*args)

    rows, watcher = (crashed / "metrics.jsonl").read_text().splitlines(), Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "start", start)
        result = train(tiny_config(tokens), crashed, resume=True, progress=watcher)
    assert (result.step, result.interrupted) == (6, True)
    assert (crashed / "metrics.jsonl").read_text().splitlines() == rows[: len(read_metrics(crashed))]
    assert watcher.notes[-1] == f"interrupted: step 6 is saved; go on with: groundup train --out {crashed} --resume"


def test_a_signal_before_the_first_step_of_a_new_run(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loop, watcher = sys.modules["groundup.train.loop"], Recorder()
    real = loop.build
    with monkeypatch.context() as patch:
        patch.setattr(loop, "build", lambda config: os.kill(os.getpid(), signal.SIGTERM) or real(config))
        result = train(tiny_config(tokens), tmp_path / "run", progress=watcher)
    assert (result.step, result.interrupted) == (0, True)
    assert watcher.notes[-1].startswith("interrupted before the first step; go on with: ")
    assert train(tiny_config(tokens), tmp_path / "run", resume=True).step == 12


def test_a_second_signal_ends_at_once():
    """The handler's second call does not return: a step that hangs cannot hold the process."""
    file = Path(sys.modules["groundup.train.interrupt"].__file__)
    code = (
        "import os, signal\n"
        "from interrupt import Interrupt\n"
        "with Interrupt() as interrupt:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert interrupt.requested\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=file.parent, capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (130, b"")


def test_state_json_says_what_it_holds(crashed: Path, tokens: Path):
    path = crashed / "checkpoints" / "step-00000006"
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["tokens"]) == (6, 6 * 4 * 32)
    assert set(state["files"]) == {MODEL, OPTIMIZER}
    assert state["files"][MODEL]["bytes"] == (path / MODEL).stat().st_size
    assert list(state["rng"]) == ["0"]
    assert state["config"]["model.d_model"] == 32
    # A checkpoint that is handed on tells nothing of the machine; a resume finds the data by config.toml.
    assert str(tokens) not in (path / "state.json").read_text()
