"""What a scheduler sees of `groundup train`: 75 when it was told to stop and has saved, 0 when a requeued run ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import tiny_config, write_tokens

from groundup.config import dump_toml
from groundup.train.checkpoint import checkpoint_steps

# `groundup`, which goes no further than step 20 until there is a file: a slow machine must find it at work.
COMMAND = """
import os, sys, time
from groundup.cli import main
from groundup.train import ConsoleProgress
real, go_on = ConsoleProgress.on_step, sys.argv.pop(1)
def on_step(self, row):
    real(self, row)
    while row["step"] >= 20 and not os.path.exists(go_on):
        time.sleep(0.01)
ConsoleProgress.on_step = on_step
sys.exit(main())
"""


def at_work(tmp_path: Path) -> tuple[list[str], dict[str, str], subprocess.Popen]:
    """A run that has written rows and waits for the file `signalled`: its command line, environment and process."""
    tokens = write_tokens(tmp_path / "tokens")
    config = tmp_path / "config.toml"
    config.write_text(dump_toml(tiny_config(tokens, steps=400, eval_every=0, save_every=0, keep_every=10)))
    out = tmp_path / "run"
    # The same line each time, as a job script has it: --resume without a run begins one.
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "signalled"), "train"]
    words += ["--config", str(config), "--out", str(out), "--resume"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert child.poll() is None, child.communicate()[0]
        time.sleep(0.01)
    return words, env, child


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_asks_to_be_queued_again(number: signal.Signals, tmp_path: Path):
    words, env, child = at_work(tmp_path)
    out, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    child.send_signal(number)
    (tmp_path / "signalled").touch()
    text, _ = child.communicate()
    assert child.returncode == 75, text
    assert "is saved; go on with" in text
    (step,) = checkpoint_steps(out / "checkpoints")
    assert len(metrics.read_text().splitlines()) == step < 400
    text = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    assert f"going on from {out / 'checkpoints'}" in text
    assert "400 steps done" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_ends_the_command_at_once(number: signal.Signals, tmp_path: Path):
    _, _, child = at_work(tmp_path)
    while (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") < 20:
        time.sleep(0.01)
    while child.poll() is None:  # there it waits for ever, and does not get to save: only a second signal ends it
        child.send_signal(number)
        time.sleep(0.05)
    text, _ = child.communicate()
    assert child.returncode == 128 + number, text
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []
