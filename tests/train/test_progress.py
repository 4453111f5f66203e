"""What a person sees, with and without a terminal."""

import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_runs import Recorder, tiny_config, write_tokens

from groundup.train import ConsoleProgress, train


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100, highlight=False, soft_wrap=True), text


def test_plain_lines_without_a_terminal(tokens: Path, tmp_path: Path):
    output, text = console(terminal=False)
    train(
        tiny_config(tokens, steps=50, grad_accumulation=2, eval_every=25),
        tmp_path / "run",
        progress=ConsoleProgress(output),
    )
    lines = text.getvalue().splitlines()
    assert "\x1b" not in text.getvalue()
    steps = [line for line in lines if "bits/byte" in line]
    assert 20 <= len(steps) <= 27
    assert steps[0].startswith("step 1/50 · loss ")
    assert steps[-1].endswith("ETA 0:00:00")
    assert sum("validation loss" in line for line in lines) == 2
    plan = "\n".join(lines[:6])
    assert "8 sequences = micro-batch 4 × accumulation 2 × world size 1; 256 tokens a step" in plan
    assert "cpu, fp32" in plan
    assert "50; 12,800 tokens" in plan
    assert "4,000 training tokens (3,968 an epoch): 3.23 epochs; 700 validation tokens" in plan


def test_bits_per_byte_of_the_line(tokens: Path, tmp_path: Path):
    output, text = console(terminal=False)
    train(tiny_config(tokens, steps=1, eval_every=0), tmp_path / "run", progress=ConsoleProgress(output))
    line = next(line for line in text.getvalue().splitlines() if line.startswith("step 1/1"))
    loss, bits = float(line.split("loss ")[1].split()[0]), float(line.split(" bits/byte")[0].split()[-1])
    assert bits == pytest.approx(loss * 4000 / 3999 / math.log(2), abs=1e-3)


def test_the_eta_of_a_resumed_run_counts_the_steps_done_here(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    watcher, clock = Recorder(), SimpleNamespace(now=100.0)
    train(tiny_config(tokens, eval_every=0), tmp_path / "run", progress=watcher)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    output, text = console(terminal=False)
    progress = ConsoleProgress(output)
    progress.on_plan(replace(watcher.plans[0], first_step=7))
    clock.now += 30
    progress.on_step({"step": 9, "loss": 1.0, "tokens_per_second": 1.0})  # three steps in 30 s, three to go
    assert text.getvalue().rstrip().endswith("ETA 0:00:30")


def test_one_live_line_on_a_terminal(tokens: Path, tmp_path: Path):
    output, text = console(terminal=True)
    train(tiny_config(tokens), tmp_path / "run", progress=ConsoleProgress(output))
    assert "\x1b[?25l" in text.getvalue()
    assert text.getvalue().rstrip("\n").rfind("\x1b[?25h") > 0  # the cursor is back
    assert "step 12/12" in text.getvalue()
    assert "valid " in text.getvalue()


def test_steps_from_tokens_are_explained(tokens: Path, tmp_path: Path):
    output, text = console(terminal=False)
    train(tiny_config(tokens, steps=0, tokens=1000, eval_every=0), tmp_path / "run", progress=ConsoleProgress(output))
    assert "8 = 1,000 tokens / 128 a step, rounded up" in text.getvalue()
    assert "peak lr 0.003 after 5 steps, then a cosine to 0.0003" in text.getvalue()


def test_a_warm_up_longer_than_the_run_and_a_finished_run_are_said(tokens: Path, tmp_path: Path):
    config = tiny_config(tokens, steps=4, eval_every=0)
    for resume, expected in ((False, "lr rising to 0.0024 only"), (True, "all of them done")):
        output, text = console(terminal=False)
        train(config, tmp_path / "run", resume=resume, progress=ConsoleProgress(output))
        assert expected in text.getvalue()
