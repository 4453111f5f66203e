"""The table, its help, and what a mistyped command line gets."""

import errno
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from command_line import refused

import groundup.cli as cli
from groundup import __version__
from groundup.cli.train import parse_args
from groundup.errors import UserError


def test_help_lists_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command.split()[0]} " in text for command in cli.COMMANDS)
    for command in cli.COMMANDS:
        group, _, second = command.partition(" ")
        assert second in cli.GROUPS.get(group, "")  # a group's row names all of it
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80


def test_no_words_is_help_and_a_group_lists_its_own(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert cli.main(["tokenizer"]) == 0
    text = capsys.readouterr().out
    assert "tokenizer train" in text
    assert "quickstart" not in text


def test_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"groundup {__version__}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_from_its_docstrings(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: groundup {command}" in text
    assert "(default: )" not in text


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("trian", ['no command "trian"', '"train"']),
        ("tokenizer trian", ['no command "tokenizer trian"', '"train"']),
        ("--frobnicate", ['no command "--frobnicate"']),
        ("generate", ["missing: RUN", "groundup generate --help"]),
        ("generate a b", ["unexpected words: b"]),
        ("generate a --promt x", ["unknown flag --promt", '"--prompt"']),
        ("generate a --max-tokens many", ["--max-tokens", "'many' is not a whole number"]),
        ("generate a --temperature hot", ["--temperature", "'hot' is not a number"]),
        ("generate a --top-p", ["'--top-p'"]),
        ("generate a --device tpu", ["'tpu'", "--device", "auto", "cpu", "cuda"]),
        ("plot", ["missing: RUN"]),
        ("plot a --x epochs", ["'epochs'", "step", "tokens", "time"]),
        ("tokenizer train --out x", ["missing: FILES"]),
        ("tokenizer train a", ["missing: --out DIR"]),
        ("tokenize a", ["missing: --tokenizer DIR, --out DIR"]),
        ("train", ["missing: --out DIR"]),
        ("train --out x --model.n-layer 3", ["--model.n-layer ", '"--model.n-layers"']),
        ("train --out x --model.n-layers=3.5", ["--model.n-layers", "'3.5' is not a whole number"]),
        ("train --out x --optim.betas 0.9", ["'--optim.betas'", "2"]),
        ("train --out x --optim.betas 0.9 x", ["--optim.betas"]),
        ("train --out x --train.sinks wandb tensorbaord", ["'tensorbaord'", "--train.sinks", "tensorboard", "wandb"]),
        ("train --out x --data.order sorted", ["'sorted'", "shuffled", "random"]),
        ("train --out x --size stories", ['"stories"', '"stories-17m"']),
        ("train --out x --config no/such.toml", ["no/such.toml"]),
        ("train --out x", ["--data"]),
        ("evaluate --json", ["missing: RUN"]),
        ("evaluate no/such/run", ["no/such/run"]),
        ("quickstart --budget-seconds 0", ["--budget-seconds is 0"]),
        ("quickstart --budget-seconds inf", ["--budget-seconds is inf"]),
        ("quickstart --vocab-size 256", ["256", "at least 257"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    line: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *line.split())
    assert all(part in message for part in parts), message
    assert not any(character in message for character in "│╭╰─")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["wandb"], ["tensorboard", "wandb"]])
def test_a_field_of_some_words_takes_any_number_of_them(words: list[str], capsys: pytest.CaptureFixture[str]):
    read = parse_args(["--train.sinks", *words, "--out", "x"], "groundup train")
    assert read.run.train.sinks == tuple(words)
    assert parse_args(["--out", "x"], "groundup train").run.train.sinks == ()
    cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "[{tensorboard,wandb} ...] Where" in text
    assert "needs its package. (default: none)" in text


def test_errors_are_one_line_where_the_terminal_has_no_box_drawing(tmp_path: Path):
    command = [sys.executable, "-m", "groundup.cli", "tokenize", "a", "--out", "b"]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "groundup: error: missing: --tokenizer DIR; see groundup tokenize --help\n"


def test_an_unknown_key_in_a_file_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "c.toml").write_text("[model]\nn_layer = 3\n")
    message = refused(capsys, "train", "--out", tmp_path / "run", "--config", tmp_path / "c.toml")
    assert 'unknown key "model.n_layer" (did you mean "n_layers"?)' in message


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Put a command into the table that does what the test says."""

    def install(action) -> None:
        module = types.ModuleType("groundup_test_command")
        module.main = lambda argv, prog: action()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "try", (module.__name__, "a command of this test"))

    return install


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("two\n  lines"), 2, "groundup: error: two lines\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/full"),
            2,
            "groundup: error: /full: No space left on device\n",
        ),
        (MemoryError(), 2, "groundup: error: out of memory; try a smaller --train.micro-batch-size, model or input\n"),
        (KeyboardInterrupt(), 130, "\ngroundup: interrupted\n"),
    ],
)
def test_failures_of_user_and_machine_are_lines(error: BaseException, code: int, line: str, command, capsys):
    command(raising(error))
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err == line


def test_bugs_keep_their_traceback(command):
    command(raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_a_reader_that_leaves_is_no_error(tmp_path: Path):
    run = subprocess.run(
        f"{sys.executable} -m groundup.cli --help | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    assert run.stdout.strip() in ("0", "141")


@pytest.mark.parametrize("line", ["tokenizer train missing.txt --out t", "--help", "tokenizer train --help"])
def test_tokenizer_commands_import_neither_torch_nor_numpy(line: str, tmp_path: Path):
    code = (
        "import json, sys\nfrom groundup.cli import main\n"
        f"main({line.split()!r})\n"
        "heavy = ('torch', 'jaxtyping', 'numpy', 'rich', 'matplotlib')\n"
        "print('\\n' + json.dumps([name for name in heavy if name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("module", ["groundup.generate.engine", "groundup.train"])
def test_a_run_that_does_not_use_the_compiler_or_fsdp2_does_not_import_them(module: str):
    heavy = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
