"""`groundup tokenizer info|compare|encode|decode|profile` from the command line."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import groundup, refused

from groundup import Tokenizer
from groundup.cli import main

TEXT = "the cat, the hat\nand wörld 😀\n\n<|endoftext|>the end"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and the tokenizers a/ and b/."""
    root = tmp_path_factory.mktemp("tools")
    (root / "text.txt").write_text(TEXT * 20)
    Tokenizer.train([root / "text.txt"], 280, ["<|endoftext|>"]).save(root / "a")
    Tokenizer.train([root / "text.txt"], 270, ["<|endoftext|>"]).save(root / "b")
    return root


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]):
    monkeypatch.chdir(here)

    def call(line: str, data: bytes = b"") -> bytes:
        feed(monkeypatch, data)
        assert main(line.split()) == 0
        return capfdbinary.readouterr().out

    return call


def test_encode_and_decode_are_inverse_on_any_bytes(run):
    for data in (TEXT.encode(), b"", b"\n", b"\xff\x00 \xe4\n x", TEXT.encode() * 3000):
        ids = run("tokenizer encode a", data)
        assert [int(word) for word in ids.split()] == Tokenizer.load("a").encode(data)
        assert run("tokenizer decode a", ids) == data


def test_a_line_of_ids_is_a_line_of_text(run):
    rows = run("tokenizer encode a", b"the cat\nthe\nhat").decode().splitlines()
    tokenizer = Tokenizer.load("a")
    assert [tokenizer.decode(map(int, row.split())) for row in rows] == ["the cat\n", "the\n", "hat"]


def test_decode_reads_lists_as_python_prints_them(run):
    assert run("tokenizer decode a", b"[104, 105,\n 33]") == b"hi!"


def test_numpy_files_both_ways(run, here: Path):
    assert run("tokenizer encode a --numpy ids.npy", TEXT.encode()) == b""
    ids = np.load(here / "ids.npy")
    assert (ids.dtype, ids.tolist()) == (np.uint16, Tokenizer.load("a").encode(TEXT))
    assert run("tokenizer decode a --numpy ids.npy") == TEXT.encode()


def test_two_commands_may_write_one_numpy_file(here: Path, tmp_path: Path):
    """Both at the same time, each aside in a file of its own: the last to end wins, whole."""
    command = [sys.executable, "-m", "groundup.cli", "tokenizer", "encode", str(here / "a"), "--numpy", "ids.npy"]
    options = {"cwd": tmp_path, "stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    first, second = (subprocess.Popen(command, **options) for _ in range(2))
    for process, text in ((first, b"the cat and "), (second, b"hat, the ")):  # both read, so both have begun
        process.stdin.write(text * 30_000)
        process.stdin.flush()
    for process, text in ((first, b"the cat and "), (second, b"hat, the ")):
        process.communicate(timeout=60)
        assert process.returncode == 0
        ids = np.load(tmp_path / "ids.npy")
        assert Tokenizer.load(here / "a").decode_bytes(ids) == text * 30_000
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"]


def test_encoding_answers_before_its_input_ends(here: Path):
    """What has been decided is printed while the rest is awaited."""
    command = [sys.executable, "-u", "-m", "groundup.cli", "tokenizer", "encode", "a"]
    process = subprocess.Popen(command, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"the cat\nthe hat and the")
    process.stdin.flush()
    first = process.stdout.readline()
    assert Tokenizer.load(here / "a").decode(map(int, first.split())) == "the cat\n"
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_info_in_both_forms(run):
    card = run("tokenizer info a --longest 1 --word the --text text.txt").decode()
    assert "280" in card
    assert '"the"' in card
    found = json.loads(run("tokenizer info a --longest 1 --word the --text text.txt --json"))
    assert found["vocab_size"] == 280
    assert found["text"]["bytes"] == len(TEXT.encode()) * 20
    assert [node["token"] for node in found["word"]] == ["the"]


def test_compare_in_both_forms(run):
    table = run("tokenizer compare a b --text text.txt").decode()
    assert "bytes a token" in table
    rows = json.loads(run("tokenizer compare a b --text text.txt --json"))["rows"]
    assert rows[0]["cells"][0]["tokens"] < rows[0]["cells"][1]["tokens"]


def test_profile_in_both_forms(run, here: Path):
    assert "merges/s" in run("tokenizer profile text.txt --vocab-size 280 --threads 1").decode()
    table = run("tokenizer profile text.txt --vocab-size 260 --ladder incremental --json out.json").decode()
    rows = json.loads((here / "out.json").read_text())["rows"]
    assert rows[0]["function"] in table


def test_parallel_ladder_from_a_process_of_its_own(here: Path):
    options = ("--vocab-size=260", "--threads=2", "--ladder=parallel", "--json")
    run = groundup(here, "tokenizer", "profile", "text.txt", *options)
    assert run.returncode == 0, run.stderr
    assert any("character_class" in row["function"] for row in json.loads(run.stdout)["rows"])


@pytest.mark.parametrize(
    ("line", "data", "message"),
    [
        ("tokenizer decode a", b"3 x4\n1", "standard input: line 1 holds 'x4', which is no id; give numbers"),
        ("tokenizer decode a", b"3 --5", "standard input: line 1 holds '--5', which is no id"),
        ("tokenizer decode a", b"1 \xff2", "standard input: line 1 holds '\ufffd2', which is no id"),
        ("tokenizer decode a", b"9" * 5000, f"standard input: line 1 holds '{'9' * 20}', which is no id"),
        ("tokenizer decode a", b"-1", "id -1 is not in the vocabulary"),
        ("tokenizer decode a", b"9" * 30, f"id {'9' * 30} is not in the vocabulary"),
        ("tokenizer decode a", b"280", "id 280 is not in the vocabulary: legal ids are 0 to 279"),
        ("tokenizer decode a --numpy text.txt", b"", "text.txt: cannot be read as a .npy file"),
        ("tokenizer info none", b"", "none: no such file or folder"),
        ("tokenizer info a --text none.txt", b"", "none.txt: cannot be read"),
        ("tokenizer info a --longest -1", b"", "--longest is -1; it must not be negative"),
        ("tokenizer compare a --text text.txt", b"", "give two or more tokenizers"),
        ("tokenizer compare a b", b"", "at least one --text FILE"),
        ("tokenizer profile", b"", "missing: FILES..."),
        ("tokenizer profile none.txt", b"", "none.txt: no such file or folder"),
    ],
)
def test_refused_in_one_line(here, monkeypatch, capsys, line, data, message):
    monkeypatch.chdir(here)
    feed(monkeypatch, data)
    assert message in refused(capsys, *line.split())


def test_json_lines_from_training_to_token_files(run, here: Path):
    lines = [json.dumps({"body": f"the cat {n} and the hat"}) for n in range(40)]
    (here / "in.jsonl").write_text("\n".join(lines))
    run("tokenizer train in.jsonl --text-field body --vocab-size 270 --out j")
    run("tokenize in.jsonl --text-field body --tokenizer j --out tokens")
    ids = [np.load(here / "tokens" / f"{name}.npy") for name in ("train", "valid")]
    texts = "".join(Tokenizer.load(here / "j").decode(part) for part in ids).split("<|endoftext|>")
    assert sorted(texts) == sorted(["", *(json.loads(line)["body"] for line in lines)])
