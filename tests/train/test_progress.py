"""What a person sees, with and without a terminal."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_runs import Crash, Recorder, crash, read_metrics, tiny_config, write_tokens

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
    clock = SimpleNamespace(now=100.0)
    config = tiny_config(tokens, eval_every=0)
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=Recorder({6: crash}))
    monkeypatch.setattr("time.monotonic", lambda: clock.now)

    def tick() -> None:
        clock.now += 10

    # Steps 4 to 12 are left; each row is written before the clock ticks, so step k has seen k - 4 ticks.
    train(config, tmp_path / "run", resume=True, progress=Recorder(dict.fromkeys(range(4, 13), tick)))
    row = read_metrics(tmp_path / "run", timeless=False)[8]
    assert (row["step"], row["eta_seconds"]) == (9, round(5 * 10 / 6 * 3))


ROW = {
    "step": 1200,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 0.512,
    "tokens_per_second": 1234567.0,
    "mfu": 0.4512,
    "memory_gib": 12.345,
    "eta_seconds": 3723,
}


def line(row: dict, tokens: Path, tmp_path: Path, width: int | None = None) -> str:
    watcher = Recorder()
    train(tiny_config(tokens, steps=1, eval_every=0), tmp_path / "run", progress=watcher)
    return ConsoleProgress(console(terminal=False)[0])._line(watcher.plans[0], row, width)


def test_every_number_of_the_status_line(tokens: Path, tmp_path: Path):
    assert line(ROW, tokens, tmp_path) == (
        "step 1,200/1 · loss 2.5000 · 3.608 bits/byte · lr 1.00e-03 · grad 0.512 · 1,234,567 tokens/s · MFU 45.1% · "
        "12.35 GiB · ETA 1:02:03"
    )


def test_a_narrow_terminal_keeps_what_matters_most(tokens: Path, tmp_path: Path):
    text = line(ROW, tokens, tmp_path, width=80)
    assert len(text) <= 80
    for part in ("step 1,200/1", "loss 2.5000", "1,234,567 tokens/s", "MFU 45.1%", "ETA 1:02:03"):
        assert part in text


def test_a_skipped_step_and_a_spike_are_seen(tokens: Path, tmp_path: Path):
    skipped = {**ROW, "loss": None, "grad_norm": None, "skipped": True}
    assert "loss not finite · skipped · lr" in line(skipped, tokens, tmp_path)
    assert "loss 2.5000 (spike)" in line({**ROW, "spike": True}, tokens, tmp_path / "b")


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
    for resume, expected in (
        (False, "lr rising to 0.0024, no further: the warm-up of 5 steps takes the whole run"),
        (True, "all of them done"),
    ):
        output, text = console(terminal=False)
        train(config, tmp_path / "run", resume=resume, progress=ConsoleProgress(output))
        assert expected in text.getvalue()
