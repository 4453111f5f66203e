"""The hand-written scanner against the `regex` package, and the plain Python pre-tokenizer against both."""

import subprocess
import sys
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from texts import PROSE, PYTHON, known_to, real_text, weird_text

from groundup import _core
from groundup.tokenizer import reference
from groundup.tokenizer.formats import GPT2_PATTERN

PATTERN = regex.compile(GPT2_PATTERN)
ROOT = Path(__file__).parents[2]


def scanned(text: str) -> list[str]:
    return [piece.decode() for piece in _core.pre_tokens(text)]


def test_the_class_of_every_code_point_is_that_of_the_regex_package():
    """A code point between letters, numbers and others shows its class by the cuts around it."""
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    text = "".join(f"a{chr(code)}1{chr(code)}." for code in codes)
    ours, theirs = scanned(text), PATTERN.findall(text)
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    assert ours == theirs, f"first difference at {ours[place]!r}: another Unicode version? See unicode_ranges.py"


@pytest.mark.slow
def test_the_checked_in_table_is_what_its_generator_writes():
    script = ROOT / "rust" / "tools" / "unicode_ranges.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@settings(max_examples=800)
@given(weird_text)
def test_equals_the_regex_on_weird_text(text):
    assert scanned(text) == PATTERN.findall(text)


@settings(max_examples=300)
@given(weird_text)
def test_the_reference_equals_the_regex_where_unicode_versions_agree(text):
    known = known_to(PYTHON, text)
    assert list(reference.pre_tokens(known)) == PATTERN.findall(known)


@pytest.mark.parametrize("text", [PROSE, "", " ", "\n", "'", "''s", " 's", "a  ", "  a", "\u3000 \u3000a", "don't'd"])
def test_equals_the_regex_on_chosen_text(text):
    assert scanned(text) == PATTERN.findall(text) == list(reference.pre_tokens(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories_valid", "multilingual_20mb", "code_16mb"])
def test_equals_the_regex_on_real_text(corpora, name):
    text = real_text(corpora, name, 8_000_000)
    assert scanned(text) == PATTERN.findall(text)
