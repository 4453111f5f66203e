"""Where the referees' Unicode tables differ from ours, code point by code point: unicode_differences.txt lists all.

Ours are those of the `regex` package (test_pre_tokens.py holds the core to them). When a referee has a newer version,
`python tests/tokenizer/test_unicode.py` writes the list anew.
"""

import itertools
import unicodedata
from collections.abc import Iterator

import pytest
import regex
import tiktoken
import tokenizers
from texts import CHARACTERS, DIFFERENCES, PYTHON, differing

from groundup import _core
from groundup.tokenizer import reference

OF_PATTERNS = ("L", "N")  # what the patterns with a scanner tell apart, beside white space
OF_O200K = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "N")
REFEREES = {"tiktoken": OF_PATTERNS, "tokenizers": OF_PATTERNS, PYTHON: OF_PATTERNS, "own": OF_O200K}


def members(referee: str, category: str) -> set[str]:
    """The characters of a category ("s": white space) for a referee; "own": the engine for a pattern of one's own."""
    expression = r"\s" if category == "s" else rf"\p{{{category}}}"
    if referee == "regex":
        return set(regex.findall(expression, CHARACTERS))
    if referee == PYTHON:
        return {character for character in CHARACTERS if unicodedata.category(character).startswith(category)}
    if referee == "tiktoken":  # leaves out what its pattern does not match
        ranks = {bytes([byte]): byte for byte in range(256)}
        encoding = tiktoken.Encoding("x", pat_str=expression + "+", mergeable_ranks=ranks, special_tokens={})
        return set(encoding.decode(encoding.encode_ordinary(CHARACTERS)))
    if referee == "tokenizers":
        removing = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"[{expression}]+"), "removed")
        return set(CHARACTERS).difference(*(piece for piece, _ in removing.pre_tokenize_str(CHARACTERS)))
    mark = "a" if category in ("M", "N") else "1"
    pieces = _core.pre_tokens("".join(character + mark for character in CHARACTERS), f"{expression}{mark}|{mark}")
    return {piece.decode()[0] for piece in pieces if len(piece.decode()) == 2}


def differences(referee: str) -> Iterator[str]:
    """A line a range: referee, first and last code point, our class, the referee's ("-": another)."""

    def classes(source: str) -> dict[str, str]:
        return {character: name for name in REFEREES[referee] for character in members(source, name)}

    ours, theirs = classes("regex"), classes(referee)
    found = [
        (ord(character), ours.get(character, "-"), theirs.get(character, "-"))
        for character in sorted(ours.keys() | theirs.keys())
        if ours.get(character) != theirs.get(character)
    ]
    for _, group in itertools.groupby(enumerate(found), lambda item: (item[1][0] - item[0], item[1][1:])):
        run = [difference for _, difference in group]
        yield f"{referee} {run[0][0]:05X} {run[-1][0]:05X} {run[0][1]} {run[0][2]}"


@pytest.mark.parametrize("referee", REFEREES)
def test_the_list_of_differences_is_complete(referee):
    listed = [line for line in DIFFERENCES.read_text().splitlines() if line.startswith(f"{referee} ")]
    if referee == PYTHON and not listed:
        pytest.skip(f"no list for {PYTHON}")
    assert list(differences(referee)) == listed
    assert set(differing(referee)) < {character for name in OF_O200K for character in members("regex", name)}


def test_all_agree_on_white_space():
    for referee in ("regex", "tiktoken", "tokenizers", "own"):
        assert members(referee, "s") == reference.WHITE_SPACE, referee


if __name__ == "__main__":
    others = [line for line in DIFFERENCES.read_text().splitlines() if line.split()[0] not in REFEREES]
    lines = [line for referee in REFEREES for line in differences(referee)]
    DIFFERENCES.write_text("\n".join(sorted(others + lines)) + "\n")
