"""The options of `groundup tokenizer train`, and its progress line."""

import io

import pytest

from groundup.cli import main
from groundup.cli.progress_line import ProgressLine
from groundup.cli.tokenizer_train import parse_bytes
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer


def test_sizes():
    assert [parse_bytes(text, "--memory") for text in ("0", "12", "1.5 KB", "2GiB")] == [0, 12, 1500, 2**31]
    for text in ("", "-1", "2 gib", "GB", "1e9"):
        with pytest.raises(UserError, match="--memory"):
            parse_bytes(text, "--memory")


def test_options_reach_the_trainer(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abcd bcda cdab 1234 " * 100)
    out = str(tmp_path / "out")
    command = ["tokenizer", "train", str(tmp_path / "a.txt"), "--out", out, "--vocab-size", "262"]
    assert main([*command, "--pattern", "llama3", "--ties", "huggingface"]) == 0
    made = Tokenizer.load(out)
    expected = Tokenizer.train([tmp_path / "a.txt"], 262, ["<|endoftext|>"], pattern="llama3", ties="huggingface")
    assert made.fingerprint == expected.fingerprint
    assert main([*command, "--memory", "1KB"]) == 2
    assert "allow more, or prune" in capsys.readouterr().err
    assert main([*command, "--pattern", "gpt3"]) == 2
    assert 'did you mean "gpt2"' in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_training_and_tokenizing_show_how_far_they_are_on_terminals_only(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abcd bcda<|endoftext|>cdab 1234 " * 100)
    monkeypatch.chdir(tmp_path)
    for line, phases in (
        ("tokenizer train a.txt --vocab-size 260 --out tok", ("count", "merge")),
        ("tokenize a.txt --tokenizer tok --out tokens", ("split", "encode")),
    ):
        monkeypatch.setattr("sys.stderr", terminal := Terminal())
        assert main(line.split()) == 0
        shown = terminal.getvalue().split("\r\x1b[K")
        assert all(any(part.startswith(f"{phase} ") for part in shown) for phase in phases), shown
        monkeypatch.setattr("sys.stderr", plain := io.StringIO())
        assert main(line.split()) == 0
        assert "\x1b" not in plain.getvalue()


def test_the_progress_line_shows_share_rate_and_time_left():
    with ProgressLine(Terminal()) as line:
        line("count", 0, 100)
        assert line.text(0, 100, 0.0) == "count   0%"
        assert line.text(50_000_000, 100_000_000, 0.5) == "count  50%  100 MB/s  0 s left"
        line("merge", 1, 10)
        assert line.text(1000, 10_000, 2.0) == "merge  10%  500 merges/s  18 s left"
        assert line._stream.getvalue().startswith("\r\x1b[Kcount   0%")
    plain = io.StringIO()
    with ProgressLine(plain) as line:
        line("count", 5, 10)
    assert plain.getvalue() == ""
