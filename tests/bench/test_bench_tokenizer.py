"""The tokenizer's benchmark on tiny text: what the rates and counts say."""

import pytest
from bench_tools import tiny_cells

from groundup.bench.suites import tokenizer as suite
from groundup.cli import main
from groundup.errors import UserError
from groundup.tokenizer import END_OF_TEXT, Tokenizer


def test_every_task_with_every_tool_that_can(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words and some more words\n" * 400 + END_OF_TEXT + "last words")
    cells = tiny_cells("tokenizer", text=str(text), threads="1,2")
    assert [cell["status"] for cell in cells] == ["ok"] * len(cells), cells
    found = [tuple(cell["parameters"][key] for key in ("task", "tool", "threads")) for cell in cells]
    assert found == [
        *(("train", "groundup", 1), ("train", "groundup", 2)),
        *(("count", "groundup", 1), ("count", "groundup", 2)),
        *(("encode", "groundup", 1), ("encode", "tiktoken", 1)),
        *(("files", "groundup", 1), ("files", "groundup", 2)),
    ]
    for cell in cells:
        metrics = cell["metrics"]
        assert metrics["text_bytes"] == text.stat().st_size
        for name in ("first", "warm", "decode") if "tokens" in metrics else [cell["parameters"]["task"]]:
            seconds = metrics[f"time.{name}"]["median"] / 1e3
            assert metrics[f"mb_per_second.{name}"] == pytest.approx(text.stat().st_size / 1e6 / seconds)
    tokens = Tokenizer.train([text], 300, [END_OF_TEXT]).encode(text.read_text())
    assert [cell["metrics"]["tokens"] for cell in cells[4:6]] == [len(tokens)] * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_peer_encodes_files_too(tmp_path, threads):
    pytest.importorskip("gigatoken")
    path = tmp_path / "text.txt"
    path.write_text("some words and some more words\n" * 400 + END_OF_TEXT + "last words")
    tokenizer = Tokenizer.train([path], 270, [END_OF_TEXT])
    for tool in suite.TASKS["files"]:
        row = suite.sample("files", tool, path, 270, threads, tokenizer)
        assert row["seconds"] > 0 <= row["peak"]


def test_flags_that_would_change_nothing_are_refused(tmp_path, capsys):
    assert main(["bench", "tokenizer", "--seed", "3"]) == 2
    assert "unknown flag --seed" in capsys.readouterr().err
    assert main(["bench", "tokenizer", "--device", "cuda"]) == 2
    assert "'cuda'" in capsys.readouterr().err
    assert main(["bench", "tokenizer", "--slurm", str(tmp_path / "job.sh")]) == 0
    assert "gpu" not in (tmp_path / "job.sh").read_text()


def test_bad_options_are_one_line():
    for changes, words in (
        ({"text": "no/such.txt"}, "--text: no such file"),
        ({"tool": "tiktokn"}, 'did you mean "tiktoken"'),
        ({"vocab_size": "9"}, "at least 257"),
    ):
        with pytest.raises(UserError, match=words):
            suite.cells(suite.Options(**changes))
