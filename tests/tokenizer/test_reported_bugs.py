"""Bugs that users of other tokenizers reported, each with its smallest input: none of them is ours.

More of them stand where they belong: 10 MB without a word boundary, one 1 MB word, fork, lone surrogates, unknown ids
(test_encode.py, test_train.py), overlapping special tokens (test_specials.py), the bound on memory (test_sources.py).
"""

import json
import random
import subprocess
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
from texts import END, PROSE, gpt2, train_on

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer, reference
from groundup.tokenizer.byte_level import to_characters


def merges_of_counts(counts: dict[bytes, int], wanted: int) -> list[tuple[bytes, bytes]]:
    counter = _core.WordCounter([], False)
    for word, count in counts.items():
        counter.add_word(word, count)
    return counter.train(wanted, None)


def test_pairs_that_occur_more_than_2_to_the_31_times_are_not_lost():
    """huggingface/tokenizers#2058, #437, #1170: 30 million lines of 80 spaces and an x; 32-bit counts overflow."""
    counts = {b" " * 79: 30_000_000, b" x": 30_000_000, b"\n": 30_000_000, b"ab": 2_000_000_000}
    merges = merges_of_counts(counts, 3)
    assert merges[0] == (b" ", b" ")
    assert merges[1] == (b"a", b"b")  # 2·10⁹ > 19 · 30·10⁶, of the pairs of the double space
    exact = 2**40
    assert merges_of_counts({b"ab": exact, b"cd": exact + 1, b"ef": exact - 1}, 3) == [
        (b"c", b"d"),
        (b"a", b"b"),
        (b"e", b"f"),
    ]


@pytest.mark.parametrize("kind", ["dna", "json"])
def test_a_text_of_one_line_trains(tmp_path, kind):
    """huggingface/tokenizers#497, #1313: DNA and single-line JSON took hours."""
    choose = random.Random(0).choices
    if kind == "dna":
        text = "".join(choose("ACGT", k=500_000))
    else:
        text = json.dumps([{"id": n, "tags": choose("abc", k=3)} for n in range(12_000)], separators=(",", ":"))
    tokenizer = train_on(tmp_path, text, 600)
    assert tokenizer.vocab_size == 600
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_order_of_the_text_decides_no_tie(tmp_path):
    """karpathy/minbpe#90, huggingface/tokenizers#1794: the same counts in another order gave another vocabulary."""
    one = train_on(tmp_path, "aaabbbccccdddd", 260)
    other = train_on(tmp_path, "bbbaaaddddcccc", 260)
    assert one.merges == other.merges == [(b"d", b"d"), (b"c", b"c"), (b"b", b"b"), (b"a", b"a")]
    words = (PROSE * 3).split()
    expected = train_on(tmp_path, "\n".join(words), 400).merges
    for seed in range(3):
        random.Random(seed).shuffle(words)
        assert train_on(tmp_path, "\n".join(words), 400).merges == expected


def test_data_loader_workers_encode_after_the_parent_has_trained_and_encoded(tmp_path):
    """huggingface/tokenizers#258, #187: workers hung. Forked, as DataLoader does on Linux."""
    from torch.utils.data import DataLoader

    tokenizer = train_on(tmp_path, PROSE * 500, 400, threads=2)
    texts = [PROSE * (1 + n % 5) for n in range(24)]
    expected = tokenizer.encode_batch(texts * 20, threads=2)[:24]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(
            texts, batch_size=4, num_workers=2, collate_fn=tokenizer.encode_batch, multiprocessing_context="fork"
        )
        assert [ids for batch in loader for ids in batch] == expected


def test_both_forms_of_merges_load_and_say_the_same(tmp_path):
    """huggingface/tokenizers#2078: lines "a b" and pairs ["a", "b"] disagreed."""
    tokenizer = train_on(tmp_path, PROSE * 3, 420, special_tokens=[END])
    tokenizer.save(tmp_path / "pairs")
    content = json.loads((tmp_path / "pairs" / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "lines.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "lines.json").fingerprint == tokenizer.fingerprint


def test_tokens_of_spaces_newlines_and_bytes_never_seen_reload(tmp_path):
    """huggingface/tokenizers#566, #645, #1475, #909, #482, #588: files that could not be read back."""
    text = "a\n\n\n b\r\n\r\n \t\t x\u2028\u2028\u0085\xa0\xa0 #version: 0.2 \n#version #version\n\n" * 30
    tokenizer = train_on(tmp_path, text, 275, special_tokens=[" \n", "#version", "a b"])
    assert any(b"\n\n" in token for token in tokenizer.vocab.values())
    tokenizer.save(tmp_path / "out")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "pair").mkdir(exist_ok=True)
        (tmp_path / "pair" / name).write_bytes((tmp_path / "out" / name).read_bytes())
    every_byte = bytes(range(256)) * 2
    for folder in ("out", "pair"):
        again = Tokenizer.load(tmp_path / folder)
        assert again.merges == tokenizer.merges
        assert again.vocab == tokenizer.vocab
        assert again.special_tokens == tokenizer.special_tokens
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode_bytes(again.encode(every_byte)) == every_byte


def test_a_special_token_spelled_like_an_ordinary_one_is_said_to_be_lost_in_the_pair_of_files(tmp_path):
    tokenizer = Tokenizer({b: bytes([b]) for b in range(256)}, [], ["a", "Ġ"])
    with pytest.warns(UserWarning, match="special tokens 'a', 'Ġ' are spelled like ordinary tokens"):
        tokenizer.save(tmp_path / "out")
    with pytest.warns(UserWarning, match="special tokens 'a', 'Ġ' are spelled like ordinary tokens"):
        tokenizer.save_json(tmp_path / "a.json")
    assert Tokenizer.load(tmp_path / "out").fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(tmp_path / "a.json").fingerprint == tokenizer.fingerprint
    with pytest.raises(UserError, match="special token 'a' is spelled like an ordinary one"):
        tokenizer.to_hf()


def test_many_special_tokens_are_found_as_the_definition_says():
    """openai/tiktoken#438, #441: hundreds of special tokens, many of which begin alike."""
    names = [f"<|x{n}|>" for n in range(300)] + [f"<|x{n}" for n in range(30)] + ["<|x"]
    tokenizer = Tokenizer({b: bytes([b]) for b in range(256)}, [], names)
    text = "".join(random.Random(1).choices([*names, "a", "<", "|>", " "], k=400))
    assert tokenizer.encode(text) == reference.encode(text, tokenizer.vocab, [], tokenizer.special_tokens)


def test_special_tokens_decode():
    """karpathy/minbpe#64: ids of special tokens could not be decoded."""
    assert gpt2().decode([15496, 50256, 995]) == f"Hello{END} world"
    assert gpt2().decode(gpt2().encode(END + END)) == END + END


def test_ids_take_two_bytes_each_not_forty():
    """qlabs-eng/slowrun#97: a Python list of ids is 40 bytes a token."""
    text = (PROSE * 2000).encode()
    tracemalloc.start()
    ids = gpt2().encode_numpy(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ids.dtype == np.uint16
    assert peak < ids.nbytes + 100_000


CACHE = """
import random, sys
from pathlib import Path
from groundup.tokenizer import Tokenizer

def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1])

tokenizer = Tokenizer.load(sys.argv[1])
choose = random.Random(0).choices
sizes = []
for part in range(8):
    letters = "".join(choose("abcdefghijklmnopqrstuvwxyz      ", k=1_500_000))
    tokenizer.encode_numpy(letters)
    tokenizer.encode_numpy("".join(choose("abcdefgh", k=100_000)))
    sizes.append(anonymous())
print(*sizes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_cache_of_words_stops_growing(tmp_path):
    """huggingface/tokenizers#1539, marcelroed/gigatoken#36: memory grew with every new word and every long one."""
    gpt2().save(tmp_path / "gpt2")
    command = [sys.executable, "-c", CACHE, str(tmp_path / "gpt2")]
    sizes = [int(size) for size in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    # In KiB. 1.5 million new words go through after the second size, some 90 MB if all were kept.
    assert max(sizes) - sizes[1] < 30_000, sizes


def test_training_and_encoding_print_nothing(tmp_path, capfd):
    """gigatoken's trainer writes "Using 2 threads..." to standard output, which breaks pipes."""
    train_on(tmp_path, PROSE * 10, 300, threads=2).encode_batch([PROSE] * 2000, threads=2)
    assert capfd.readouterr() == ("", "")


def test_a_pattern_is_part_of_the_files(tmp_path):
    """karpathy/nanochat#291: training and use cut text differently."""
    tokenizer = train_on(tmp_path, PROSE * 3, 400)
    tokenizer.save(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["pre_tokenizer"]
    assert (stored["type"], stored["use_regex"]) == ("ByteLevel", True)
    assert Tokenizer.load(tmp_path / "out").pattern == tokenizer.pattern == "gpt2"
    assert all(to_characters(token) for token in tokenizer.vocab.values())
