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


def test_the_progress_line_shows_share_rate_and_time_left_on_terminals_only():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

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
