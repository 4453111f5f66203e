"""What bad input gets: one line, exit code 2, nothing half-written."""

import resource
import shutil
from pathlib import Path

import pytest
from command_line import groundup, refused, tree
from conftest import TINY

from groundup.cli import main


@pytest.fixture
def work(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished path to spoil; the working directory."""
    work = tmp_path / "work"
    shutil.copytree(path, work)
    monkeypatch.chdir(work)
    return work


CASES = [
    # missing or empty file
    ("tokenizer train missing.txt --out new", ["missing.txt", "no such file"]),
    ("tokenizer train empty.txt --out new", ["empty.txt", "empty"]),
    ("tokenizer train hidden --out new", ["hidden: the folder holds no text files"]),
    ("tokenize hidden --tokenizer tok --out new", ["hidden: the folder holds no text files"]),
    ("tokenize missing.txt --tokenizer tok --out new", ["missing.txt", "no such file"]),
    ("tokenize empty.txt --tokenizer tok --out new", ["empty.txt", "empty"]),
    ("tokenize train.txt missing.txt --tokenizer tok --out new", ["missing.txt"]),
    ("tokenize train.txt --tokenizer missing --out new", ["missing", "no such file"]),
    # a vocabulary smaller than 256 + special tokens
    ("tokenizer train train.txt --vocab-size 256 --out new", ["256", "at least 257"]),
    (
        "tokenizer train train.txt --vocab-size 257 --special-token <a> --special-token <b> --out new",
        ["257", "at least 258"],
    ),
    # invalid UTF-8, with its byte offset
    ("tokenizer train bad.txt --out new", ["bad.txt", "invalid UTF-8 at byte 4"]),
    ("tokenize bad.txt --tokenizer tok --out new", ["bad.txt", "invalid UTF-8 at byte 4", "--errors replace"]),
    # shares and sizes that make no sense
    ("tokenize train.txt --tokenizer tok --valid-fraction 2 --out new", ["2.0", "between 0 and 1"]),
    ("tokenize train.txt valid.txt --tokenizer tok --valid-fraction 0.1 --out new", ["not both"]),
    ("tokenizer train train.txt --threads -1 --out new", ["-1"]),
    # an --out that something else lives in
    ("tokenizer train train.txt --out .", ["--out ."]),
    ("tokenize train.txt --tokenizer tok --out .", ["holds"]),
    ("tokenizer train train.txt --out train.txt", ["train.txt", "not a directory"]),
    # training that cannot be
    ("train --data missing --out new --train.steps 5", ["missing"]),
    ("train --data tokens --out new", ["exactly one of train.steps and train.tokens"]),
    ("train --data tokens --out new --train.steps 5 --model.context-length 99999", ["99999", "100000"]),
    ("train --data tokens --out new --train.steps 5 --model.d-model 100 --model.n-heads 16", ["100", "96"]),
    (
        "train --data tokens --out new --train.steps 5 --train.global-batch-size 50 --train.micro-batch-size 16",
        ["50", "16", "48 and 64"],
    ),
    ("train --data tokens --out new --train.steps 5 --model.vocab-size 299", ["300", "299"]),
    ("train --data tokens --out run", ["run holds a run", "--resume"]),
    ("train --out run --resume --optim.lr 0.5 --train.seed 3", ["optim.lr", "train.seed"]),
    ("train --data tokens --out new --train.steps 5 --train.device cuda", ["cuda"]),
    # runs that are not there
    ("train --out tok --resume", ["--data"]),
    ("evaluate tok", ["tok"]),
    ("evaluate run --step 7", ["step 7", "6, 12"]),
    ("evaluate run --data tok", ["tok"]),
    ("evaluate run --data other", ["another tokenizer"]),
    ("evaluate run --by-document --batches 3", ["--batches", "--by-document"]),
    ("generate missing", ["missing"]),
    ("generate run --temperature -1", ["temperature", "-1"]),
    ("generate run --top-p 2", ["top_p", "2"]),
    ("generate run --max-tokens -3", ["-3"]),
    ("generate run --min-p 2", ["min_p", "2"]),
    ("generate run --prompts missing.txt", ["missing.txt"]),
    ("generate run --prompts empty.txt", ["empty.txt", "a prompt a line"]),
    ("generate run --prompts bad.txt", ["bad.txt", "not valid UTF-8 at byte 4"]),
    ("generate run --prompts train.txt --prompt x", ["--prompt ", "--prompts"]),
    ("generate run --json", ["--json", "--prompts"]),
    # exchange with Hugging Face's format
    ("export missing --out new", ["missing", "no run"]),
    ("export run --out tokens", ["holds", "export did not write"]),
    ("export run --out train.txt", ["train.txt", "not a directory"]),
    ("export run --step 7 --out new", ["step 7", "6, 12"]),
    ("import missing --out new", ["missing has no config.json"]),
    ("import tok --out new", ["tok has no config.json"]),
    ("import tok --out run", ["run is not free"]),
    ("plot tok", ["metrics.jsonl"]),
    ("plot run --out loss.gif", ["loss.gif", ".png"]),
    ("quickstart --out train.txt", ["train.txt", "is a file"]),
    ("quickstart --out tok", ["tok", "something else"]),
    ("quickstart --corpus missing.txt --out new", ["missing.txt"]),
    ("quickstart --corpus empty.txt --out new", ["empty.txt", "empty"]),
    ("quickstart --corpus bad.txt --out new", ["bad.txt", "invalid UTF-8 at byte 4"]),
]


@pytest.mark.parametrize(("line", "parts"), CASES, ids=[line for line, _ in CASES])
def test_refused_in_one_line_with_nothing_written(
    line: str, parts: list[str], work: Path, capsys: pytest.CaptureFixture[str]
):
    if "cuda" in line:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    (work / "empty.txt").touch()
    (work / "hidden" / ".git").mkdir(parents=True)
    (work / "hidden" / ".git" / "HEAD").write_text("ref")
    (work / "bad.txt").write_bytes(b"good\xffbad")
    if "other" in line:
        other_tokens(capsys)
    before = tree(work)
    message = refused(capsys, *line.split())
    assert all(part in message for part in parts), message
    assert tree(work) == before


def other_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Token files of another tokenizer, in other/."""
    assert main(["tokenizer", "train", "train.txt", "--vocab-size", "290", "--out", "othertok"]) == 0
    assert main(["tokenize", "train.txt", "valid.txt", "--tokenizer", "othertok", "--out", "other"]) == 0


def test_a_tokenizer_that_does_not_match_the_token_files(work: Path, capsys: pytest.CaptureFixture[str]):
    other_tokens(capsys)
    shutil.copy("othertok/tokenizer.json", "tokens/tokenizer.json")
    before = tree(work)
    message = refused(capsys, "train", "--data", "tokens", "--out", "new", *TINY)
    assert "does not match" in message
    assert "tokens" in message
    assert tree(work) == before


def test_a_checkpoint_that_does_not_match_the_model(work: Path, capsys: pytest.CaptureFixture[str]):
    config = work / "run" / "config.toml"
    config.write_text(config.read_text().replace("d_ff = 64", "d_ff = 128"))
    for command in ("evaluate", "generate"):
        message = refused(capsys, command, "run")
        assert "layers.0.ffn.w1.weight" in message
        assert "64" in message
        assert "128" in message


def test_token_ids_the_model_has_no_row_for(work: Path, capsys: pytest.CaptureFixture[str]):
    import numpy as np

    from groundup.data import TokenData

    tokens = TokenData.open("tokens").train.copy()
    tokens[5:-1] = 65_000
    np.save("tokens/train.npy", tokens)
    assert main(["train", "--data", "tokens", "--out", "new", *TINY]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "id 65000" in error
    assert "vocab_size is 300" in error


def test_a_full_disk_keeps_the_checkpoint_before(work: Path, capsys: pytest.CaptureFixture[str]):
    """A limit on the size of files stands in for the full disk: the save of step 12 fails half-way."""
    shutil.rmtree("run/checkpoints/step-00000012")
    size = (work / "run/checkpoints/step-00000006/model.safetensors").stat().st_size

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    run = groundup(work, "train", "--out", "run", "--resume", preexec_fn=limit)
    assert run.returncode == 2
    assert run.stderr.startswith("groundup: error: ")
    assert run.stderr.count("\n") == 1, run.stderr
    assert [p.name for p in (work / "run/checkpoints").iterdir()] == ["step-00000006"]
    assert main(["evaluate", "run", "--json"]) == 0
    assert '"step": 6' in capsys.readouterr().out
    assert main(["train", "--out", "run", "--resume"]) == 0


def test_a_prompt_that_is_not_text(work: Path, capsys: pytest.CaptureFixture[str]):
    assert "--prompt is not valid UTF-8 at byte 3" in refused(capsys, "generate", "run", "--prompt", "é \udcff")
