"""Where text comes from, the bound on memory, the rule for ties: all lead to the same merges, or say what they do."""

import gzip
import itertools
import json
import lzma
import os
import random
import string
import subprocess
import sys
from collections import Counter

import pytest
import tokenizers
from texts import END, PROSE, train_on

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer, reference, training
from groundup.tokenizer.sources import JsonLines, find_sources, text_files

TEXT = (PROSE + END) * 40


@pytest.fixture
def expected(tmp_path):
    return train_on(tmp_path, TEXT, 400, special_tokens=[END]).merges


def test_packed_files_and_iterators_train_alike(tmp_path, expected):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "b.xz").write_bytes(lzma.compress(TEXT.encode()))
    for name in ("a.txt.gz", "b.xz"):
        assert Tokenizer.train([tmp_path / name], 400, [END]).merges == expected
    documents = TEXT.split(END)
    lines = "\n".join(json.dumps({"id": 1, "text": text}) for text in documents)
    (tmp_path / "c.jsonl").write_text(lines + "\n\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("c.jsonl", "d.jsonl.gz"):
        assert Tokenizer.train([tmp_path / name], 400, [END]).merges == expected
    assert Tokenizer.train_from_texts(documents, 400, [END]).merges == expected
    assert Tokenizer.train_from_texts((text.encode() for text in documents), 400, [END]).merges == expected
    words = reference.count_words([TEXT], [END])
    assert Tokenizer.train_from_counts(words, 400, [END]).merges == expected


def test_zstd_in_one_frame_or_several(tmp_path, expected):
    zstandard = pytest.importorskip("zstandard")
    pack = zstandard.ZstdCompressor().compress
    half = len(TEXT) // 2
    (tmp_path / "a.txt.zst").write_bytes(pack(TEXT[:half].encode()) + pack(TEXT[half:].encode()))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXT.split(END))
    (tmp_path / "b.jsonl.zst").write_bytes(pack(lines.encode()))
    for name in ("a.txt.zst", "b.jsonl.zst"):
        assert Tokenizer.train([tmp_path / name], 400, [END]).merges == expected
    for content in (b"no zstd at all", pack(TEXT.encode())[:-9], pack(b"whole") + pack(TEXT.encode())[:40]):
        (tmp_path / "c.txt.zst").write_bytes(content)
        with pytest.raises(UserError, match="cannot be unpacked"):
            Tokenizer.train([tmp_path / "c.txt.zst"], 400)


def test_without_zstandard_the_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="needs the package zstandard"):
        Tokenizer.train([tmp_path / "a.txt.zst"], 400)


def test_json_lines_of_every_kind(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"body": "first\nline"}, {"text": 3, "body": "naïve 😀"}, {"body": ""}]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, records)).encode())
    assert list(JsonLines(path, "body").texts(path.open("rb"))) == ["first\nline", "naïve 😀", ""]
    bad = [b'{"text": "a\xffb"}', rb'{"text": "\ud83d \ud83d\ude00"}', '{"text": "\ufffd"}'.encode()]
    path.write_bytes(b"\n".join(bad))
    lines = JsonLines(path, errors="replace")
    assert list(lines.texts(path.open("rb"))) == ["a\ufffdb", "\ufffd 😀", "\ufffd"]
    assert lines.replaced == 2
    for number, message in ((0, "line 1 is not valid UTF-8"), (1, "line 1 holds a lone surrogate")):
        path.write_bytes(bad[number])
        with pytest.raises(UserError, match=message):
            Tokenizer.train([path], 300)
        with pytest.warns(UserWarning, match="1 invalid UTF-8 sequences were read as U"):
            Tokenizer.train([path], 256, errors="replace")
    with pytest.raises(UserError, match='string in the field "body"'):
        Tokenizer.train([path], 300, text_field="body", errors="replace")


def test_a_folder_mixes_kinds_and_progress_reaches_the_end(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(TEXT)
    (tmp_path / "in" / "b.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    told = []
    both = Tokenizer.train([tmp_path / "in"], 400, [END], progress=lambda *step: told.append(step))
    assert both.merges == train_on(tmp_path, TEXT + END + TEXT, 400, special_tokens=[END]).merges
    counts = [step for step in told if step[0] == "count"]
    assert [done == total for _, done, total in counts] == [False] * (len(counts) - 1) + [True]


def test_progress_tells_of_packed_files_and_iterators_now_and_then(tmp_path, monkeypatch):
    """Never the end before the end, and not once a line; a clock of a hundredth of a second a look."""
    clock = itertools.count()
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock) / 100)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text('{"text": "some words"}\n' * 2000)
    told = []
    Tokenizer.train([tmp_path], 260, progress=lambda *step: told.append(step))
    counts = [step[1:] for step in told if step[0] == "count"]
    assert 50 < len(counts) < 210
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert counts[-1] == (total, total)
    assert len(TEXT) < counts[0][0] <= counts[-1][0]
    told.clear()
    texts = ["some words " * 1000] * 500
    Tokenizer.train_from_texts(texts, 260, threads=1, progress=lambda *step: told.append(step))
    counts = [step[1:] for step in told if step[0] == "count"]
    assert 10 < len(counts) < 60
    assert counts[-1] == (5_500_000, 5_500_000)
    assert all(total == 0 for _, total in counts[:-1])
    assert sorted(counts) == counts


def test_many_files_are_mapped_in_groups(tmp_path, monkeypatch):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {PROSE} number {number}" * (number + 1))
    expected = Tokenizer.train([tmp_path], 400)
    monkeypatch.setattr(training, "_MAPPED", 3)
    assert Tokenizer.train([tmp_path], 400).fingerprint == expected.fingerprint
    (tmp_path / "7.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"7\.txt: invalid UTF-8 at byte 2"):
        Tokenizer.train([tmp_path], 400)


@pytest.mark.slow
def test_more_files_than_the_system_maps(tmp_path):
    (tmp_path / "a.txt").write_text("ab ab")
    assert Tokenizer.train([tmp_path / "a.txt"] * 70_000, 257).merges == [(b"a", b"b")]


def test_what_an_iterator_raises_is_its_own():
    def failing():
        yield "some text"
        raise ValueError("my own trouble")

    with pytest.raises(ValueError, match=r"^my own trouble$"):
        Tokenizer.train_from_texts(failing(), 300)
    with pytest.raises(UnicodeDecodeError):
        Tokenizer.train_from_texts((text.decode() for text in [b"caf\xe9"]), 300)


def test_folders_in_the_order_of_names_without_hidden_and_empty_ones(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c.txt", ".hidden/x.txt", "b/.y.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "empty.txt").touch()
    (source,) = find_sources([tmp_path])
    assert [file.relative_to(tmp_path).as_posix() for file in source.files] == [
        "a.txt", "c.txt", "b/10.txt", "b/2.txt",
    ]  # fmt: skip
    assert source.bytes == sum(file.stat().st_size for file in source.files)
    assert source.name == tmp_path.name
    assert text_files(tmp_path) == text_files([str(tmp_path)]) == source.files
    assert text_files([tmp_path / ".hidden", tmp_path / "b/.y.txt"]) == [
        tmp_path / ".hidden/x.txt",
        tmp_path / "b/.y.txt",
    ]


def test_training_on_a_folder_leaves_out_what_is_hidden(tmp_path):
    """A repository is a folder of text beside a .git full of packed objects."""
    (tmp_path / "in/.git/objects").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_text(TEXT)
    (tmp_path / "in/.git/objects/5b").write_bytes(b"x\x01\xff\xfe")
    (tmp_path / "in/.git/HEAD").write_text("zyzzyva " * 10_000)
    found = Tokenizer.train([tmp_path / "in"], 400, [END])
    assert found.merges == Tokenizer.train([tmp_path / "in/a.txt"], 400, [END]).merges


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text(TEXT)
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"locked: cannot be read .Permission denied"):
        find_sources([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n', r"a\.jsonl: line 2"),
        ("a.jsonl", b"[1]\n", "line 1"),
        ("a.txt.gz", b"no gzip", "cannot be unpacked"),
        ("a.txt.xz", lzma.compress(b"x" * 999)[:-20], "cannot be unpacked"),
        ("a.txt.xz", lzma.compress(b"ab \xff"), r"a\.txt\.xz: invalid UTF-8 at byte 3"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.train([tmp_path / name], 300)


def test_unusable_texts_and_counts():
    with pytest.raises(UserError, match="give a list or an iterator"):
        Tokenizer.train_from_texts("text", 300)
    with pytest.raises(UserError, match="lone surrogate"):
        Tokenizer.train_from_texts(["a\ud800"], 300)
    with pytest.raises(UserError, match="counts are positive"):
        Tokenizer.train_from_counts({b"ab": -1}, 300)
    with pytest.raises(UserError, match="below 2"):
        Tokenizer.train_from_counts({b"ab": 2**62}, 300)
    with pytest.raises(
        UserError, match="holds the special token '<|endoftext|>': cut texts at them first".replace("|", r"\|")
    ):
        Tokenizer.train_from_counts({"a<|endoftext|>": 3}, 300, [END])


def test_the_bound_on_memory_is_an_error_or_prunes(tmp_path):
    rare = " ".join(f"rare{number}" for number in range(60_000))
    path = tmp_path / "many.txt"
    path.write_text(("common words here " * 20_000 + rare + "\n") * 3)
    with pytest.raises(UserError, match="needs more than the 1000000 bytes"):
        Tokenizer.train([path], 300, memory=1_000_000, threads=1)
    with pytest.warns(UserWarning, match="occurrences of rare words were dropped"):
        pruned = Tokenizer.train([path], 270, memory=1_000_000, prune=True, threads=1)
    assert pruned.merges[:5] == Tokenizer.train([path], 270).merges[:5]
    with pytest.raises(UserError, match="prune needs a bound"):
        Tokenizer.train([path], 300, prune=True)


BOUNDED = """
import sys, threading, time
from pathlib import Path
from groundup.tokenizer import Tokenizer

def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

start, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
options = dict(memory=int(sys.argv[2]), prune=sys.argv[3] == "gpt2", pattern=sys.argv[3], threads=int(sys.argv[4]))
try:
    Tokenizer.train([sys.argv[1]], 2000, **options)
except Exception as error:
    print(error)
done = True
thread.join()
print(peak - start)
"""


def memory_of_training(path, bound, pattern="gpt2", threads=2):
    """(what was said, bytes of memory) of training on a file in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", BOUNDED, str(path), str(bound), pattern, str(threads)]
    *said, size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return said, int(size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_bound_holds_for_the_memory_of_the_process(tmp_path):
    path = tmp_path / "distinct.txt"
    path.write_text("".join(f" w{number * 7919 % 1_000_003}" for number in range(1_000_000)) * 3)
    said, size = memory_of_training(path, 32 << 20)
    assert not said
    assert size < 32 << 20
    choose = random.Random(0).choices
    path.write_text("".join(" " + "".join(choose(string.ascii_lowercase, k=1000)) for _ in range(4096)))
    said, size = memory_of_training(path, 44 << 20, threads=1)
    assert not said
    assert size < 44 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_packed_text_that_nothing_cuts_is_refused_at_the_bound(tmp_path):
    """A pattern of one's own has no place where a cut is known to be safe, so the text is held until it ends."""
    path = tmp_path / "long.gz"
    path.write_bytes(gzip.compress(b"some words and more of them " * 2_000_000, 1))
    said, size = memory_of_training(path, 32 << 20, r"\w+ |.")
    assert said == [
        "a text that the pattern lets nobody cut needs more than the 33554432 bytes of memory allowed; allow more, or "
        "use a built-in pattern, special tokens, or a file that is neither packed nor JSON"
    ]
    assert size < 32 << 20
    assert not memory_of_training(path, 32 << 20)[0]


def test_whether_the_words_fit_does_not_depend_on_the_threads(tmp_path):
    path = tmp_path / "distinct.txt"
    path.write_text("".join(f" w{number}" for number in range(100_000)) * 25)
    expected = Tokenizer.train([path], 300, memory=64 << 20, threads=1).fingerprint
    for threads in (2, 16):
        assert Tokenizer.train([path], 300, memory=64 << 20, threads=threads).fingerprint == expected
    with pytest.raises(UserError, match="more than the 15 bytes"):
        Tokenizer.train([path], 300, memory=15, threads=2)
    # Fed texts likewise: nine texts, then their rest, in tables that fit together but in no thread's share.
    for rounds in (8, 9):
        counter = _core.WordCounter([], False, most_bytes=8 << 20, threads=2)
        for text in range(rounds):
            counter.feed("".join(f" {text}{number:05}" for number in range(10_000)))
            counter.end_text()
        counter.finish()
        assert counter.totals()[0] == rounds * 10_000


def test_hugging_faces_rule_for_ties_gives_its_merges(tmp_path):
    text = (PROSE + " zab zba bza yxw wxy xwy ") * 3
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=440, initial_alphabet=alphabet, show_progress=False)
    other.train_from_iterator([text], trainer)
    ours = train_on(tmp_path, text, 440, ties="huggingface")
    other.save(str(tmp_path / "tokenizer.json"))
    assert ours.merges == Tokenizer.load(tmp_path / "tokenizer.json").merges
    assert ours.merges != train_on(tmp_path, text, 440).merges
    with pytest.raises(UserError, match="ties is"):
        train_on(tmp_path, text, 440, ties="smallest")


def test_counts_add_up_over_parts_and_threads():
    """Feeding texts in parts of any size, to any number of threads, counts what the whole texts count."""

    def counts(texts, size, threads):
        counter = _core.WordCounter([END.encode()], False, threads=threads)
        for text in texts:
            for start in range(0, len(text), size):
                counter.feed(text[start : start + size])
            counter.end_text()
        counter.finish()
        return Counter(dict(counter.words())), counter.totals()[1]

    short = (PROSE + END).encode()
    for size in (1, 2, 3, 5, 17, 64, 1000):
        assert counts([short], size, 1) == counts([short], len(short), 1)
    # A part that fills a block may end within a letter of four bytes.
    wide = b"x " * ((1 << 19) - 2) + "a𝐀".encode()  # without its last byte 2^20
    counter = _core.WordCounter([], False)
    for part in (wide[:-1], wide[-1:]):
        counter.feed(part)
    counter.finish()
    assert dict(counter.words())[" a𝐀".encode()] == 1
    long = short * (3_000_000 // len(short))
    texts = [long, b"", short, b"x'", *[b"one text" * 9] * 40_000, long[:1_100_000].decode(errors="ignore").encode()]
    whole = counts(texts, 1 << 30, 1)
    assert whole[1] == sum(map(len, texts))
    for size, threads in ((1 << 20, 1), (70_001, 2), (1 << 20, 3)):
        assert counts(texts, size, threads) == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_bad_byte_of_an_iterator_is_named(threads):
    good = b"words and words " * 100_000
    texts = [good, good + b"\xff" + good + b"\xfe" + good, b"\xfd"]
    with pytest.raises(UserError, match=f"invalid UTF-8 at byte {len(good)};"):
        Tokenizer.train_from_texts(iter(texts), 300, threads=threads)
