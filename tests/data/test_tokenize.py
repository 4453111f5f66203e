"""Token directories against the text they came from: byte tokens decode by eye."""

import lzma
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from byte_tokenizer import EOT, byte_tokenizer

import groundup.data.tokenize as tokenize_module
from groundup.data import TokenData, token_dtype, tokenize_corpus
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer

EOT_ID = 256


def texts_of(tokens, offsets):
    """The documents as the offsets cut them, each checked to end with the only <|endoftext|> in it."""
    bounds = [*offsets.tolist(), len(tokens)]
    found = []
    for start, end in pairwise(bounds):
        ids = np.asarray(tokens[start:end]).tolist()
        assert ids.count(EOT_ID) == 1
        assert ids[-1] == EOT_ID
        found.append(bytes(ids[:-1]).decode())
    return found


@pytest.fixture
def small_jobs(monkeypatch):
    """Jobs of a few bytes, so that documents end and split inside and across them."""
    monkeypatch.setattr(tokenize_module, "JOB_BYTES", 7)


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_two_files_become_train_and_valid(tmp_path, small_jobs):
    train = ["Once upon ä time", "日本 🎉 words and more words", "x", " lead and trail \n"]
    valid = ["another one", "\nlast"]
    a = write(tmp_path / "a.txt", EOT + EOT.join(train) + EOT + EOT + "\n" + EOT)
    b = write(tmp_path / "b.txt", EOT.join(valid))
    meta = tokenize_corpus([a], [b], byte_tokenizer(), tmp_path / "tokens", threads=3)
    data = TokenData.open(tmp_path / "tokens")
    assert texts_of(data.train, data.train_docs) == train
    assert texts_of(data.valid, data.valid_docs) == valid
    assert data.train.dtype == np.uint16
    assert data.train_docs.dtype == np.uint64
    for split, texts in (("train", train), ("valid", valid)):
        size = sum(len(text.encode()) for text in texts)
        counts = meta["splits"][split]
        assert (counts["tokens"], counts["bytes"], counts["documents"]) == (size + len(texts), size, len(texts))
    assert meta["sources"]["train"] == [{"name": "a.txt", "files": 1, "bytes": a.stat().st_size}]
    assert data.meta == {"format": data.meta["format"], **meta}
    assert str(tmp_path) not in (tmp_path / "tokens" / "meta.json").read_text()
    assert data.bytes_per_token("valid") == 16 / 18


def test_decoding_gives_the_text_back(tmp_path):
    texts = [f"story {i}: " + "word ä " * (i % 7) for i in range(300)]
    path = write(tmp_path / "a.txt", EOT.join(texts))
    tokenize_corpus([path], [write(tmp_path / "b.txt", "b")], byte_tokenizer(), tmp_path / "tokens")
    data = TokenData.open(tmp_path / "tokens")
    assert data.tokenizer().decode(data.train) == EOT.join(texts) + EOT


@pytest.mark.parametrize(
    ("documents", "fraction", "wanted"), [(2, 0.01, 1), (2, 0.99, 1), (100, 0.1, 10), (5000, 0.01, 50)]
)
def test_one_file_is_split_by_document(tmp_path, documents, fraction, wanted):
    texts = [f"document {i}" for i in range(documents)]
    path = write(tmp_path / "a.txt", EOT.join(texts))
    found = []
    for out in ("one", "two"):
        tokenize_corpus([path], None, byte_tokenizer(), tmp_path / out, fraction, threads=1 + (out == "two"))
        data = TokenData.open(tmp_path / out)
        found.append((texts_of(data.train, data.train_docs), texts_of(data.valid, data.valid_docs)))
    train, valid = found[0]
    assert found[0] == found[1]
    assert len(valid) == wanted
    assert sorted(train + valid) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the file's order
    numbers = [int(text.split()[1]) for text in valid]
    if wanted >= 10:  # from all over the file
        assert min(numbers) < documents * 0.4 < documents * 0.6 < max(numbers)


def test_long_documents_keep_to_their_split(tmp_path, small_jobs):
    texts = [f"document {i} has some more words than fit" for i in range(40)]
    path = write(tmp_path / "a.txt", EOT.join(texts))
    tokenize_corpus([path], None, byte_tokenizer(), tmp_path / "t", 0.3, threads=2)
    data = TokenData.open(tmp_path / "t")
    both = texts_of(data.train, data.train_docs) + texts_of(data.valid, data.valid_docs)
    assert len(data.valid_docs) == 12
    assert sorted(both) == sorted(texts)


@pytest.mark.parametrize("small", [False, True])
def test_a_single_document_is_cut_near_its_end(tmp_path, small, monkeypatch):
    if small:
        monkeypatch.setattr(tokenize_module, "JOB_BYTES", 50)
    text = "".join(f"line {i} of the only text\n" for i in range(1000))
    meta = tokenize_corpus([write(tmp_path / "a.txt", text)], None, byte_tokenizer(), tmp_path / "t", 0.1)
    data = TokenData.open(tmp_path / "t")
    (train,), (valid,) = texts_of(data.train, data.train_docs), texts_of(data.valid, data.valid_docs)
    assert train + valid == text
    assert 0.09 < len(valid) / len(text) <= 0.1
    assert train.endswith("\n") or small
    assert meta["split_by"] == "end of the only document"


@pytest.mark.parametrize("text", ["ab", "a\n", "no newline in here", "ü" * 100])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_a_tiny_document_gives_both_sides_something(tmp_path, text, fraction):
    tokenize_corpus([write(tmp_path / "a.txt", text)], None, byte_tokenizer(), tmp_path / "t", fraction)
    data = TokenData.open(tmp_path / "t")
    (train,), (valid,) = texts_of(data.train, data.train_docs), texts_of(data.valid, data.valid_docs)
    assert train
    assert valid
    assert train + valid == text


def test_other_special_tokens_count_no_bytes(tmp_path):
    tokenizer = byte_tokenizer("<|user|>", "<| spaced |>", EOT)
    a = write(tmp_path / "a.txt", f"<|user|>hi <| spaced |>ü{EOT}you<|user|>")
    meta = tokenize_corpus([a], [write(tmp_path / "b.txt", "b")], tokenizer, tmp_path / "t")
    assert meta["splits"]["train"] == meta["splits"]["train"] | {
        "tokens": 3 + 2 + 3 + 5,
        "bytes": 3 + 2 + 3,
        "documents": 2,
    }
    assert TokenData.open(tmp_path / "t").train[-1] == tokenizer.eot_id == 258


def test_a_special_token_with_spaces_is_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "JOB_BYTES", 1)
    tokenizer = byte_tokenizer("<|a b c d|>", EOT)
    a = write(tmp_path / "a.txt", "x y <|a b c d|> z w " * 20)
    tokenize_corpus([a], [write(tmp_path / "b.txt", "b")], tokenizer, tmp_path / "t")
    assert np.count_nonzero(TokenData.open(tmp_path / "t").train == 256) == 20


def test_invalid_bytes_replaced_and_counted_or_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad" + EOT.encode() + b"\xfe")
    args = [tmp_path / "a.txt"], [write(tmp_path / "b.txt", "b")], byte_tokenizer(), tmp_path / "t"
    with pytest.raises(UserError, match="invalid UTF-8 at byte 5"):
        tokenize_corpus(*args)
    assert not (tmp_path / "t").exists()
    assert tokenize_corpus(*args, errors="replace")["replaced"] == 2
    data = TokenData.open(tmp_path / "t")
    assert texts_of(data.train, data.train_docs) == ["good \ufffd bad", "\ufffd"]


def test_dtype_changes_past_65536_ids():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32


def test_a_vocabulary_past_65536_is_written_as_uint32(tmp_path):
    for size, dtype in ((65536, np.uint16), (65537, np.uint32)):
        vocab = {i: bytes([i]) if i < 256 else b"\xff%d" % i for i in range(size - 1)}
        tokenizer = Tokenizer(vocab, [], [EOT])
        a, b = write(tmp_path / "a.txt", "abc"), write(tmp_path / "b.txt", "b")
        tokenize_corpus([a], [b], tokenizer, tmp_path / "t")
        data = TokenData.open(tmp_path / "t")
        assert data.train.dtype == dtype
        assert data.train.tolist() == [97, 98, 99, size - 1]


def test_progress_runs_to_the_total(tmp_path, small_jobs):
    path = write(tmp_path / "a.txt", EOT.join(f"document {i}" for i in range(50)))
    calls = []
    tokenize_corpus([path], None, byte_tokenizer(), tmp_path / "t", progress=lambda *now: calls.append(now))
    size = path.stat().st_size
    assert calls == sorted(calls, key=lambda call: (call[0] == "encode", call[1]))
    assert [call for call in calls if call[1] == size] == [("split", size, size), *[("encode", size, size)] * 2]
    calls.clear()
    valid = write(tmp_path / "b.txt", "b")
    tokenize_corpus([path], [valid], byte_tokenizer(), tmp_path / "t", progress=lambda *now: calls.append(now))
    assert {(phase, total) for phase, _, total in calls} == {("encode", size + 1)}
    assert calls[-1][1] == size + 1


def test_more_threads_have_smaller_jobs_and_write_the_same(tmp_path):
    """Else the text in memory would grow with the threads. A single document is cut at the same place all the same."""
    words = "".join(f"word{number * 7919 % 10_007}" + " \n"[number % 100_000 == 0] for number in range(300_000))
    many = write(tmp_path / "many.txt", EOT.join(words[start : start + 500] for start in range(0, len(words), 500)))
    alone = write(tmp_path / "one.txt", words)
    jobs, written = [], []
    for threads in (1, 16):
        for text in (many, alone):
            phases, out = [], tmp_path / str(threads)
            told = lambda phase, *_, phases=phases: phases.append(phase)  # noqa: E731
            tokenize_corpus([text], None, byte_tokenizer(), out, 0.4, threads=threads, progress=told)
            jobs.append(phases.count("encode"))
            written.append([(out / name).read_bytes() for name in ("train.npy", "valid.npy", "train.docs.npy")])
    assert jobs[0] < 6 < 12 <= jobs[2]
    assert written[:2] == written[2:]


class Broken(Exception):
    pass


def test_an_error_half_way_leaves_the_earlier_directory(tmp_path, small_jobs):
    good = write(tmp_path / "a.txt", f"first{EOT}second")
    out = tmp_path / "t"
    tokenize_corpus([good], None, byte_tokenizer(), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    long = write(tmp_path / "long.txt", EOT.join(f"document {i}" for i in range(500)))

    def fail(phase, done, total):
        if phase == "encode" and done > 1000:
            raise Broken

    with pytest.raises(Broken):
        tokenize_corpus([long], None, byte_tokenizer(), out, progress=fail)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "long.txt", "t"]
    tokenize_corpus([long], None, byte_tokenizer(), out)
    assert TokenData.open(out).meta["splits"]["train"]["documents"] == 495


def test_a_full_disk_is_one_line(tmp_path):
    resource = pytest.importorskip("resource")
    path = write(tmp_path / "a.txt", "word " * 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # Python ignores SIGXFSZ: the write fails
    try:
        with pytest.raises(UserError, match=r"cannot be written \(File too large\); what was there before is kept"):
            tokenize_corpus([path], None, byte_tokenizer(), tmp_path / "t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_refusals(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", f" {EOT}\n")
    tokenizer, out = byte_tokenizer(), tmp_path / "t"
    for args, message in [
        (([a], [tmp_path / "c.txt"], tokenizer, out), "c.txt: no such file"),
        (([a], [b], tokenizer, out), "b.txt: no text for valid.npy"),
        (([b], [a], tokenizer, out), "b.txt: no text for train.npy"),
        (([b], None, tokenizer, out), "b.txt: no text to split"),
        (([a], None, tokenizer, out), "a.txt: no text to split"),
        (([a], [a], tokenizer, out), "a.txt: given for training and for validation"),
        (([a], [tmp_path], tokenizer, out), "a.txt: given for training and for validation"),
        (([a], None, tokenizer, out, 1.5), "validation fraction is 1.5"),
        (([a], [b], tokenizer, out, 0.1), "not both"),
        (([a], [b], byte_tokenizer("<|other|>"), out), "no special token <|endoftext|>.*--special-token"),
        (([a], None, tokenizer, a), "is a file"),
        (([a], None, tokenizer, tmp_path), "holds a.txt, which tokenize did not write"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            tokenize_corpus(*args)
        assert "\n" not in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_a_special_token_that_overlaps_the_separator_is_refused(tmp_path):
    a = write(tmp_path / "a.txt", f"a{EOT}b")
    with pytest.raises(UserError, match="overlaps"):
        tokenize_corpus([a], None, byte_tokenizer(EOT, f"{EOT}b", f"a{EOT}"), tmp_path / "t", 0.5)


MEASURE = """
import sys, threading
from groundup.data import tokenize_corpus
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.profile import anonymous_bytes

tokenizer, peak, done = Tokenizer.load(sys.argv[2]), 0, threading.Event()
def sample():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous_bytes())
thread = threading.Thread(target=sample)
thread.start()
tokenize_corpus([sys.argv[1]], None, tokenizer, sys.argv[3], threads=int(sys.argv[4]))
done.set()
thread.join()
print(peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["2", "16"])
def test_memory_stays_below_300_mb(corpora, tmp_path, threads):
    """All anonymous memory of the process, Python and numpy included, on 100 MB of text and one document."""
    with lzma.open(corpora / "english_100mb.txt.xz") as file:
        data = file.read()
    (tmp_path / "documents.txt").write_bytes(data)
    (tmp_path / "one.txt").write_bytes(data[:40_000_000].replace(EOT.encode(), b" "))
    Tokenizer.train([tmp_path / "one.txt"], 2000, [EOT]).save(tmp_path / "tok")
    for name in ("documents.txt", "one.txt"):
        command = [sys.executable, "-c", MEASURE, tmp_path / name, tmp_path / "tok", tmp_path / "out", threads]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(found.stdout) < 300e6


@pytest.mark.slow
def test_real_text_comes_back_from_real_tokens(corpora, tmp_path):
    for name in ("stories_valid", "code_16mb", "multilingual_20mb"):
        with lzma.open(corpora / f"{name}.txt.xz") as file:
            text = file.read(2_000_000).decode(errors="ignore")
        path = write(tmp_path / f"{name}.txt", text)
        tokenizer = Tokenizer.train([path], 1000, special_tokens=[EOT], threads=2)
        out = tmp_path / name
        meta = tokenize_corpus([path], [write(tmp_path / "b.txt", "b")], tokenizer, out, threads=2)
        data = TokenData.open(out)
        texts = [part for part in text.split(EOT) if part.strip()]
        assert data.tokenizer().decode(data.train) == EOT.join(texts) + EOT
        ids = [id_ for part in texts for id_ in [*tokenizer.encode(part), tokenizer.eot_id]]
        assert np.array_equal(data.train, ids)
        assert meta["splits"]["train"]["bytes"] == sum(len(part.encode()) for part in texts)
