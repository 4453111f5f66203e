"""`groundup chat` from a pipe, and in a terminal where Ctrl-C stops the answer and not the program."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command_line import refused

from groundup.cli import main
from groundup.generate.chat import printable


@pytest.fixture
def here(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(path)
    return path


def pipe(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def test_lines_from_a_pipe(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    line = ["chat", "run", "--max-tokens", "5", "--seed", "3"]
    pipe(
        monkeypatch, b"Once upon\nthe fox\n/reset\n/seed 3\n/temperature 0.8\nOnce upon\r\n//slash\n/help\n/quit\nnever"
    )
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "> " not in out
    assert "/temperature 0.8 " in err
    assert "temperature 0.8\n" in err
    pipe(monkeypatch, b"Once upon\nthe fox\n")
    assert main(line) == 0
    alone = capsys.readouterr().out
    assert out.startswith(alone)
    # After /reset and /seed the first answer is the first answer again.
    pipe(monkeypatch, b"Once upon\n")
    assert main(line) == 0
    first = capsys.readouterr().out
    assert out[len(alone) :].startswith(first)
    assert main(["generate", "run", "--prompt", "Once upon", *line[2:], "--temperature", "0.8", "--top-p", "0.95"]) == 0
    assert printable(capsys.readouterr().out) == "Once upon" + first


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"/temprature 1\n", 'did you mean "/temperature"'),
        (b"good\nbad\xff\n", "line 2 of standard input is not valid UTF-8 at byte 3"),
    ],
)
def test_a_script_ends_at_what_is_wrong(text, says, here, monkeypatch, capsys: pytest.CaptureFixture[str]):
    pipe(monkeypatch, text)
    assert main(["chat", "run", "--max-tokens", "2"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("groundup: error: ")
    assert says in err


def test_bad_flags_are_refused(here: Path, capsys: pytest.CaptureFixture[str]):
    assert "max_tokens is 0" in refused(capsys, "chat", "run", "--max-tokens", "0")
    assert "no run" in refused(capsys, "chat", "tok")


class Terminal:
    """A command under a pseudo-terminal."""

    def __init__(self, cwd: Path, *argv: str):
        self.fd, other = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "groundup.cli", *argv]
        # A session of its own whose terminal this is: so Ctrl-C typed there becomes a signal.
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)
        self.text = ""

    def wait_for(self, pattern: str, seconds: float = 120, repeat: str = "") -> str:
        """What arrives up to a match of `pattern`, which is taken off; `repeat` is typed each second until then."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text)):
            assert time.monotonic() < end, self.text
            if not select.select([self.fd], [], [], 1)[0]:
                self.type(repeat)
            else:
                try:
                    self.text += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    raise AssertionError(self.text) from None
        found, self.text = self.text[: match.end()], self.text[match.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_ctrl_c_stops_the_answer_and_not_the_program(here: Path):
    terminal = Terminal(here, "chat", "run", "--max-tokens", "1000000")
    try:
        assert "it continues what you write" in terminal.wait_for("> ")
        terminal.type("Once upon\n")
        terminal.wait_for("no longer sees the beginning")  # well into its answer
        terminal.type("\x03")
        terminal.wait_for("stopped\r\n> ")
        # Python's readline forgets a signal that comes between its prompt and its wait for a key: a person types again.
        terminal.wait_for("/quit ends\r\n> ", repeat="\x03")
        terminal.type("/nonsense\n")
        terminal.wait_for('no command "/nonsense".*\r\n> ')
        terminal.type("/max-tokens 3\n")
        terminal.wait_for("max_tokens 3\r\n> ")
        terminal.type("again\n")
        terminal.wait_for("\r\n.*\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        if terminal.process.poll() is None:
            terminal.process.send_signal(signal.SIGKILL)
        os.close(terminal.fd)
