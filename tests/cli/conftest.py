"""A tiny corpus taken through the whole path, once for all tests of the command line."""

from pathlib import Path

import pytest
from command_line import groundup

TINY = [
    *("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.context-length=16"),
    *("--train.steps=12", "--train.micro-batch-size=4", "--train.save-every=6", "--train.eval-every=6"),
    "--train.device=cpu",
]


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt, valid.txt, tok/, tokens/ and the finished run/ (12 steps, checkpoints 6 and 12)."""
    root = tmp_path_factory.mktemp("path")
    story = "Once upon a time a {} sat on a {} hill and sang to the {} moon.\n"
    words = ["fox", "dog", "owl", "bee", "ant", "hen", "cow", "red", "old", "shy", "wet"]
    stories = [story.format(words[i % 11], words[i * 7 % 11], words[i * 5 % 11]) for i in range(300)]
    (root / "train.txt").write_text("<|endoftext|>".join(stories[:280]))
    (root / "valid.txt").write_text("<|endoftext|>".join(stories[280:]))
    for line in (
        "tokenizer train train.txt --vocab-size 300 --out tok --threads 1",
        "tokenize train.txt valid.txt --tokenizer tok --out tokens --threads 1",
    ):
        run = groundup(root, *line.split())
        assert run.returncode == 0, run.stderr
    run = groundup(root, "train", "--data", "tokens", "--out", "run", *TINY)
    assert run.returncode == 0, run.stderr
    return root
