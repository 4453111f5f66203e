"""The quickstart: stages that are skipped when done, a size chosen once, commands at the end that work."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import refused, tree

import groundup.quickstart_size as sizing
from groundup.cli import main
from groundup.config import RunConfig, load_toml
from groundup.data import TokenData
from groundup.quickstart import corpus_prompts

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder of one small rung, so that a quickstart takes a second."""
    monkeypatch.setattr(sizing, "LADDER", (sizing._rung(16, 1, 1, 16, 4, 1e-2, tied=False),))
    monkeypatch.setattr(sizing, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(sizing, "FEW_TOKENS", 2_000)
    monkeypatch.setattr(sizing, "EPOCHS", 0)


@pytest.fixture
def corpus(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a quickstart on the tiny corpus, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return ["quickstart", "--corpus", str(path / "train.txt"), "--vocab-size", "300", "--budget-seconds", "5"]


@pytest.mark.parametrize("by_uv", [False, True])
def test_the_whole_quickstart(
    tiny, corpus: list[str], by_uv: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    if by_uv:  # this is how a program sees that `uv run` started it
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert main(corpus) == 0
    text = capsys.readouterr().out
    out = Path("runs/quickstart")
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert text.count("── sample ") == 3
    # The prompts come from the corpus, and its documents begin like this.
    assert "from 'Once upon a'" in text
    commands = [line.strip() for line in text.split("\nnext:\n")[1].splitlines()]
    assert len(commands) == 3
    for command in commands:
        assert command.startswith("uv run groundup " if by_uv else "groundup ")
        words = shlex.split(command.removeprefix("uv run "))[1:]
        assert main(words) == 0, command
    capsys.readouterr()

    before = tree(out / "checkpoints") | tree(out / "tokens")
    assert main(corpus) == 0
    again = capsys.readouterr().out
    assert "already finished" in again
    assert again.split("── sample 1")[1] == text.split("── sample 1")[1]
    assert tree(out / "checkpoints") | tree(out / "tokens") == before


def test_a_cut_quickstart_goes_on_with_the_same_model_and_losses(tiny, corpus: list[str], monkeypatch):
    assert main(corpus) == 0
    out = Path("runs/quickstart")
    whole = (out / "metrics.jsonl").read_text()
    config = (out / "config.toml").read_text()
    newest = max((out / "checkpoints").iterdir())
    shutil.rmtree(newest)
    monkeypatch.setattr(sizing, "choose", None)  # a size is never chosen again
    assert main(corpus) == 0
    assert newest.exists()
    assert (out / "config.toml").read_text() == config
    keys = ("step", "loss", "valid_loss")
    rows = [
        [{k: json.loads(line).get(k) for k in keys} for line in text.splitlines()]
        for text in (whole, (out / "metrics.jsonl").read_text())
    ]
    assert rows[0] == rows[1]


def test_other_inputs_need_another_directory_or_a_fresh_start(tiny, corpus: list[str], capsys):
    assert main(corpus) == 0
    out = Path("runs/quickstart")
    before = tree(out)
    other = ["280" if word == "300" else word for word in corpus]
    assert "vocab_size 300, not 280" in refused(capsys, *other)
    assert tree(out) == before
    assert main([*other, "--fresh"]) == 0
    assert load_toml(out / "config.toml", RunConfig).model.vocab_size == 280
    assert list(out.parent.iterdir()) == [out]


def test_prompts_of_one_long_document_come_from_three_places(path: Path, tmp_path: Path):
    (tmp_path / "book.txt").write_text(" ".join(f"word{i}" for i in range(5000)))
    assert (
        main(["tokenize", str(tmp_path / "book.txt"), "--tokenizer", str(path / "tok"), "--out", str(tmp_path / "t")])
        == 0
    )
    prompts = corpus_prompts(TokenData.open(tmp_path / "t"))
    assert len(set(prompts)) == 3
    assert all(word.startswith("word") for prompt in prompts for word in prompt.split())


def rate_of(speed: float):
    """A machine that does `speed` parameter-tokens a second."""

    def measure(rung: sizing.Rung, device: torch.device) -> tuple[int, float]:
        matrices = 4096 if rung.model.tie_embeddings else 8192
        parameters = rung.model.d_model * (rung.model.d_model * rung.model.n_layers * 12 + matrices)
        return parameters, speed / parameters

    return measure


def test_faster_machines_get_larger_models_up_to_what_the_corpus_bears(monkeypatch: pytest.MonkeyPatch):
    widths = []
    for speed in (1e8, 1.2e10, 1e11, 1e15):
        monkeypatch.setattr(sizing, "_measure", rate_of(speed))
        config = sizing.choose(2_200_000, 4096, 115, CPU)
        parameters, rate = rate_of(speed)(sizing.Rung(config.model, config.optim, 1), CPU)
        tokens = config.train.steps * config.train.global_batch_size * config.model.context_length
        widths.append(config.model.d_model)
        assert tokens <= max(sizing.MIN_STEPS * 1024, rate * 100) + 8192
        assert tokens <= 5 * 2_200_000 + 8192
        assert config.model.d_model == 64 or tokens >= 0.4 * parameters
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (64, 512)


def test_a_small_corpus_gets_a_context_it_can_fill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizing, "_measure", rate_of(1e10))
    config = sizing.choose(50, 300, 10, CPU)
    assert config.model.context_length == 49


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(path: Path, tmp_path: Path):
    words = ["quickstart", "--corpus", str(path / "train.txt"), "--vocab-size", "300", "--budget-seconds", "60"]
    command = [sys.executable, "-m", "groundup.cli", *words]
    metrics = tmp_path / "runs/quickstart/metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n") > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "the same command goes on from here" in out
    config = (tmp_path / "runs/quickstart/config.toml").read_bytes()
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "going on from" in run.stdout
    assert (tmp_path / "runs/quickstart/config.toml").read_bytes() == config
