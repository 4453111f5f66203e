"""Early stopping and the best checkpoint, against a plain loop over the losses, and across kills."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

from groundup.errors import UserError
from groundup.train import Evaluation, evaluate_run, load_run, train
from groundup.train.checkpoint import best_step, checkpoint_steps, mark_best
from groundup.train.guards import BestLoss

torch.set_num_threads(1)
# One evaluation a step from 1 on; the best of 12 is at step 7.
LOSSES = [5.0, 4.0, 3.5, 3.6, 3.4, 3.45, 3.3, 3.31, 3.32, 3.33, 3.34, 3.35]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation loss after k steps is LOSSES[k - 1]: k is read off the optimizer."""

    def evaluate(model, data, **rest):
        step = len([row for row in read_rows() if "loss" in row])
        return Evaluation(LOSSES[step - 1], math.exp(LOSSES[step - 1]), 2.0, 1, 1)

    monkeypatch.setattr("groundup.train.loop.evaluate", evaluate)


RUN: list[Path] = []


def read_rows() -> list[dict]:
    return read_metrics(RUN[-1])


def go(tokens: Path, out: Path, resume: bool = False, watcher: Recorder | None = None, **fields):
    RUN.append(out)
    config = tiny_config(tokens, **{"eval_every": 1, "keep_last": 1, **fields})
    return train(config, out, resume=resume, progress=watcher or Recorder())


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=30), st.floats(0, 0.5), st.integers(0, 30))
def test_the_best_loss_equals_a_plain_loop(losses: list[float], min_delta: float, cut: int):
    best, at, waited = math.inf, 0, 0
    for step, loss in enumerate(losses, 1):
        if loss < best - min_delta:
            best, at, waited = loss, step, 0
        else:
            waited += 1
    rows = [{"step": step, "valid_loss": loss} for step, loss in enumerate(losses, 1)]
    # The state as a checkpoint in the middle has it, then the rows: those before it count once.
    first, second = BestLoss(min_delta), BestLoss(min_delta)
    first.replay(rows[:cut])
    second.load_state_dict(first.state_dict())
    second.replay([{"step": 1, "loss": 9.0}, *rows])
    assert (second.loss, second.step, second.waited) == (best, at, waited)


@pytest.mark.usefixtures("scripted")
def test_the_run_ends_and_the_best_is_kept(tokens: Path, tmp_path: Path):
    watcher = Recorder()
    result = go(tokens, tmp_path / "run", watcher=watcher, early_stopping=3, save_every=4)
    assert (result.step, result.stopped_early, result.interrupted) == (10, True, False)
    assert (result.best_loss, result.best_step, result.valid_loss) == (3.3, 7, 3.33)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert best_step(checkpoints) == 7
    assert checkpoint_steps(checkpoints) == [7, 10]
    assert os.readlink(checkpoints / "best") == "step-00000007"
    assert sum("stopped early at step 10: 3 evaluations were no better than 3.3000" in n for n in watcher.notes) == 1
    assert load_run(tmp_path / "run", step="best", device="cpu")[3] == 7
    assert load_run(tmp_path / "run", device="cpu")[3] == 10
    assert evaluate_run(tmp_path / "run", step="best", device="cpu")[1] == 7


@pytest.mark.usefixtures("scripted")
def test_a_best_that_the_disk_had_no_room_for_is_not_called_kept(tokens: Path, tmp_path: Path, monkeypatch):
    free = {"now": 10**12}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free["now"]))
    watcher = Recorder({7: lambda: free.update(now=1000), 8: lambda: free.update(now=10**12)})
    result = go(tokens, tmp_path / "run", watcher=watcher, early_stopping=3, save_every=4)
    assert (result.best_step, best_step(tmp_path / "run" / "checkpoints")) == (7, 5)
    (note,) = [note for note in watcher.notes if "stopped early" in note]
    assert note.endswith("3.3000 at step 7, which could not be saved: checkpoints/best is an earlier one")


@pytest.mark.usefixtures("scripted")
def test_a_run_that_stopped_stays_stopped_until_more_patience_is_given(tokens: Path, tmp_path: Path):
    go(tokens, tmp_path / "run", early_stopping=2)
    before = read_metrics(tmp_path / "run")
    assert before[-1]["step"] == 9
    result = go(tokens, tmp_path / "run", resume=True, early_stopping=2)
    assert (result.step, result.stopped_early, result.best_step) == (9, True, 7)
    assert read_metrics(tmp_path / "run") == before
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("early_stopping = 2", "early_stopping = 4"))
    result = go(tokens, tmp_path / "run", resume=True, early_stopping=4)
    assert (result.step, result.best_step) == (11, 7)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("kill_at", range(4, 11))
def test_a_kill_anywhere_changes_nothing(kill_at: int, tokens: Path, tmp_path: Path):
    fields = {"early_stopping": 3, "save_every": 4}
    with pytest.raises(Crash):
        go(tokens, tmp_path / "run", watcher=Recorder({kill_at: crash}), **fields)
    result = go(tokens, tmp_path / "run", resume=True, **fields)
    assert (result.step, result.best_step, best_step(tmp_path / "run" / "checkpoints")) == (10, 7, 7)


@pytest.mark.usefixtures("scripted")
def test_a_kill_between_the_save_of_the_best_and_its_row_counts_no_evaluation_twice(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(directory: Path, step: int) -> None:
        if step == 7:
            raise Crash
        mark_best(directory, step)

    fields = {"early_stopping": 3, "save_every": 4}
    with monkeypatch.context() as patch:
        patch.setattr("groundup.train.loop.mark_best", killed)
        with pytest.raises(Crash):
            go(tokens, tmp_path / "run", **fields)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints")[-1] == 7
    result = go(tokens, tmp_path / "run", resume=True, **fields)
    assert (result.step, result.best_step, best_step(tmp_path / "run" / "checkpoints")) == (10, 7, 7)
    assert [row["step"] for row in read_rows() if "valid_loss" in row] == list(range(1, 11))


@pytest.mark.usefixtures("scripted")
def test_without_early_stopping_the_best_is_kept_when_asked(tokens: Path, tmp_path: Path):
    assert go(tokens, tmp_path / "a", keep_best=True).step == 12
    assert checkpoint_steps(tmp_path / "a" / "checkpoints") == [7, 12]
    go(tokens, tmp_path / "b", keep_every=5, save_every=5)
    assert checkpoint_steps(tmp_path / "b" / "checkpoints") == [5, 10, 12]
    with pytest.raises(UserError, match="keeps no best checkpoint"):
        load_run(tmp_path / "b", step="best")


@pytest.mark.usefixtures("scripted")
def test_min_delta(tokens: Path, tmp_path: Path):
    result = go(tokens, tmp_path / "run", early_stopping=3, min_delta=0.25)
    assert (result.step, result.best_step) == (6, 3)  # 3.4 is 0.1 below 3.5 only


def test_early_stopping_needs_evaluations(tokens: Path):
    with pytest.raises(UserError, match=r"need evaluations: set train\.eval_every"):
        tiny_config(tokens, early_stopping=3, eval_every=0)


def test_the_link_is_replaced_in_one_step(tmp_path: Path):
    mark_best(tmp_path, 3)
    mark_best(tmp_path, 12)
    assert best_step(tmp_path) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert best_step(tmp_path / "none") is None
